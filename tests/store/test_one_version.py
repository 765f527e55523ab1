"""Lookups beside a change of version in another thread: each shows rows of one version."""

import ctypes
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore.pool import direct
from tierstore.store import Store

ROWS, DIMS = 150, {"a": 40, "b": 48}
EVERY, STARTS = torch.arange(ROWS), torch.arange(0, ROWS, 2)
PLACES: dict[str, Any] = {
    "in memory": {"ddr": "2MiB"},
    "evicting": {"ddr": "500KiB"},
    "on device": {"ddr": "2MiB", "hbm": "2MiB"},
}
TURNS = 6  # moments of a lookup at which the version changes
_PACKAGE = str(Path(tierstore.__file__).parent)

Change = Callable[[], Any]


def _put(store: Store, value: int) -> None:
    for name, dim in DIMS.items():
        store[name].write(EVERY, torch.full((ROWS, dim), float(value)))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Store]:
    with tierstore.open(tmp_path / "store", ddr="2MiB") as store:
        for name, dim in DIMS.items():
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=dim))
        _put(store, 0)
        store.commit()
        yield store


def _lookups(store: Store) -> dict[str, Callable[[], torch.Tensor]]:
    a, bag = store["a"], tierstore.TieredEmbeddingBag(store["a"])
    collection = tierstore.TieredEmbeddingBagCollection(store)
    lengths = torch.ones(2 * ROWS, dtype=torch.int64)
    jagged = tierstore.KeyedJaggedTensor(["a", "b"], EVERY.repeat(2), lengths=lengths)
    return {
        "read": lambda: a.read(EVERY),
        "pooled": lambda: a.pooled(EVERY, torch.arange(ROWS + 1), mode="mean"),
        "max": lambda: a.pooled(EVERY, torch.arange(ROWS + 1), mode="max"),
        "bag": lambda: bag(EVERY, STARTS),
        "collection": lambda: collection(jagged).values(),
    }


def _interrupted(look_up: Callable[[], torch.Tensor], line: int, change: Change) -> tuple[torch.Tensor, int]:
    """What it finds if, at or behind the given line that it runs of the package, another thread moves to another
    version; and how many lines it ran."""
    lines, thread = itertools.count(), threading.Thread(target=change)
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            count = next(lines)
            if count == line:
                thread.start()
                thread.join(0.05)  # no longer, as it may wait for this lookup
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = look_up()
    finally:
        sys.settrace(before)
    if thread.ident is None:  # it ran fewer lines
        thread.start()
    thread.join()
    return found, count


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", ["read", "pooled", "max", "bag", "collection"])
def test_whenever_the_version_changes(writer: Store, where: str, kind: str) -> None:
    with tierstore.open(writer.directory, mode="r", policy="lru", **PLACES[where]) as reader:
        look_up = _lookups(reader)[kind]
        look_up()
        _, lines = _interrupted(look_up, -1, reader.refresh)
        for value, line in enumerate(np.linspace(1, lines, TURNS).astype(int).tolist(), 1):
            _put(writer, value)
            writer.commit()
            found, _ = _interrupted(look_up, line, reader.refresh)
            assert found.min() == found.max()
            assert reader.version == writer.version
            assert look_up().min() == look_up().max() == value * (2 if kind == "bag" else 1)


@pytest.mark.parametrize("where", ["in memory", "evicting"])
def test_while_rows_come_in(writer: Store, where: str) -> None:
    value, lines = 0, 1
    for turn in range(3 * TURNS):
        with tierstore.open(writer.directory, mode="r", policy="lru", **PLACES[where]) as reader:
            reader["a"].read(EVERY[-1:])
            value += 1
            _put(writer, value)
            writer.commit()
            newer = reader.find_newer()
            assert newer is not None
            found, lines = _interrupted(lambda: reader["a"].read(EVERY), lines * turn // (3 * TURNS), newer.show)
            assert found.min() == found.max()
            assert reader["a"].read(EVERY).flatten().tolist() == [value] * ROWS * DIMS["a"]


@pytest.mark.parametrize("kind", ["pooled", "bag"])
def test_while_rows_are_added_up(writer: Store, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with tierstore.open(writer.directory, mode="r", ddr="2MiB") as reader:
        look_up = _lookups(reader)[kind]
        look_up()
        _put(writer, 1)
        writer.commit()
        for name, written in _WRITTEN.items():
            monkeypatch.setattr(direct, name, _torn(getattr(direct, name), written, reader.refresh))
        found = look_up()
        assert found.min() == found.max() == (2 if kind == "bag" else 1)


def _at(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


_WRITTEN: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "pool_at": lambda arguments: _at(arguments[7], arguments[5] * DIMS["a"]),
    "look_up": lambda arguments: arguments[-3],
}
"""By kernel: what it writes, given its arguments."""


def _torn(run: Callable[..., Any], written: Callable[[tuple[Any, ...]], Any], change: Change) -> Callable[..., Any]:
    """A kernel with a change after half of its work."""

    def call(*arguments: Any) -> Any:
        run(*arguments)
        out = written(arguments)
        first_half = out[: len(out) // 2].copy()
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
        status = run(*arguments)
        out[: len(first_half)] = first_half
        return status

    return call
