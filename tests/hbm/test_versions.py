"""Versions, whole tables in and out, and trouble, with the newest rows in device memory."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.gate import Gate
from tests.hbm.stores import (
    ALL,
    LEAST,
    ROWS,
    bits,
    config,
    hot,
    jagged,
    open_store,
    put,
    same,
    shown,
    step,
)
from tierstore import optim
from tierstore.errors import ChecksumError, DiskFullError, PartlyTrainedError, TableError
from tierstore.exchange import export_store, import_files
from tierstore.exchange.rows import read_rows, write_rows
from tierstore.pool import Pool

# Versions


@pytest.mark.parametrize("point", ["write-back: segments put", "commit: frozen rows written"])
def test_a_version_shows_what_was_there_when_it_was_asked_for(store_dir: Path, gate: Gate, point: str) -> None:
    """Rows change, go down into host memory and are read again while the writer of the version stands still."""
    with open_store(store_dir, keep=3) as store:
        put(store, ALL, 1.0)
        assert store.commit() == 1
        put(store, ALL[:300], 2.0)
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        out = bag(ALL[:10], torch.tensor([0]))
        gate.close(point)
        pending = store.commit_async()
        assert gate.reached.wait(60)
        out.sum().backward()
        put(store, ALL[295:305], 4.0)  # with those above, fewer than the outbox holds
        store["t"].read(ALL[400:])
        expected = torch.tensor([1.0] * 10 + [2.0] * 285 + [4.0] * 10 + [1.0] * 295)
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        gate.open()
        assert pending.result(60) == 2
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        store.commit()
    assert (shown(store_dir, 1) == 1.0).all()
    assert torch.equal(shown(store_dir, 2)[:, 0], torch.tensor([2.0] * 300 + [1.0] * 300))
    assert torch.equal(shown(store_dir)[:, 0], expected)


def test_training_and_commits_side_by_side(store_dir: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, ROWS, (40, 5), generator=generator) for _ in range(30)]
    expected = torch.zeros(ROWS)
    with open_store(store_dir, keep=100, ddr="404KiB", policy="lru") as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        states, pending = {}, []
        for number, ids in enumerate(tierstore.prefetch(batches, bag, depth=3, features=same)):
            bag(ids).sum().backward()
            expected -= torch.bincount(ids.flatten(), minlength=ROWS)
            if number % 3 == 2:
                pending.append(store.commit_async(extra={"step": number}))
                states[pending[-1].version] = expected.clone()
        assert [commit.result() for commit in pending] == list(states) == list(store.versions)
    for version, state in states.items():
        assert torch.equal(shown(store_dir, version)[:, 0], state), f"version {version}"


def test_rolling_back_forgets_what_was_in_device_memory(store_dir: Path) -> None:
    with open_store(store_dir, config(optimizer=optim.Adam(lr=0.1)), keep=3) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        kept = {}
        for version in (1, 2, 3):
            step(bag, ALL[: 200 * version])
            assert store.commit() == version
            kept[version] = read_rows(store["t"], 0, ROWS)
        step(bag, ALL)
        out = bag(ALL[:5], torch.tensor([0]))
        with pytest.raises(TableError, match=r"in use by a batch under way .*; go back before"):
            store.rollback(2)
        del out
        for version in (3, 2):
            step(bag, ALL[version:])
            store.rollback(version)
            rows = read_rows(store["t"], 0, ROWS)
            assert bits(store["t"].read(ALL)) == bits(rows.weights) == bits(kept[version].weights)
            assert bits(rows.state) == bits(kept[version].state)
        step(bag, ALL)
        expected = store["t"].read(ALL)
        store.commit()
    assert torch.equal(shown(store_dir), expected)


SERVER = """
import sys, torch, tierstore
settings = {"mode": "r", "ddr": "404KiB", "policy": "lru", "hbm": sys.argv[2]}
store = tierstore.open(sys.argv[1], **settings)
for line in sys.stdin:
    if line == "open again\\n":
        store.close()
        store = tierstore.open(sys.argv[1], **settings)
    rows = store["t"].read(torch.arange(600))
    pooled = tierstore.TieredEmbeddingBag(store["t"])(torch.arange(600), torch.arange(0, 600, 100)) / 100
    assert not pooled.requires_grad
    pool = store["t"].pool.tier
    pool.check_integrity()
    assert pool.num_dirty == pool.num_leased == 0
    print(store.version, *rows[:, 0].unique(return_counts=True)[1].tolist(), round(pooled[0, 0].item(), 3), flush=True)
"""


def test_a_read_only_server_beside_a_writer(store_dir: Path) -> None:
    with open_store(store_dir, keep=3) as writer:
        put(writer, ALL, 1.0)
        writer.commit()
        command = [sys.executable, "-c", SERVER, str(store_dir), str(writer._pools._memory.hbm)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None

            def ask(question: str) -> str:
                print(question, file=server.stdin, flush=True)
                return server.stdout.readline().strip()  # type: ignore[union-attr]

            try:
                assert ask("read") == "1 600 1.0"
                for number in (2, 3):
                    put(writer, ALL[100 * number :], float(number))
                    writer.commit()
                    put(writer, ALL[:10], 9.0)
                    assert ask("read") == "1 600 1.0"
                assert ask("open again") == "3 190 100 300 10 1.8"
            finally:
                server.stdin.close()


def test_weights_get_gradients_on_a_read_only_server(store_dir: Path) -> None:
    with open_store(store_dir, config(optimizer=optim.SGD())) as store:
        expected = store["t"].read(ALL)
        store.commit()
    with tierstore.open(store_dir, mode="r", ddr="2MiB", hbm="1MiB") as store:
        scale = torch.ones(ROWS, requires_grad=True)
        tierstore.TieredEmbeddingBag(store["t"], mode="sum")(ALL, torch.tensor([0]), scale).sum().backward()
        assert scale.grad is not None
        pairs = expected[:, :2] + expected[:, 2:]
        assert torch.equal(scale.grad, pairs[:, 0] + pairs[:, 1])
        assert not store["t"].pool.in_use
        assert torch.equal(store["t"].read(ALL), expected)


# Whole tables in and out


def test_an_open_stores_rows_are_read_and_written_whole(store_dir: Path) -> None:
    with open_store(store_dir, config(optimizer=optim.Adagrad())) as store:
        table = store["t"]
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        for _ in range(2):
            step(bag, ALL[:100])
            rows = read_rows(table, 0, ROWS)
            assert bits(rows.weights) == bits(table.read(ALL))
            assert (rows.state[:100] > 0).all()
            assert (rows.state[100:] == 0).all()
        step(bag, ALL[:100])
        weights, state = np.full((100, 4), 3.0, np.float32), np.full((100, 4), 8.0, np.float32)
        assert write_rows(table, 50, weights, state) == 100
        assert (table.read(ALL[50:150]) == 3.0).all()
        assert table.read(ALL[:50]).ne(3.0).all()
        step(bag, ALL[50:150])
        after = read_rows(table, 0, ROWS)
        assert (after.state[50:150] == 9.0).all()
        assert (after.state[:50] == 3.0).all()
        assert write_rows(table, 0, after.weights, after.state) == 0


def test_files_out_of_and_into_a_store_trained_with_device_memory(tmp_path: Path) -> None:
    with open_store(tmp_path / "one", config(optimizer=optim.Adam())) as store:
        for _ in range(3):
            step(tierstore.TieredEmbeddingBag(store["t"]), ALL[::2])
        store.commit()
        expected = read_rows(store["t"], 0, ROWS)
        step(tierstore.TieredEmbeddingBag(store["t"]), ALL)  # not committed, and so not in the file
    export_store(tmp_path / "one", tmp_path / "rows.safetensors", state=True)
    import_files(tmp_path / "two", [tmp_path / "rows.safetensors"])
    with open_store(tmp_path / "two", config(optimizer=optim.Adam())) as store:
        assert bits(store["t"].read(ALL)) == bits(expected.weights)
        assert bits(read_rows(store["t"], 0, ROWS).state) == bits(expected.state)


# Trouble


class Trouble:
    """Once armed, one call fails: rows on their way up or down, or on their way to the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: Pool, cold: Any, seed: int) -> None:
        self._random = random.Random(seed)
        self._left = -1
        self.raised = 0
        below = pool.transfers
        for owner, name, error in (
            (below, "take", ChecksumError), (below, "put", KeyboardInterrupt), (cold, "write", DiskFullError)
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name), error))

    def _failing(self, real: Callable[..., Any], error: type[BaseException]) -> Callable[..., Any]:
        def maybe(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                self.raised += 1
                raise error("trouble")
            return real(*arguments, **named)

        return maybe

    def arm(self) -> None:
        self._left = self._random.randrange(1, 10)

    def until_it_works(self, action: Callable[[], Any]) -> Any:
        while True:
            self.arm()
            try:
                return action()
            except (ChecksumError, KeyboardInterrupt, DiskFullError) as error:
                if "trouble" not in str(error):
                    raise
                if self._random.random() < 0.5:
                    self._left = -1
                    return action()
            finally:
                self._left = -1


def test_training_through_trouble_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, reading and committing fail, and are tried again; a backward repeated would count twice, so those do
    not."""
    ended = []
    for hbm in (0, LEAST):
        directory = tmp_path / str(hbm)
        table = config(optimizer=optim.Adam(lr=0.1))
        settings: dict[str, Any] = {"ddr": "404KiB", "policy": "lru"} if hbm else {}
        with open_store(directory, table, hbm=hbm, **settings) as store:
            trouble = Trouble(monkeypatch, store["t"].pool, store._cold, 0) if hbm else None
            attempt = (lambda action: action()) if trouble is None else trouble.until_it_works
            order = np.random.default_rng(3)
            bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum", include_last_offset=True)
            for number in range(10):
                batch = jagged(order, 30, 10)
                out = attempt(partial(bag, *batch))
                (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
                ended.append(attempt(partial(store["t"].read, ALL)))
                if number % 5 == 4:
                    attempt(store.commit)
                if trouble is not None:
                    hot(store).check_integrity()
                    gc.collect()  # what a failed forward left in its traceback
                    assert not store["t"].pool.in_use
            assert trouble is None or trouble.raised > 5
        monkeypatch.undo()
        ended.append(shown(directory))
    for one, other in zip(ended[:11], ended[11:], strict=True):
        assert torch.equal(one, other)


def test_a_backward_that_fails_leaves_the_last_commit_to_go_back_to(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_dir, config(optimizer=optim.Adam(lr=0.1))) as store:
        bag = tierstore.TieredEmbeddingBag(store["t"], mode="sum")
        step(bag, ALL)
        store.commit()
        saved, state = read_rows(store["t"], 0, ROWS), store["t"].state
        for _ in range(2):
            trouble = Trouble(monkeypatch, store["t"].pool, store._cold, 0)
            out = bag(ALL, torch.arange(0, ROWS, 5))
            trouble.arm()
            with pytest.raises(PartlyTrainedError, match="trouble") as failed:
                out.sum().backward()
            assert isinstance(failed.value.__cause__, (ChecksumError, KeyboardInterrupt))
            del out, failed
            gc.collect()
            assert not store["t"].pool.in_use
            hot(store).check_integrity()
            store["t"].read(ALL)
            with pytest.raises(PartlyTrainedError, match="trouble"):
                store.commit()
            store.rollback(1)
            monkeypatch.undo()
            assert store["t"].state == state
            assert bits(store["t"].read(ALL)) == bits(saved.weights)
            assert bits(read_rows(store["t"], 0, ROWS).state) == bits(saved.state)


def test_a_disk_that_is_full_at_a_commit(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DiskFullError("no room")

    with open_store(store_dir, ddr="404KiB", policy="lru") as store:
        put(store, ALL, 1.0)
        assert store.commit() == 1
        put(store, ALL[:100], 2.0)
        monkeypatch.setattr(store._cold, "write", refuse)
        for _ in range(2):
            with pytest.raises(DiskFullError, match="no room"):
                store.commit()
            hot(store).check_integrity()
        monkeypatch.undo()
        assert store.version == 1
        put(store, ALL[50:60], 3.0)
        expected = torch.tensor([2.0] * 50 + [3.0] * 10 + [2.0] * 40 + [1.0] * 500)
        assert torch.equal(store["t"].read(ALL)[:, 0], expected)
        store.commit()
    assert torch.equal(shown(store_dir)[:, 0], expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may hit a finaliser
def test_interrupts_at_any_moment_leave_every_row_right(store_dir: Path) -> None:
    """A thread sends SIGINT again and again while rows are written, trained and committed; the handler raises once."""
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    done = threading.Event()

    def bother() -> None:
        while not done.wait(0.002):
            os.kill(os.getpid(), signal.SIGINT)

    steps, interrupted = torch.zeros(ROWS), 0
    previous = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=bother, daemon=True)
    with open_store(store_dir, ddr="404KiB", policy="lru") as store:
        table = store["t"]
        bag = tierstore.TieredEmbeddingBag(table, mode="sum")
        generator = torch.Generator().manual_seed(0)
        thread.start()
        try:
            for number in range(60):
                ids = torch.randint(0, ROWS, (200,), generator=generator)
                before = table.state.step
                try:
                    armed = True
                    table.read(ids[:100])
                    bag(ids.reshape(10, -1)).sum().backward()
                    if number % 4 == 3:
                        store.commit()
                    armed = False
                except KeyboardInterrupt:
                    interrupted += 1
                if table.state.step > before:
                    steps += torch.bincount(ids, minlength=ROWS)
        finally:
            done.set()
            thread.join()
            signal.signal(signal.SIGINT, previous)
        gc.collect()
        assert interrupted > 0
        assert not table.pool.in_use
        hot(store).check_integrity()
        assert torch.equal(table.read(ALL)[:, 0], -steps)
        store.commit()
    assert torch.equal(shown(store_dir)[:, 0], -steps)
