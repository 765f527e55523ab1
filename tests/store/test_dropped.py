"""What a store that is closed, or a table that is made again, tells of what its caller may not have meant."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore import errors, optim
from tierstore.system.signals import settle

CONFIG = tierstore.TableConfig(name="item", num_embeddings=40, embedding_dim=8, optimizer=optim.SGD(lr=0.1))
SAID = "{}: changes of 1 table since the last commit are dropped (item); call store.commit() before close"


def _opened(path: Path | None, **settings: str) -> tierstore.Store:
    if path is None:
        return tierstore.open(cold="memory", ddr="4MiB")
    store = tierstore.open(path, ddr="4MiB", **settings)  # type: ignore[arg-type]
    if not store.readonly:
        store.create_table(CONFIG)
    return store


def _change(store: tierstore.Store) -> None:
    tierstore.TieredEmbeddingBag(store["item"])(torch.tensor([[1, 2]])).sum().backward()


def _told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, str]]:
    return [(each.name, each.levelname, each.message) for each in caplog.records if each.module in ("store", "catalog")]


def test_changes_that_close_drops_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for way in ("close", "with", "del"):
        store = _opened(tmp_path)
        if way == "with":
            with store:
                _change(store)
        else:
            _change(store)
        if way == "close":
            store.close()
            store.close()
        del store
        gc.collect()
        settle(60)  # a thread closes what the collector finds
        assert _told(caplog) == [("tierstore", "WARNING", SAID.format(tmp_path))], way
        caplog.clear()


def test_the_end_of_a_process_tells_them_too(tmp_path: Path) -> None:
    code = """import sys, tierstore, torch
store = tierstore.open(sys.argv[1], ddr="4MiB")
item = store.create_table(tierstore.TableConfig(name="item", num_embeddings=40, embedding_dim=8))
item.write(torch.tensor([1]), torch.ones(1, 8))"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert SAID.format(tmp_path) in done.stderr


def test_opening_looks_at_no_other_store_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file system may be dead by then."""
    with _opened(tmp_path / "dead"):
        lstat, looked = os.lstat, list[str]()
        monkeypatch.setattr(os, "lstat", lambda path, **more: looked.append(str(path)) or lstat(path, **more))
        _opened(tmp_path / "other").close()
        assert [path for path in looked if "dead" in path] == []


def test_nothing_is_told_where_nothing_is_lost_or_the_loss_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _opened(tmp_path):
        pass
    with _opened(tmp_path) as store:
        _change(store)
        store.commit()
        _change(store)
        store.commit_async()
    with _opened(tmp_path) as store:
        _change(store)
        store.rollback(store.version)
    with _opened(tmp_path, mode="r") as store:
        store["item"].read(torch.arange(3))
        with _opened(tmp_path) as other:
            _change(other)
            other.commit()
        store.refresh()
    with contextlib.suppress(KeyboardInterrupt), _opened(tmp_path) as store:
        _change(store)
        raise KeyboardInterrupt
    with _opened(None) as store:
        store.create_table(CONFIG)
        _change(store)
    assert _told(caplog) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": optim.SGD(lr=0.5)}, "create it with lr=0.1, then set table.learning_rate = 0.5"),
        ({"num_embeddings": 50}, "or change it by Store.change_table (docs/tables.md)"),
        ({"pooling": "mean", "num_embeddings": 50}, "num_embeddings: 40 there, 50 asked; pooling: 'sum' there, 'mean'"),
    ],
)
def test_what_differs_of_a_table_is_said(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with _opened(tmp_path) as store:
        with pytest.raises(errors.TableError) as raised:
            store.create_table(replace(CONFIG, **change))  # type: ignore[arg-type]
        assert message in str(raised.value)
        assert len(str(raised.value)) < 400


def test_a_learning_rate_of_the_last_commit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tierstore")
    with _opened(tmp_path) as store:
        store["item"].learning_rate = 0.05
        store.commit()
    assert not _told(caplog)
    with _opened(tmp_path) as store:
        assert store["item"].learning_rate == 0.05
    ((_, level, message),) = _told(caplog)
    assert level == "WARNING"
    assert message.startswith("table 'item' goes on with learning rate 0.05, not 0.1 of its configuration")
