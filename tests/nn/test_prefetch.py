"""The pipeline: order, depth, bounds, and what happens when something fails in it."""

import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests import children
from tierstore import errors

MANY = 100_000
"""Rows that do not all fit 1 MiB: where they do, none is ever evicted."""


def make_collection(store: tierstore.Store, rows: int = 500) -> tierstore.TieredEmbeddingBagCollection:
    store.create_table(tierstore.TableConfig(name="a", num_embeddings=rows, embedding_dim=4))
    return tierstore.TieredEmbeddingBagCollection(store)


def batch(*ids: int) -> tierstore.KeyedJaggedTensor:
    return tierstore.KeyedJaggedTensor(["a"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


def pinned(store: tierstore.Store) -> int:
    return store["a"].pool.pins.num_pinned


@pytest.mark.parametrize("depth", [0, 1, 2, 8])
def test_batches_come_in_order_and_nothing_stays_pinned(store_dir: Path, depth: int) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        batches = [batch(i, i + 1, 499) for i in range(20)]
        seen = []
        for item in tierstore.prefetch(batches, collection, depth=depth):
            collection(item).values().sum().backward()
            seen.append(item)
        assert [id(item) for item in seen] == [id(item) for item in batches]
        assert pinned(store) == 0


def test_rows_are_in_place_before_the_batch_is_asked_for(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        pipeline = tierstore.prefetch([batch(1, 2), batch(3, 4)], collection, depth=1)
        first = next(pipeline)
        collection(first)
        second = next(pipeline)
        misses = store.stats().ddr.misses
        collection(second)
        assert store.stats().ddr.misses == misses == 4


def test_the_reader_is_never_more_than_depth_ahead(store_dir: Path) -> None:
    read = 0

    def reader() -> Iterator[tierstore.KeyedJaggedTensor]:
        nonlocal read
        for i in range(50):
            read = i + 1
            yield batch(i)

    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        for used, item in enumerate(tierstore.prefetch(reader(), collection, depth=3), 1):
            collection(item).values().sum().backward()
            assert read <= used + 3


def test_an_error_in_the_reader_comes_after_the_batches_before_it(store_dir: Path) -> None:
    def reader() -> Iterator[tierstore.KeyedJaggedTensor]:
        yield batch(1)
        yield batch(2)
        raise OSError("the disk fell off")

    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        pipeline = tierstore.prefetch(reader(), collection, depth=4)
        for _ in range(2):
            collection(next(pipeline)).values().sum().backward()
        with pytest.raises(OSError, match="the disk fell off") as caught:
            next(pipeline)
        assert "reader" in [entry.name for entry in caught.traceback]
        assert pinned(store) == 0
        assert store.commit() == 1


def test_a_wrong_id_in_a_later_batch_surfaces_with_its_cause(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        pipeline = tierstore.prefetch([batch(1), batch(500), batch(2)], collection, depth=2)
        collection(next(pipeline)).values().sum().backward()
        with pytest.raises(ValueError, match=r"id 500 is not a row of table 'a'"):
            next(pipeline)
        assert pinned(store) == 0
        assert torch.isfinite(store["a"].read(torch.arange(500))).all()


def test_an_error_in_the_model_leaves_nothing_pinned_and_no_thread(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        with pytest.raises(ZeroDivisionError):
            run_and_fail(collection)
        assert pinned(store) == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "tierstore-prefetch"]
        collection(batch(3)).values().sum().backward()
        assert store.commit() == 1


def run_and_fail(collection: Any) -> None:
    pipeline = tierstore.prefetch([batch(i) for i in range(9)], collection, depth=3)
    try:
        for item in pipeline:
            out = collection(item).values()
            raise ZeroDivisionError(out.shape)
    finally:
        pipeline.close()


def misses(policy: str, shares: list[float], *, depth: int, trained: bool) -> int:
    """Of batches with so many rows, as shares of the cache, looked up or trained."""
    generator = np.random.default_rng(1)
    with tierstore.open(cold="memory", ddr="440KiB", policy=policy) as store:
        collection = make_collection(store, rows=MANY)
        rows = [dict.fromkeys((generator.zipf(1.2, 20_000) % MANY).tolist()) for _ in shares]
        capacity = store["a"].pool.cache.capacity
        batches = [
            batch(*list(each)[: max(1, int(share * capacity))]) for each, share in zip(rows, shares, strict=True)
        ]
        for item in tierstore.prefetch(batches, collection, depth=depth):
            with torch.set_grad_enabled(trained):
                out = collection(item).values()
            if trained:
                out.sum().backward()
        assert pinned(store) == 0
        return store.stats().ddr.misses


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("caches", [0.6, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0])
def test_prefetching_reads_no_more_than_a_plain_loop(caches: float, trained: bool) -> None:
    """In a cache of so many batches. LFU and TinyLFU evict others where rows of batches ahead are pinned."""
    for policy, most in (("lru", 1.0), ("lfu", 1.03), ("tinylfu", 1.03)):
        plain, *ahead = [misses(policy, [1 / caches] * 40, depth=depth, trained=trained) for depth in (0, 1, 2, 8)]
        assert max(ahead) <= most * plain


@pytest.mark.parametrize("trained", [False, True])
def test_batches_of_any_sizes_are_read_as_by_a_plain_loop(trained: bool) -> None:
    """One larger than the cache is used before the next one comes in."""
    shares = np.random.default_rng(2).lognormal(-1, 1, 60).tolist()
    assert len({misses("lru", shares, depth=depth, trained=trained) for depth in (0, 1, 3)}) == 1


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_batches_that_stay_in_use_stop_nobody(share: float) -> None:
    """All outputs wait for one backward pass, and an evaluation looks up in between."""
    with tierstore.open(cold="memory", ddr="440KiB", policy="lru") as store:
        collection = make_collection(store, rows=MANY)
        rows = int(share * store["a"].pool.cache.capacity)
        batches = [batch(*range(i * rows, (i + 1) * rows)) for i in range(12)]
        outs = []
        for item in tierstore.prefetch(batches, collection, depth=3):
            outs.append(collection(item).values().sum())
            with torch.no_grad():
                for other in tierstore.prefetch(batches[:3], collection, depth=2):
                    collection(other)
        assert store.stats().ddr.split_batches > 0 or share < 1
        torch.stack(outs).sum().backward()  # type: ignore[no-untyped-call]
        assert pinned(store) == 0


def test_backward_begins_with_the_rows_that_are_in_still(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="396KiB", policy="lru") as store:
        collection = make_collection(store, rows=MANY)
        store["a"].read(torch.arange(1))
        before = store.stats().ddr
        rows = before.capacity_rows * 5 // 4
        collection(batch(*range(1, rows + 1))).values().sum().backward()
        assert store.stats().ddr.misses - before.misses == rows + rows - before.capacity_rows


def test_a_batch_larger_than_the_cache_works(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="396KiB", policy="lru") as store:
        collection = make_collection(store, rows=5000)
        before = store["a"].read(torch.arange(5000))
        for item in tierstore.prefetch([batch(*range(5000))] * 3, collection, depth=2):
            collection(item).values().sum().backward()
        assert store.stats().ddr.capacity_rows < 1000
        assert store.stats().ddr.split_batches > 0
        expected = before
        for _ in range(3):
            expected = expected - torch.tensor(0.01)
        assert torch.equal(store["a"].read(torch.arange(5000)), expected)


def test_ids_changed_after_preparation_are_looked_up_anew(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        for item in tierstore.prefetch([batch(1)], collection, depth=1):
            item.values()[0] = 7
            assert torch.equal(collection(item)["a"], store["a"].read(torch.tensor([7])))
        assert pinned(store) == 0


def test_a_bag_can_be_prefetched(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        make_collection(store)
        bag = tierstore.TieredEmbeddingBag(store["a"], mode="sum")
        pairs = [(torch.tensor([i, i + 1]), torch.tensor([0])) for i in range(5)]
        for ids, offsets in tierstore.prefetch(pairs, bag, depth=2, features=lambda pair: pair):
            assert torch.equal(bag(ids, offsets)[0], store["a"].read(ids).sum(0))
        assert pinned(store) == 0


@pytest.mark.parametrize("shape", [(), (2,), (2, 1, 3)])
def test_tensors_of_ids_are_prefetched_as_they_are(store_dir: Path, shape: tuple[int, ...]) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        make_collection(store)
        rows = tierstore.TieredEmbedding(store["a"])
        pipeline = tierstore.prefetch([torch.full(shape, 1), torch.full(shape, 2)], rows, depth=1)
        rows(next(pipeline))
        ids = next(pipeline)
        assert store.stats().ddr.misses == 2
        assert rows(ids).shape == (*shape, 4)
        assert store.stats().ddr.misses == 2


def test_other_offsets_than_those_prepared_are_respected(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        make_collection(store)
        bag = tierstore.TieredEmbeddingBag(store["a"], mode="sum")
        ids = torch.tensor([1, 2, 3])
        for given, _ in tierstore.prefetch([(ids, torch.tensor([0]))], bag, depth=1, features=lambda pair: pair):
            assert bag(given, torch.tensor([0, 1])).shape == (2, 4)
        assert pinned(store) == 0


def test_wrong_arguments(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        with pytest.raises(ValueError, match="depth=-1"):
            tierstore.prefetch([], collection, depth=-1)
        with pytest.raises(TypeError, match="pass features="):
            next(iter(tierstore.prefetch([object()], collection, depth=1)))


def test_closing_the_store_under_a_pipeline_is_a_clear_error(store_dir: Path) -> None:
    store = tierstore.open(store_dir, ddr="1MiB")
    collection = make_collection(store)
    pipeline = tierstore.prefetch((batch(i) for i in range(100)), collection, depth=1)
    next(pipeline)
    store.close()
    with pytest.raises(errors.ClosedError):
        list(pipeline)


def in_eviction_order(store: tierstore.Store) -> list[int]:
    cache = store["a"].pool.cache
    return [int(key) & 2**40 - 1 for key in cache.keys_of(cache.resident_slots())]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("lookahead", [1, 3, 50])
def test_announced_rows_stay_and_nothing_stays_announced(store_dir: Path, depth: int, lookahead: int) -> None:
    with tierstore.open(store_dir, ddr="1MiB", policy="lookahead") as store:
        collection = make_collection(store, MANY)
        batches = [batch(i, i + 1, 499) for i in range(20)]
        seen = []
        for item in tierstore.prefetch(batches, collection, depth=depth, lookahead=lookahead):
            collection(item).values().sum().backward()
            seen.append(item)
            with store["a"].pool.arena.lock:
                store["a"].pool.cache.check_integrity()
        assert [id(item) for item in seen] == [id(item) for item in batches]
        assert pinned(store) == 0
        store["a"].pool.cache.check_integrity()
        assert announced_keys(store) == 0


def test_lookahead_under_another_policy_is_said_to_change_nothing(
    store_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tierstore.open(store_dir, ddr="1MiB", policy="lru") as store:
        collection = make_collection(store, MANY)
        for _ in tierstore.prefetch([batch(1), batch(2)], collection, lookahead=2):
            pass
    said = [record.message for record in caplog.records if "lookahead" in record.message]
    assert said == ['lookahead= changes nothing under this policy; open the store with policy="lookahead"']


def announced_keys(store: tierstore.Store) -> int:
    cache: Any = store["a"].pool.cache
    return int((cache._books.last_uses != 0).sum())


def test_the_row_used_last_is_evicted_first(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB", policy="lookahead") as store:
        collection = make_collection(store, MANY)
        store["a"].read(torch.tensor([4, 1, 2, 3, 9, 5]))
        pipeline = tierstore.prefetch([batch(5), batch(3, 5), batch(1, 3), batch(2)], collection, depth=0, lookahead=3)
        next(pipeline)
        assert in_eviction_order(store) == [4, 9, 2, 1, 3, 5]
        next(pipeline)
        assert in_eviction_order(store) == [4, 9, 2, 1, 3, 5]
        next(pipeline)
        assert in_eviction_order(store) == [4, 9, 5, 2, 1, 3]
        pipeline.close()
        assert announced_keys(store) == 0
        assert set(in_eviction_order(store)) == {1, 2, 3, 4, 5, 9}


@pytest.mark.parametrize("depth", [0, 2])
def test_announcements_of_an_abandoned_pipeline_are_dropped(store_dir: Path, depth: int) -> None:
    with tierstore.open(store_dir, ddr="1MiB", policy="lookahead") as store:
        collection = make_collection(store, MANY)
        pipeline = tierstore.prefetch([batch(i, i + 1) for i in range(30)], collection, depth=depth, lookahead=10)
        collection(next(pipeline)).values().sum().backward()
        assert announced_keys(store) > 0
        pipeline.close()
        assert announced_keys(store) == pinned(store) == 0
        store["a"].pool.cache.check_integrity()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_wrong_id_far_ahead_surfaces_in_its_turn(store_dir: Path, depth: int) -> None:
    with tierstore.open(store_dir, ddr="1MiB", policy="lookahead") as store:
        collection = make_collection(store, MANY)
        items = [*(batch(i) for i in range(5)), batch(MANY), batch(2)]
        pipeline = tierstore.prefetch(items, collection, depth=depth, lookahead=9)
        for _ in range(5):
            collection(next(pipeline)).values().sum().backward()
        with pytest.raises(ValueError, match=rf"id {MANY} is not a row of table 'a'"):
            next(pipeline)
        assert pinned(store) == announced_keys(store) == 0


def test_the_reader_waits_for_room_to_announce(store_dir: Path) -> None:
    """Each batch uses a third of the cache's rows; there is room for six uses a row."""
    read = 0

    def reader() -> Iterator[tierstore.KeyedJaggedTensor]:
        nonlocal read
        for i in range(60):
            read = i + 1
            yield batch(*range(i, i + rows // 3))

    with tierstore.open(store_dir, ddr="480KiB", policy="lookahead") as store:
        collection = make_collection(store, rows=5000)
        rows = store["a"].pool.cache.capacity
        for used, item in enumerate(tierstore.prefetch(reader(), collection, depth=0, lookahead=50), 1):
            collection(item).values().sum().backward()
            assert read <= used + 18
        assert used == read == 60
        assert announced_keys(store) == 0


@pytest.mark.parametrize("lookahead", [-1, True, 1.5])
def test_a_wrong_lookahead_is_refused(store_dir: Path, lookahead: Any) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store, pytest.raises(ValueError, match="lookahead"):
        tierstore.prefetch([], make_collection(store), lookahead=lookahead)


class Stuck:
    """A source that gives some batches and then waits, as one that reads from a network does."""

    def __init__(self, *, last: Callable[[], None] = lambda: None) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self._last = last

    def batches(self) -> Iterator[tierstore.KeyedJaggedTensor]:
        for i in range(3):
            yield batch(i, i + 1)
        self.waits.set()
        self.goes_on.wait(100)
        self._last()
        yield batch(400)


def within(seconds: float, action: Callable[[], object]) -> None:
    """AssertionError if it takes longer: far longer than it should."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"it takes more than {seconds} s"


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tierstore-prefetch"]


def fail() -> None:
    raise OSError("the network is gone")


@pytest.mark.parametrize("last", [lambda: None, fail], ids=["yields", "raises"])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_pipeline_whose_source_waits_ends_at_once_and_keeps_nothing(
    store_dir: Path, lookahead: int, last: Callable[[], None]
) -> None:
    stuck = Stuck(last=last)
    store = tierstore.open(store_dir, ddr="1MiB", policy="lookahead")
    collection = make_collection(store, MANY)
    pipeline = tierstore.prefetch(stuck.batches(), collection, depth=4, lookahead=lookahead)
    collection(next(pipeline)).values().sum().backward()
    assert stuck.waits.wait(10)
    assert (announced_keys(store) > 0) == (lookahead > 0)
    within(10, pipeline.close)
    (thread,) = prefetch_threads()
    assert thread.daemon
    assert pinned(store) == announced_keys(store) == 0
    store["a"].pool.cache.check_integrity()
    within(10, store.close)
    gone = weakref.ref(store), weakref.ref(collection)
    del store, collection, pipeline
    gc.collect()
    assert [each() for each in gone] == [None, None]
    stuck.goes_on.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_leaving_the_loop_while_the_source_waits_leaves_nothing(
    store_dir: Path, error: type[BaseException] | None
) -> None:
    stuck = Stuck()

    def train() -> None:
        for item in tierstore.prefetch(stuck.batches(), collection, depth=3):
            assert stuck.waits.wait(10)
            out = collection(item).values()
            if error is None:
                break
            raise error(len(out))

    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)

        def leaves() -> None:
            with contextlib.nullcontext() if error is None else pytest.raises(error):
                train()

        within(10, leaves)
        assert pinned(store) == 0
        store.create_table(tierstore.TableConfig(name="b", num_embeddings=5, embedding_dim=4))
        stuck.goes_on.set()
        for thread in prefetch_threads():
            thread.join(10)
        assert not prefetch_threads()


def test_ctrl_c_while_the_source_is_waited_for(store_dir: Path) -> None:
    def batches() -> Iterator[tierstore.KeyedJaggedTensor]:
        yield batch(1)
        is_expected.wait(100)
        os.kill(os.getpid(), signal.SIGINT)
        goes_on.wait(100)

    is_expected, goes_on = threading.Event(), threading.Event()
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        pipeline = tierstore.prefetch(batches(), collection, depth=2)
        collection(next(pipeline)).values().sum().backward()

        def wait() -> None:
            is_expected.set()
            next(pipeline)

        with pytest.raises(KeyboardInterrupt):
            wait()
        assert pinned(store) == 0
        assert store.commit() == 1
    goes_on.set()


@pytest.mark.parametrize("close", ["pipeline.close()", "pass"])
def test_an_interpreter_ends_though_a_source_waits(store_dir: Path, close: str) -> None:
    code = f"""
    def batches():
        yield torch.tensor([1, 2]), torch.tensor([0])
        os.read(os.pipe()[0], 1)

    with tierstore.open(sys.argv[1], ddr="1MiB", threads=1) as store:
        bag = tierstore.TieredEmbeddingBag(store.create_table(table_config()), mode="sum")
        pipeline = tierstore.prefetch(batches(), bag, depth=2, features=lambda pair: pair)
        bag(*next(pipeline))
        {close}
    print("ended")
    """
    assert children.run(code, store_dir, timeout=25) == "ended\n"


class Loader:
    """Reads in turn, as a loader that keeps its workers: one iterator for all passes."""

    def __init__(self) -> None:
        self.state = {"given": 0}
        self.is_read = self.was_met = False
        self.waits, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self) -> "Loader":
        self.was_met |= self.is_read
        self.state["given"] = 0
        return self

    def __next__(self) -> tierstore.KeyedJaggedTensor:
        self.was_met |= self.is_read
        self.is_read = True
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
def test_the_next_pass_waits_for_what_the_last_one_reads(store_dir: Path, depth: int) -> None:
    loader, found = Loader(), list[int]()
    with tierstore.open(store_dir, ddr="1MiB") as store:
        collection = make_collection(store)
        for _ in tierstore.prefetch(loader, collection, depth=2):
            assert loader.waits.wait(10)
            break

        def next_pass() -> None:
            found.extend(int(each.values()) for each in tierstore.prefetch(loader, collection, depth=depth))

        thread = threading.Thread(target=next_pass, daemon=True)
        thread.start()
        thread.join(0.3)  # enough, as a rule, to meet the read
        loader.goes_on.set()
        thread.join(10)
    assert found == [1, 2, 3, 4, 5]
    assert not loader.was_met


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_position_is_that_of_the_batch_given(store_dir: Path, depth: int, lookahead: int) -> None:
    loader = Loader()
    loader.goes_on.set()
    with tierstore.open(store_dir, ddr="1MiB", policy="lookahead") as store:
        collection = make_collection(store)
        ahead = tierstore.prefetch(loader, collection, depth=depth, lookahead=lookahead)
        with pytest.raises(TypeError, match=r"batches= must have a state_dict\(\)"):
            ahead.state_dict()
        positions = [(int(each.values()), ahead.state_dict()) for each in ahead]
        assert positions == [(number, {"given": number}) for number in range(1, 6)]
        plain = tierstore.prefetch([batch(1)], collection, depth=depth)
        next(plain)
        with pytest.raises(TypeError, match=r"batches= must have a state_dict\(\)"):
            plain.state_dict()
        loader.state_dict = fail  # type: ignore[method-assign, assignment]
        ahead = tierstore.prefetch(loader, collection, depth=depth, lookahead=lookahead)
        assert len([*zip(range(2), ahead, strict=False)]) == 2, "whoever does not ask does not see the error"
        with pytest.raises(OSError, match="the network is gone"):
            ahead.state_dict()
        ahead.close()
