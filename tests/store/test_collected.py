"""Stores that nobody closed and that refer to themselves: the garbage collector finds them, wherever it runs.

Each is dropped at a drawn moment. It must be collected, its directory open again at once, with the rows of its last
commit, and no thread of it be left.
"""

import gc
import logging
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tierstore.system import killpoints
from tierstore.system.signals import ClosedWhenDropped, settle

ROWS, DIM = 20_000, 16
CONFIG = tierstore.TableConfig(
    name="t",
    num_embeddings=ROWS,
    embedding_dim=DIM,
    init=tierstore.init.Constant(0.0),
    optimizer=tierstore.optim.SGD(lr=1.0),
)
IDS = torch.arange(ROWS)


class Job:
    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.store = tierstore.open(directory, threads=2, **options)
        self.table = self.store.create_table(CONFIG)
        self.bag = tierstore.TieredEmbeddingBag(self.table)
        self.bag.register_forward_hook(lambda *_: self.after())
        self.error: Exception | None = None

    def after(self) -> None:
        if self.error is not None:
            raise self.error

    def write(self, value: float) -> None:
        self.table.write(IDS, torch.full((ROWS, DIM), value))

    def change_some(self, draw: random.Random) -> None:
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(ROWS - 3000)
            self.bag(IDS[start : start + 3000].view(-1, 3)).sum().backward()


def _idle(job: Job, draw: random.Random) -> None:
    job.change_some(draw)


def _commit_in_flight(job: Job, draw: random.Random) -> None:
    job.write(2.0)
    job.store.commit_async()
    if draw.random() < 0.5:
        job.change_some(draw)


def _prefetching(job: Job, draw: random.Random) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for start in range(0, ROWS, 500):
            yield IDS[start : start + 500].view(-1, 5)

    job.pipeline = tierstore.prefetch(batches(), job.bag, depth=3)  # type: ignore[attr-defined]
    for _ in range(draw.randint(1, 5)):
        job.bag(next(job.pipeline)).sum().backward()  # type: ignore[attr-defined]


def _failing_forward(job: Job, draw: random.Random) -> None:
    job.change_some(draw)
    job.error = RuntimeError("loss is NaN")
    job.bag(IDS[:50].view(-1, 5))


def _failing_backward(job: Job, draw: random.Random) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("loss is NaN")

    out = job.bag(IDS[:5000].view(-1, 5))
    out.register_hook(fail)
    out.sum().backward()


def _anchor_under_way(job: Job, _: random.Random) -> None:
    job.store._cold._writer._superblocks.start()  # type: ignore[union-attr] # as after 16 MiB of rows


MOMENTS: list[Callable[[Job, random.Random], None]] = [
    _idle, _commit_in_flight, _prefetching, _failing_forward, _failing_backward, _anchor_under_way
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{"ddr": "1MiB"}, {"ddr": "16MiB"}, {"ddr": "4MiB", "hbm": "1MiB"}]


def _run(directory: Path, moment: Callable[[Job, random.Random], None], draw: random.Random) -> "weakref.ref[Job]":
    job = Job(directory, draw.choice(OPTIONS))
    job.write(1.0)
    job.store.commit()
    gone = weakref.ref(job)
    try:
        moment(job, draw)
    except RuntimeError as error:
        assert "loss is NaN" in str(error)  # noqa: PT017 - the error refers to the frames, and so to the store
    return gone


def _collect_at_points(draw: random.Random, collected: list[str]) -> Callable[[str], None]:
    """A hook that has the collector run in the store's own threads."""

    def hook(name: str) -> None:
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and len(collected) < 10 and draw.random() < 0.3:
            collected.append(name)
            gc.collect()

    return hook


def _drop(directory: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, where = draw.choice(MOMENTS), draw.choice(["main", "thread", "points", "anywhere"])
    with monkeypatch.context() as patch:
        if where == "points":
            patch.setattr(killpoints, "hook", _collect_at_points(draw, []))
        thresholds = gc.get_threshold()
        if where == "anywhere":
            gc.set_threshold(1000, 2, 2)
        try:
            if where == "thread":
                found: list[weakref.ref[Job]] = []
                thread = threading.Thread(target=lambda: found.append(_run(directory, moment, draw)))
                thread.start()
                thread.join(60)
                (gone,) = found
            else:
                gone = _run(directory, moment, draw)
        finally:
            gc.set_threshold(*thresholds)
        expected = 2.0 if moment is _commit_in_flight else 1.0
        with tierstore.open(directory, ddr="8MiB", threads=1) as store:
            rows = store["t"].read(IDS)
            assert torch.equal(rows, torch.full((ROWS, DIM), expected)), (moment, where)
            assert store.version == int(expected), (moment, where)
    gc.collect()
    settle(60)
    assert gone() is None, (moment, where)


def _store_threads() -> list[str]:
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("tierstore") and name != "tierstore-dropped"]


def _drop_many(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    before = _store_threads()
    gc.collect()
    gc.freeze()  # what was there before is not looked at again, so that collections take no time
    try:
        for number in range(count):
            _drop(folder / str(number), random.Random(seed * 1000 + number), monkeypatch)
    finally:
        gc.unfreeze()
    deadline = time.monotonic() + 60
    while _store_threads() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _store_threads() == before


def test_stores_dropped_in_cycles_are_collected(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _drop_many(store_dir, monkeypatch, 10, seed=1)


@pytest.mark.soak
def test_a_hundred_stores_dropped_in_cycles_are_collected(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _drop_many(store_dir, monkeypatch, 100, seed=int(os.environ.get("TIERSTORE_SEED", "2")))


def test_what_is_dropped_is_closed_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    """Also under a lock that the thread holds in which the collector runs."""
    lock, closed = threading.Lock(), []

    class Dropped(ClosedWhenDropped):
        def __init__(self, *, in_cycle: bool, fails: bool = False) -> None:
            self.me = self if in_cycle else None
            self.fails = fails

        def close(self) -> None:
            with lock:
                closed.append(threading.current_thread().name)
            if self.fails:
                raise ValueError("no")

    with lock:
        Dropped(in_cycle=True)
        Dropped(in_cycle=False)
        gc.collect()
        assert closed == []
    settle(60)
    assert closed == ["tierstore-closing"] * 2
    Dropped(in_cycle=False, fails=True)
    settle(60)
    assert [each.message for each in caplog.records if each.levelno == logging.WARNING] == [
        "what was dropped could not be closed"
    ]


def _drop_all(directory: Path, *, by_collector: bool) -> None:
    """Make one of each of what a program drops, and drop it while Python tells of each line that it runs."""
    store = tierstore.open(directory, ddr="1MiB", threads=2)
    table = store.create_table(CONFIG)
    dynamic = store.create_table(replace(CONFIG, name="d", ids=tierstore.DynamicIds()))
    table.write(IDS, torch.ones(ROWS, DIM))
    bag, other = (tierstore.TieredEmbeddingBag(each) for each in (table, dynamic))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*bag.parameters(), parameter])
    bag(IDS[:50].view(-1, 5)).sum().backward()
    optimizer.step()
    outputs = [bag(IDS[:50].view(-1, 5)), other(IDS[:50].view(-1, 5))]
    hook = outputs[0].register_hook(_fail)
    with pytest.raises(RuntimeError, match="loss is NaN"):
        outputs[0].sum().backward()
    pipelines = [tierstore.prefetch([IDS[:50].view(-1, 5)] * 9, bag, depth=depth) for depth in (0, 2)]
    listed = [table.written(), dynamic.written(), *pipelines]
    for each in listed:
        next(each)
    held = [store.commit_async(), store.record(f"{directory}.npz"), store.optimizer(), table, dynamic, bag, other]
    rings = _rings(store)
    everything = [store, optimizer, outputs, hook, listed, held, rings]
    del store, table, dynamic, bag, other, optimizer, outputs, hook, listed, pipelines, held, rings, parameter, each
    if by_collector:
        everything.append(everything)
    ran: list[str] = []

    def note(frame: Any, event: str, _: object) -> Any:
        if event == "line":  # not "call": a generator is closed by an error that leaves it at once
            ran.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return note

    sys.settrace(note)
    del everything
    gc.collect()
    sys.settrace(None)
    assert ran == []


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("loss is NaN")


def _rings(store: tierstore.Store) -> list[object]:
    ring = store._cold._file.map.locks.rings.take()  # type: ignore[union-attr]
    return [] if ring is None else [ring]


@pytest.mark.parametrize("by_collector", [True, False])
def test_nothing_of_python_runs_where_errors_are_dropped(store_dir: Path, by_collector: bool) -> None:
    """A signal's handler runs wherever Python does, and may raise: where an object ends, that error would be lost.

    In a process of its own: torch._dynamo, which other tests load, has callbacks on every module and tensor.
    """
    command = [sys.executable, __file__, str(store_dir), *["by collector"] * by_collector]
    subprocess.run(command, check=True, timeout=300)
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.version == 1


END = """
import gc, sys, threading, torch, tierstore
store = tierstore.open(sys.argv[1], ddr="1MiB", threads=2)
table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=20_000, embedding_dim=16))
bag = tierstore.TieredEmbeddingBag(table)
bag.register_forward_hook(lambda *_: store)
table.write(torch.arange(20_000), torch.ones(20_000, 16))
how = sys.argv[2]
if how == "prefetching":
    def batches():
        while True:
            yield torch.arange(1000).view(-1, 5)
            if pipeline_began.is_set():
                threading.Event().wait()
    pipeline_began = threading.Event()
    pipeline = tierstore.prefetch(batches(), bag, depth=2)
    next(pipeline)
    pipeline_began.set()
if how == "recording":
    recorder = store.record(sys.argv[1] + ".npz", rate=1.0)
    bag(torch.arange(10).view(2, 5))
store.commit_async()
if how == "raising":
    raise RuntimeError("loss is NaN")
"""


@pytest.mark.parametrize("how", ["plain", "prefetching", "recording", "raising"])
def test_the_interpreter_ends_over_a_store_in_a_cycle(store_dir: Path, how: str) -> None:
    command = [sys.executable, "-c", END, str(store_dir), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (how == "raising"), done.stderr
    assert done.stderr.count("Traceback") == (how == "raising"), done.stderr
    with tierstore.open(store_dir, mode="r", ddr="8MiB") as store:
        assert store.version == 1
        assert torch.equal(store["t"].read(IDS), torch.ones(ROWS, DIM))
    if how == "recording":
        assert tierstore.trace.read_trace(f"{store_dir}.npz").num_lookups == 10


if __name__ == "__main__":
    _drop_all(Path(sys.argv[1]), by_collector="by collector" in sys.argv)
    settle(60)
    assert not [each for each in gc.callbacks if getattr(each, "__module__", "").startswith("tierstore")]
