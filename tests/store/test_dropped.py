"""Stores that nobody closed, and what is told of what their callers may not have meant.

The garbage collector finds stores that refer to themselves, wherever it runs. Each is dropped at a drawn moment: it
must be collected, its directory open again at once, with the rows of its last commit, and no thread of it be left.
"""

import contextlib
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import tierstore
from tests.children import run, start
from tierstore import optim
from tierstore.system import killpoints
from tierstore.system.signals import settle

ROWS, DIM = 20_000, 16
CONFIG = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM)
IDS = torch.arange(ROWS)


class Job:
    def __init__(self, directory: Path, options: dict[str, Any]) -> None:
        self.store = tierstore.open(directory, threads=2, **options)
        self.table = self.store.create_table(CONFIG)
        self.bag = tierstore.TieredEmbeddingBag(self.table)
        self.bag.register_forward_hook(self.note)
        self.count = 0

    def note(self, *_: object) -> None:
        self.count += 1

    def write(self, value: float) -> None:
        self.table.write(IDS, torch.full((ROWS, DIM), value))

    def change_some(self, draw: random.Random) -> None:
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(ROWS - 3000)
            self.bag(IDS[start : start + 3000].view(-1, 3)).sum().backward()


def _commit_in_flight(job: Job, draw: random.Random) -> None:
    job.write(2.0)
    job.store.commit_async()
    if draw.random() < 0.5:
        job.change_some(draw)


def _prefetching(job: Job, draw: random.Random) -> None:
    job.pipeline = tierstore.prefetch(IDS.view(-1, 100, 5).unbind(), job.bag, depth=3)  # type: ignore[attr-defined]
    for _ in range(draw.randint(1, 5)):
        job.bag(next(job.pipeline)).sum().backward()  # type: ignore[attr-defined]


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("loss is NaN")


def _failing_backward(job: Job, draw: random.Random) -> None:
    out = job.bag(IDS[:5000].view(-1, 5))
    out.register_hook(_fail)
    out.sum().backward()


def _anchor_under_way(job: Job, _: random.Random) -> None:
    job.store._cold._writer._superblocks.start()  # type: ignore[union-attr] # as after 16 MiB of rows


MOMENTS: list[Callable[[Job, random.Random], None]] = [
    Job.change_some, _commit_in_flight, _prefetching, _failing_backward, _anchor_under_way
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


def _drop(directory: Path, draw: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    moment, where = draw.choice(MOMENTS), draw.choice(["main", "thread", "points", "anywhere"])
    collected: list[str] = []

    def collect(name: str) -> None:
        """In the store's own threads."""
        in_thread = threading.current_thread() is not threading.main_thread()
        if in_thread and len(collected) < 10 and draw.random() < 0.3:
            collected.append(name)
            gc.collect()

    with monkeypatch.context() as patch:
        if where == "points":
            patch.setattr(killpoints, "hook", collect)
        thresholds = gc.get_threshold()
        if where == "anywhere":
            gc.set_threshold(1000, 2, 2)
        try:
            if where == "thread":
                with ThreadPoolExecutor(1) as thread:
                    gone = thread.submit(_run, directory, moment, draw).result()
            else:
                gone = _run(directory, moment, draw)
        finally:
            gc.set_threshold(*thresholds)
        expected = 2.0 if moment is _commit_in_flight else 1.0
        with tierstore.open(directory, ddr="8MiB", threads=1) as store:
            assert torch.equal(store["t"].read(IDS), torch.full((ROWS, DIM), expected)), (moment, where)
            assert store.version == int(expected), (moment, where)
    gc.collect()
    settle(60)
    assert gone() is None, (moment, where)


def _store_threads() -> list[str]:
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("tierstore") and name != "tierstore-dropped"]


@pytest.mark.parametrize(("count", "seed"), [(10, 1), pytest.param(100, 2, marks=pytest.mark.soak)])
def test_dropped_cycles_are_collected(store_dir: Path, monkeypatch: pytest.MonkeyPatch, count: int, seed: int) -> None:
    before = _store_threads()
    gc.collect()
    gc.freeze()  # what was there before is not looked at again, so that collections take no time
    try:
        for number in range(count):
            _drop(store_dir / str(number), random.Random(seed * 1000 + number), monkeypatch)
    finally:
        gc.unfreeze()
    deadline = time.monotonic() + 60
    while _store_threads() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _store_threads() == before


def drop_all(directory: Path, *, by_collector: bool) -> None:
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
    store.commit()
    readers = [store, tierstore.open(directory, mode="r", ddr="1MiB")]
    changes = [next(iter(each.changes(name))).rows() for name, each in zip("ab", readers, strict=True)]
    listed = [table.written(), dynamic.written(), *pipelines, *changes]
    for each in listed:
        next(each)
    held = [store.commit_async(), store.record(f"{directory}.npz"), store.optimizer(), table, dynamic, bag, other]
    rings = [store._cold._file.map.locks.rings.take()]  # type: ignore[union-attr]
    everything = [readers, optimizer, outputs, hook, listed, held, rings]
    del store, table, dynamic, bag, other, optimizer, outputs, hook, listed, pipelines, held, rings, parameter, each
    del readers, changes
    if by_collector:
        everything.append(everything)
    ran: list[str] = []

    def note(frame: Any, event: str, _: object) -> Any:
        if event == "line":  # not "call": a generator is closed by an error that leaves it at once
            ran.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return note

    gc.collect()  # what numba left of compiling, which has callbacks in Python
    sys.settrace(note)
    del everything
    gc.collect()
    sys.settrace(None)
    assert ran == [], ran[:20]


@pytest.mark.parametrize("by_collector", [True, False])
def test_nothing_of_python_runs_where_errors_are_dropped(store_dir: Path, by_collector: bool) -> None:
    """A signal's handler runs wherever Python does, and may raise: where an object ends, that error would be lost.

    In a process of its own: torch._dynamo, which other tests load, has callbacks on every module and tensor.
    """
    code = """
    import gc
    from tests.store.test_dropped import drop_all
    from tierstore.system.signals import settle
    drop_all(Path(sys.argv[1]), by_collector=sys.argv[2] == "True")
    settle(60)
    assert not [each for each in gc.callbacks if getattr(each, "__module__", "").startswith("tierstore")]
    """
    run(code, store_dir, by_collector)
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store.version == 2


END = """
import threading
store = tierstore.open(sys.argv[1], ddr="1MiB", threads=2)
table = store.create_table(table_config(num_embeddings=20_000))
bag = tierstore.TieredEmbeddingBag(table)
bag.register_forward_hook(lambda *_: store)
table.write(torch.arange(20_000), torch.ones(20_000, 16))
pipeline_began = threading.Event()
def batches():
    while True:
        yield torch.arange(1000).view(-1, 5)
        if pipeline_began.is_set():
            threading.Event().wait()
pipeline = tierstore.prefetch(batches(), bag, depth=2)
next(pipeline)
pipeline_began.set()
recorder = store.record(sys.argv[1] + ".npz", rate=1.0)
table.read(torch.arange(10))
store.commit_async()
table.write(torch.arange(10), torch.zeros(10, 16))
raise RuntimeError("loss is NaN")
"""


def test_the_interpreter_ends_over_a_store_in_a_cycle(store_dir: Path) -> None:
    """By an error, amid a commit, prefetching and recording: nothing is lost but changes after the commit, as told."""
    with start(END, store_dir) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert said.count("Traceback") == 1, said
    assert f"{store_dir}: changes of 1 table since the last commit are dropped (t); call store.commit() " in said
    with tierstore.open(store_dir, mode="r", ddr="8MiB") as store:
        assert store.version == 1
        assert torch.equal(store["t"].read(IDS), torch.ones(ROWS, DIM))
    assert tierstore.trace.read_trace(f"{store_dir}.npz").num_lookups == 10


ITEM = tierstore.TableConfig(name="item", num_embeddings=40, embedding_dim=8, optimizer=optim.SGD(lr=0.1))
SAID = "{}: changes of 1 table since the last commit are dropped (item); call store.commit() before close"


def _opened(path: Path, mode: Literal["r", "w"] = "w") -> tierstore.Store:
    store = tierstore.open(path, mode=mode, ddr="4MiB")
    if mode == "w":
        store.create_table(ITEM)
    return store


def _change(store: tierstore.Store) -> None:
    tierstore.TieredEmbeddingBag(store["item"])(torch.tensor([[1, 2]])).sum().backward()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelname == "WARNING" and each.name == "tierstore"]


@pytest.mark.parametrize("way", ["close", "with", "del"])
def test_changes_that_close_drops_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str) -> None:
    store = _opened(tmp_path)
    _change(store)
    if way == "with":
        with store:
            pass
    elif way == "close":
        store.close()
        store.close()
    del store
    gc.collect()
    settle(60)  # a thread closes what the collector finds
    assert _told(caplog) == [SAID.format(tmp_path)]


def test_nothing_is_told_where_nothing_is_lost_or_it_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        store.create_table(ITEM)
        _change(store)
    assert _told(caplog) == []


def test_a_learning_rate_of_the_last_commit_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _opened(tmp_path) as store:
        store["item"].learning_rate = 0.05
        store.commit()
    assert not _told(caplog)
    with _opened(tmp_path) as store:
        assert store["item"].learning_rate == 0.05
    (said,) = _told(caplog)
    assert said.startswith("table 'item' goes on with learning rate 0.05, not 0.1 of its configuration")
