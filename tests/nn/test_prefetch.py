"""The pipeline: order, depth, bounds, and what happens when something fails in it."""

import contextlib
import gc
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tierstore
from tests import children
from tierstore.nn import prefetch as pipeline_module

MANY = 100_000
"""Rows that do not all fit 1 MiB: where they do, none is ever evicted."""


def make_collection(store: tierstore.Store, rows: int = 500) -> tierstore.TieredEmbeddingBagCollection:
    store.create_table(tierstore.TableConfig(name="a", num_embeddings=rows, embedding_dim=4))
    return tierstore.TieredEmbeddingBagCollection(store)


@pytest.fixture
def collection() -> Iterator[tierstore.TieredEmbeddingBagCollection]:
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        yield make_collection(store)


def batch(*ids: int) -> tierstore.KeyedJaggedTensor:
    return batch_of(torch.tensor(ids))


def batch_of(ids: Any) -> tierstore.KeyedJaggedTensor:
    return tierstore.KeyedJaggedTensor(["a"], torch.as_tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def pinned(store: tierstore.Store) -> int:
    return store["a"].pool.pins.num_pinned


@settings(max_examples=settings.default.max_examples // 3)
@given(
    policy=st.sampled_from(["lru", "lfu", "tinylfu"]),
    depth=st.integers(0, 5) | st.just("auto"),
    ways=st.lists(st.booleans(), min_size=1),
    shares=st.lists(st.floats(0.001, 1.6), min_size=1, max_size=6),
    trained=st.booleans(),
    end=st.sampled_from(["all", "break", "reader", "wrong id", "model"]),
    at=st.integers(0, 5),
)
def test_any_loop(policy, depth, ways, shares, trained, end, at):
    """Batches of any share of the cache come in order, each in its turn, with the rows of a plain loop; whatever ends
    the loop, nothing stays pinned or running."""
    read = seen = 0
    end = end if at < len(shares) else "all"
    with tierstore.open(cold="memory", ddr="440KiB", policy=policy) as store:
        zeros, sgd = tierstore.init.Constant(0.0), tierstore.optim.SGD(lr=1.0)
        store.create_table(
            tierstore.TableConfig(name="a", num_embeddings=MANY, embedding_dim=4, init=zeros, optimizer=sgd)
        )
        collection = tierstore.TieredEmbeddingBagCollection(store)
        capacity, order = store["a"].pool.cache.capacity, np.random.default_rng(at)
        ids = [(order.random(1 + int(share * capacity)) ** 2 * 3 * capacity).astype(np.int64) for share in shares]
        batches = [batch_of(each) for each in ids]
        if end == "wrong id":
            batches[at] = batch(1, MANY)
        expected = torch.zeros(MANY)

        def reader() -> Iterator[tierstore.KeyedJaggedTensor]:
            nonlocal read
            for read, each in enumerate(batches, 1):
                if end == "reader" and read == at + 1:
                    raise OSError("the disk fell off")
                yield each

        def loop() -> None:
            nonlocal seen
            with contextlib.closing(tierstore.prefetch(reader(), collection, depth=depth)) as ahead:
                for item in ahead:
                    assert item is batches[seen]
                    assert read <= seen + 1 + (2 if depth == "auto" else depth)
                    with torch.set_grad_enabled(trained):
                        out = collection(item).values()
                    assert torch.equal(out[:, 0].detach(), expected[ids[seen]])
                    if end == "model" and seen == at:
                        raise ZeroDivisionError
                    if trained:
                        out.sum().backward()
                        expected.sub_(torch.bincount(torch.from_numpy(ids[seen]), minlength=MANY))
                    seen += 1
                    if end == "break" and seen > at:
                        break

        error = {"reader": OSError, "wrong id": ValueError, "model": ZeroDivisionError}.get(end)
        way = property(lambda _: ways[seen % len(ways)])
        with pytest.MonkeyPatch.context() as patch, contextlib.nullcontext() if error is None else pytest.raises(error):
            patch.setattr(pipeline_module.DepthTuner, "is_ahead", way, raising=False)
            patch.setattr(pipeline_module.DepthTuner, "__init__", lambda _: None)
            patch.setattr(pipeline_module.DepthTuner, "note_step", lambda _: None)
            loop()
        assert seen == (len(batches) if end == "all" else at + (end == "break"))
        gc.collect()
        assert pinned(store) == 0
        with store["a"].pool.arena.lock:
            store["a"].pool.cache.check_integrity()
        shown = torch.arange(3 * capacity)
        assert torch.equal(store["a"].read(shown)[:, 0], expected[shown])
        for thread in prefetch_threads():
            thread.join(10)
        assert not prefetch_threads()
        assert store.commit() == 1


@pytest.mark.parametrize("is_faster_ahead", [False, True])
def test_the_faster_way_is_chosen_and_the_other_is_tried_ever_more_rarely(monkeypatch, is_faster_ahead):
    def chosen(steps: range, seconds: Callable[[int], float], *, is_good: bool) -> Any:
        nonlocal now
        ways = []
        for step in steps:
            now += seconds(step)
            ways.append(tuner.is_ahead is is_good)
            tuner.note_step()
        return np.array(ways)

    now, good = 0.0, is_faster_ahead
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def seconds(step: int) -> float:
        return (1.0 if tuner.is_ahead is good else 1.1 if step % 4 else 1.8) * (5.0 if step % 50 == 0 else 1.0)

    tuner = pipeline_module.DepthTuner()
    assert chosen(range(5_000), seconds, is_good=good).mean() > 0.95
    good = not good
    later = chosen(range(5_000, 10_000), seconds, is_good=good)
    assert later.mean() > 0.8
    assert later[2_500:].mean() > 0.95
    tuner = pipeline_module.DepthTuner()  # a step that waits for the reading of three batches is no outlier
    ways = chosen(range(6_000), lambda n: 1.92 if tuner.is_ahead else 0.5 + 4.5 * (n % 3 == 0), is_good=True)
    assert ways.mean() > 0.9


def test_once_all_rows_are_in_memory_to_stay_none_is_brought_in_and_no_thread_reads_a_list(monkeypatch):
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(pipeline_module.DepthTuner, "is_ahead", always, raising=False)
    for ddr, is_read, expected in (("64MiB", True, 0), ("64MiB", False, 8), ("1MiB", True, 8)):
        with tierstore.open(cold="memory", ddr=ddr) as store:
            collection, brought_in = make_collection(store, MANY), list[Any]()
            store["a"].read(torch.arange(MANY if is_read else 0))
            monkeypatch.setattr(collection, "bring_in", brought_in.append)
            for source in (list, iter):
                pipeline = tierstore.prefetch(source([batch(number) for number in range(8)]), collection)
                for item in pipeline:
                    collection(item)
                assert (pipeline._end.thread is None) is (source is list and not expected)
                assert len(brought_in) == expected * (1 if source is list else 2)


@pytest.mark.parametrize(("policy", "most"), [("lru", 1.0), ("lfu", 1.03), ("tinylfu", 1.03)])
def test_prefetching_reads_no_more_than_a_plain_loop(policy, most):
    """In a cache of 0.6 batches, and of 1.5. LFU and TinyLFU evict others where rows of batches ahead are pinned."""
    generator = np.random.default_rng(1)
    drawn = [generator.permutation(np.unique(generator.zipf(1.2, 20_000) % MANY)) for _ in range(20)]
    for caches, is_trained in ((0.6, True), (1.5, False)):
        misses = []
        for depth in (0, 1, 8):
            with tierstore.open(cold="memory", ddr="440KiB", policy=policy) as store:
                collection = make_collection(store, rows=MANY)
                most_rows = int(store["a"].pool.cache.capacity / caches)
                batches = [batch_of(rows[:most_rows]) for rows in drawn]
                for item in tierstore.prefetch(batches, collection, depth=depth):
                    with torch.set_grad_enabled(is_trained):
                        out = collection(item).values()
                    if is_trained:
                        out.sum().backward()
                misses.append(store.stats().ddr.misses)
        assert max(misses[1:]) <= most * misses[0]


def test_a_source_that_waits_until_earlier_batches_were_used(collection, monkeypatch):
    """Though rows are not brought in ahead, where steps wait for the reading of as many batches as there are places."""
    monkeypatch.setattr(pipeline_module.DepthTuner, "note_step", lambda self: setattr(self, "is_ahead", False))
    used = queue.SimpleQueue[int]()

    def source() -> Iterator[tierstore.KeyedJaggedTensor]:
        for number in range(12):
            assert number < 3 or used.get(timeout=30) == number - 3
            yield batch(number)

    for number, item in enumerate(tierstore.prefetch(source(), collection)):
        collection(item)
        used.put(number)
    assert number == 11


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tierstore-prefetch"]


def fail() -> None:
    raise OSError("the network is gone")


@pytest.mark.parametrize("fails_last", [False, True])
def test_a_pipeline_whose_source_waits_ends_at_once_and_keeps_nothing(store_dir, fails_last):
    waits, goes_on = threading.Event(), threading.Event()

    def batches() -> Iterator[tierstore.KeyedJaggedTensor]:
        yield from (batch(number, number + 1) for number in range(3))
        waits.set()
        goes_on.wait(100)
        if fails_last:
            fail()
        yield batch(400)

    store = tierstore.open(store_dir, ddr="1MiB")
    collection = make_collection(store, MANY)
    pipeline = tierstore.prefetch(batches(), collection, depth=4)
    collection(next(pipeline)).values().sum().backward()
    assert waits.wait(10)
    pipeline.close()
    (thread,) = prefetch_threads()
    assert thread.daemon
    assert pinned(store) == 0
    store["a"].pool.cache.check_integrity()
    store.close()
    gone = weakref.ref(store), weakref.ref(collection)
    del store, collection, pipeline
    gc.collect()
    assert [each() for each in gone] == [None, None]
    goes_on.set()
    thread.join(10)
    assert not thread.is_alive()


def test_an_interpreter_ends_though_a_source_waits(store_dir):
    code = """
    def batches():
        yield torch.tensor([1, 2]), torch.tensor([0])
        os.read(os.pipe()[0], 1)

    with tierstore.open(sys.argv[1], ddr="1MiB", threads=1) as store:
        bag = tierstore.TieredEmbeddingBag(store.create_table(table_config()), mode="sum")
        pipeline = tierstore.prefetch(batches(), bag, depth=2, features=lambda pair: pair)
        bag(*next(pipeline))
    print("ended")
    """
    assert children.run(code, store_dir, timeout=25) == "ended\n"


class Loader:
    """Reads in turn, as a loader that keeps its workers: one iterator for all passes. The third batch waits."""

    def __init__(self) -> None:
        self.state, self.calls = {"given": 0}, 0
        self.is_read = self.was_met = False
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self) -> "Loader":
        self.was_met |= self.is_read
        self.state["given"] = 0
        return self

    def __next__(self) -> tierstore.KeyedJaggedTensor:
        self.was_met |= self.is_read
        self.is_read = True
        self.calls += 1
        if self.state["given"] == 2:
            self.waits.set()
            self.goes_on.wait(100)
        self.is_read = False
        if self.state["given"] == 5:
            raise StopIteration
        self.state["given"] += 1
        return batch(self.state["given"])

    def state_dict(self) -> dict[str, int]:
        return self.state


@pytest.mark.parametrize("depth", [0, 2])
def test_the_next_pass_waits_for_what_the_last_one_reads(collection, depth):
    """Also once another, closed while it waited for the same, has taken no batch."""
    loader, found = Loader(), list[int]()
    for _ in tierstore.prefetch(loader, collection, depth=2):
        assert loader.waits.wait(10)
        break
    closed = tierstore.prefetch(loader, collection, depth=1)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        next(closed)
    closed.close()

    def next_pass() -> None:
        found.extend(int(each.values()) for each in tierstore.prefetch(loader, collection, depth=depth))

    thread = threading.Thread(target=next_pass, daemon=True)
    thread.start()
    thread.join(0.1)  # enough, as a rule, to meet the read
    loader.goes_on.set()
    thread.join(10)
    for each in prefetch_threads():
        each.join(10)
    assert found == [1, 2, 3, 4, 5]
    assert not loader.was_met
    assert loader.calls == 3 + 6


@pytest.mark.parametrize("depth", [0, 3])
def test_the_position_is_that_of_the_batch_given(collection, depth):
    loader = Loader()
    loader.goes_on.set()
    ahead = tierstore.prefetch(loader, collection, depth=depth)
    with pytest.raises(TypeError, match=r"batches= must have a state_dict\(\)"):
        ahead.state_dict()
    positions = [(int(each.values()), ahead.state_dict()) for each in ahead]
    assert positions == [(number, {"given": number}) for number in range(1, 6)]
    plain = tierstore.prefetch([batch(1)], collection, depth=depth)
    next(plain)
    with pytest.raises(TypeError, match=r"batches= must have a state_dict\(\)"):
        plain.state_dict()
    loader.state_dict = fail  # type: ignore[method-assign, assignment]
    ahead = tierstore.prefetch(loader, collection, depth=depth)
    assert len([*zip(range(2), ahead, strict=False)]) == 2, "whoever does not ask does not see the error"
    with pytest.raises(OSError, match="the network is gone"):
        ahead.state_dict()
    ahead.close()


def test_wrong_arguments_and_only_the_source_ends_a_pass():
    """Not what ``features``, or ``iter`` of the source, raises as an iterator that has ended does."""

    class Empty:
        def __iter__(self) -> Iterator[Any]:
            return iter(next(iter(())))

    with tierstore.open(cold="memory", ddr="1MiB") as store:
        collection = make_collection(store)
        with pytest.raises(ValueError, match="depth="):
            tierstore.prefetch([], collection, depth=True)
        with pytest.raises(TypeError, match="pass features="):
            next(iter(tierstore.prefetch([object()], collection, depth=1)))
        bag = tierstore.TieredEmbeddingBag(store["a"])
        batches: Any = [[torch.arange(2).view(1, 2)] * (number != 3) for number in range(8)]
        seen = []
        with pytest.raises(RuntimeError, match="features= or iter"):
            seen.extend(tierstore.prefetch(batches, bag, depth=2, features=lambda each: next(iter(each))))
        assert len(seen) == 3
        for depth in (0, 2):
            with pytest.raises(RuntimeError, match="StopIteration"):
                next(tierstore.prefetch(Empty(), bag, depth=depth))


def test_a_source_that_asks_its_own_pass_for_a_batch(store_dir):
    def batches() -> Iterator[Any]:
        yield batch(1)
        goes_on.wait(10)
        yield next(pipeline)

    goes_on = threading.Event()
    with tierstore.open(store_dir, ddr="1MiB") as store:
        pipeline = tierstore.prefetch(batches(), make_collection(store), depth=1)
        next(pipeline)
        goes_on.set()
        for thread in prefetch_threads():
            thread.join(10)
        with pytest.raises(RuntimeError, match="asked the pass that reads from them"):
            next(pipeline)


@pytest.mark.parametrize(("ddr", "hbm"), [("1MiB", 0), ("64MiB", "256KiB"), ("64MiB", "64MiB")])
def test_one_object_given_again_holds_no_rows_once_it_was_used(ddr, hbm):
    """Its graph is alive: that keeps what a lookup holds."""
    with tierstore.open(cold="memory", ddr=ddr, hbm=hbm) as store:
        table = store.create_table(tierstore.TableConfig(name="a", num_embeddings=20_000, embedding_dim=16))
        bag, ids = tierstore.TieredEmbeddingBag(table), torch.arange(40).view(-1, 4)
        tickets = [bag.prepare(ids), bag.prepare(ids)]
        assert bag.bring_in(tickets[0])
        out = bag(ids)
        out.sum().backward()
        assert bag.bring_in(tickets[1])
        for each in tickets:
            bag.forget(each)
        assert table.pool.pins.num_held == table.pool.pins.num_pinned == table.pool.tier.num_leased == 0
