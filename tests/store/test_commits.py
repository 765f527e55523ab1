"""Commits in the background: a version shows what was there when it was asked for, whatever happens meanwhile."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.errors import DiskFullError
from tierstore.pool import writeback
from tierstore.system import killpoints

ROWS, DIM = 20_000, 4
ALL = torch.arange(ROWS)
POLICIES = ["lru", "lfu", "tinylfu"]


def open_store(directory: Path, **settings: Any) -> tierstore.Store:
    store = tierstore.open(directory, **({"ddr": "600KiB", "threads": 1} | settings))
    init, rule = tierstore.init.Constant(-1.0), optim.SGD(lr=1)
    store.create_table(
        tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, init=init, optimizer=rule)
    )
    return store


def put(store: tierstore.Store, rows: torch.Tensor, value: float) -> None:
    store["t"].write(rows, torch.full((len(rows), DIM), value))


def shown(directory: Path, version: int | None = None) -> torch.Tensor:
    with tierstore.open(directory, mode="r", version=version) as store:
        store.verify()
        return store["t"].read(ALL)[:, 0]


@pytest.mark.parametrize(
    ("policy", "point"),
    [
        ("lru", "write-back: segments put"), ("tinylfu", "write-back: segments published"),
        ("lru", "commit: frozen rows written"), ("lfu", "commit: record put"),
    ],
)  # fmt: skip
def test_a_version_shows_what_was_there_when_asked_for(store_dir, gate, policy, point):
    """Rows change before and after they were written, are evicted, and are read while the writer stands still."""
    generator = torch.Generator().manual_seed(POLICIES.index(policy))
    with open_store(store_dir, policy=policy, keep=3) as store:
        capacity = store["t"].pool.cache.capacity
        assert capacity < ROWS / 2
        put(store, ALL, 1.0)
        assert store.commit(extra={"n": 1}) == 1
        recent = ALL[-capacity // 2 :]
        put(store, recent, 2.0)
        gate.close(point)
        weights, extra, live = torch.ones(3), {"n": [2]}, torch.ones(ROWS)
        pending = store.commit_async(extra=extra, tensors={"weights": weights})
        assert gate.reached.wait(60)
        assert (store.version, store.extra, pending.done()) == (1, {"n": 1}, False)
        weights += 1
        extra["n"].append(3)
        live[recent] = 2.0
        changed = recent[torch.randperm(len(recent), generator=generator)[: len(recent) // 40]]
        put(store, changed, 3.0)
        live[changed] = 3.0
        assert torch.equal(store["t"].read(changed)[:, 0], live[changed])
        gate.open()
        for _ in range(6):
            others = torch.randint(0, ROWS, (capacity // 2,), generator=generator).unique()
            put(store, others, 4.0)
            live[others] = 4.0
            assert torch.equal(store["t"].read(ALL)[:, 0], live)
        assert pending.result(60) == pending.version == 2
        assert (store.version, store.versions, store.extra) == (2, (1, 2), {"n": [2]})
        assert store.tensors()["weights"].tolist() == [1, 1, 1]
        assert store.commit(extra={"n": 3}) == 3
    assert (shown(store_dir, 1) == 1).all()
    assert torch.equal(shown(store_dir, 2), torch.ones(ROWS).index_fill(0, recent, 2.0))
    assert torch.equal(shown(store_dir), live)


def failing(store: tierstore.Store, should_fail: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    write = store._cold.write

    def refuse(*arguments: Any, epoch: int) -> None:
        if should_fail(epoch):
            raise DiskFullError("no room")
        write(*arguments, epoch=epoch)

    monkeypatch.setattr(store._cold, "write", refuse)


@pytest.mark.parametrize(("policy", "survived"), [("lru", 0), ("lfu", 2), ("tinylfu", 2)])
def test_a_failed_commit_loses_no_row_and_is_told_once(store_dir, gate, monkeypatch, policy, survived):
    with open_store(store_dir, policy=policy) as store:
        put(store, ALL, 1.0)
        store.commit()
        put(store, ALL[:3000], 2.0)
        writes: list[int] = []
        monkeypatch.setattr(store["t"].pool.writeback, "rows_a_write", 20)
        failing(store, lambda epoch: writes.append(epoch) is None and len(writes) > survived, monkeypatch)
        gate.close("commit: rows frozen")
        pending = store.commit_async()
        with pytest.raises(DiskFullError, match="no room"):
            pending.result(60)
        monkeypatch.undo()
        assert (store.version, store.versions) == (1, (1,))
        put(store, ALL[1000:2000], 3.0)
        assert store.commit() == 3
        assert store.version == 3
    expected = torch.full((ROWS,), 1.0)
    expected[:3000] = 2.0
    expected[1000:2000] = 3.0
    assert torch.equal(shown(store_dir), expected)


def test_unseen_errors_are_raised_by_the_next_commit_or_close(store_dir, monkeypatch):
    store = open_store(store_dir)
    put(store, ALL[:10], 1.0)
    failing(store, lambda _: True, monkeypatch)
    store.commit_async()
    with pytest.raises(DiskFullError, match="no room"):
        store.commit()
    store.commit_async()
    with pytest.raises(DiskFullError, match="no room"):
        store.close()
    store.close()
    monkeypatch.undo()
    assert (shown(store_dir) == -1.0).all()


def test_a_commit_that_cannot_begin_holds_nothing_up(store_dir, monkeypatch):
    """Training goes on, and the next commit has all."""
    with open_store(store_dir) as store:
        put(store, ALL[:4000], 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(store._commits.thread, "submit", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(RuntimeError, match="new thread"):
                store.commit_async()
        put(store, ALL[:4000], 2.0)
        assert store.commit() == store.version > 0
        put(store, ALL[:10], 3.0)
    assert shown(store_dir).tolist() == [2.0] * 4000 + [-1.0] * (ROWS - 4000)


@pytest.mark.parametrize(
    "wait",
    [
        lambda store, pending: pending.result(),
        lambda store, pending: store.commit(),
        lambda store, pending: store.close(),
        lambda store, pending: put(store, ALL[:4000], 2.0),  # the outbox is full then
    ],
    ids=["result", "next", "close", "update"],
)
def test_a_commit_that_somebody_waits_for_does_not_rest(store_dir, monkeypatch, wait):
    monkeypatch.setattr(writeback, "_REST", 1e9)
    with open_store(store_dir) as store:
        put(store, ALL[:4000], 1.0)
        pending = store.commit_async()
        wait(store, pending)
        assert pending.result() == 1


@pytest.mark.parametrize("first", [0, *(pytest.param(shift, marks=pytest.mark.soak) for shift in (1, 2))])
def test_an_error_at_any_step_of_a_commit_leaves_the_store_at_work(store_dir, tmp_path, monkeypatch, first):
    """If it is raised, the version before stands, or the error names the new one."""
    number, reached, rows = 0, "", ALL[:50]
    with tierstore.open(store_dir, ddr="4MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=50, embedding_dim=DIM))
        put(store, rows, 0.0)
        store.commit()
        while number == 0 or reached:
            number, reached, left = number + 1, "", number + 1
            kind: type[BaseException] = (MemoryError, OSError, KeyboardInterrupt)[(number + first) % 3]

            def hook(point: str, kind: type[BaseException] = kind) -> None:
                nonlocal left, reached
                left -= 1
                if left == 0:
                    reached = point
                    raise kind(28, "emulated")

            put(store, rows, float(number))
            before, error = store.version, None
            with monkeypatch.context() as patch:
                patch.setattr(killpoints, "hook", hook)
                try:
                    before = store.commit()
                except kind as raised:
                    error = raised
            assert (store["t"].read(rows) == number).all(), reached
            copy = shutil.copytree(store_dir, tmp_path / str(number))
            with tierstore.open(copy, ddr="4MiB", threads=1) as killed:
                is_new = killed.version > before
                assert not is_new or f"version {killed.version}" in str(getattr(error, "__notes__", "")), reached
                assert (killed["t"].read(rows) == number - (error is not None and not is_new)).all(), reached
            assert (error is None) or (kind is KeyboardInterrupt) or not reached.startswith(("prune", "commit: d"))
            assert store.commit() > before, reached
    assert number > 20
    with tierstore.open(store_dir, mode="r", ddr="4MiB") as store:
        assert (store["t"].read(rows) == number).all()
