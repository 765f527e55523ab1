"""Ids and offsets that somebody changes during a lookup: each is read once, and what was read is checked and used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore.kernels import slots as kernels
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.store import arguments

pytestmark = pytest.mark.kernel

ROWS, DIM, BAGS = 150, 40, 70
NOT_A_ROW = 10 * ROWS


class Changing(np.ndarray[Any, Any]):
    """An array whose elements are ``later`` from their second reading on."""

    later: int
    read: set[int]

    def __array_finalize__(self, made_from: Any) -> None:
        self.later, self.read = getattr(made_from, "later", 0), set()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int | np.integer):
            return super().__getitem__(index)
        if index in self.read:
            return self.dtype.type(self.later)
        self.read.add(int(index))
        return super().__getitem__(index)


def _have_change(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """All ids and offsets, of every lookup."""
    check_ids: Callable[..., Any] = arguments.check_ids

    def checked(*given: Any, **named: Any) -> Any:
        made = check_ids(*given, **named).copy().view(Changing)
        made.later = later
        return made

    for module in (arguments, tierstore.store.table):
        monkeypatch.setattr(module, "check_ids", checked)


def _open(**where: Any) -> tierstore.Store:
    store = tierstore.open(cold="memory", policy="lru", **where)
    for name in ("looked up", "another"):
        rule = tierstore.optim.SGD(lr=0.5)
        store.create_table(tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule))
    for table in store.tables.values():
        table.read(torch.arange(ROWS))  # else ids are read again when it is known that a row is missing
    return store


def _everything(store: tierstore.Store) -> list[torch.Tensor]:
    generator, table = np.random.default_rng(0), store["looked up"]
    lengths = generator.integers(0, 4, BAGS)
    lengths[40] = kernels.SCRATCH_SLOTS + 30  # a bag of several blocks
    offsets = torch.from_numpy(np.append(0, np.cumsum(lengths)))
    ids = torch.from_numpy(generator.integers(0, ROWS, lengths.sum()))
    found = [table.pooled(ids, offsets, mode="mean"), table.pooled(ids, offsets, mode="max"), table.read(ids)]
    bag = tierstore.TieredEmbeddingBag(table, include_last_offset=True)
    for given in (ids, ids.int()):
        pooled = bag(given, offsets)
        pooled.square().sum().backward()
        found.append(pooled.detach())
    table.write(ids[:3], torch.zeros(3, DIM))
    return found + [each.read(torch.arange(ROWS)) for each in store.tables.values()]


PLACES = [{"ddr": "1MiB"}, {"ddr": "420KiB"}, {"ddr": "1MiB", "hbm": "1MiB", "device": "cpu"}]
plain_python = pytest.mark.skipif(JIT_ENABLED, reason="compiled code reads memory that no test can watch")


@plain_python
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_an_id_is_read_once(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with _open(**where) as store:
        expected = _everything(store)
    _have_change(monkeypatch, NOT_A_ROW)
    with _open(**where) as store:
        for one, other in zip(_everything(store), expected, strict=True):
            assert torch.equal(one, other)


@plain_python
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_an_id_that_was_none_is_refused(where: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _have_change(monkeypatch, 0)
    with _open(**where) as store:
        table, ids = store["looked up"], torch.arange(9)
        ids[5] = NOT_A_ROW
        for look_up in (
            lambda: table.pooled(ids, torch.tensor([0, 9])),
            lambda: table.read(ids),
            lambda: tierstore.TieredEmbedding(table)(ids),
        ):
            with pytest.raises(ValueError, match="'looked up' when it was read, and is 0 now"):
                look_up()
        with pytest.raises(ValueError, match="offsets must start at 0"):
            table.pooled(ids[:5], torch.tensor([3, 5]))


def test_a_recorder_takes_ids_and_offsets_that_changed(tmp_path: Path) -> None:
    offsets = np.array([0, 2, 4])
    with _open(ddr="1MiB") as store, store.record(tmp_path / "trace.npz", rate=1.0) as recorder:
        for wrong in (-(2**62), 2**62, NOT_A_ROW):
            recorder.note_bags(1, ROWS, np.full(4, wrong), offsets)
        recorded = recorder.describe()
        for changed in ([3, 2, 4], [0, 2, 400], [-5, 2, 4], [0, 5, 4]):
            recorder.note_bags(1, ROWS, np.zeros(4, np.int64), np.array(changed))
        assert recorder.describe() == recorded
