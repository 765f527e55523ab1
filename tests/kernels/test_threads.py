"""Work split over threads: every range once; many readers beside one trainer: no torn row, no stale row, no error."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tierstore import optim
from tierstore.kernels import threads
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.threads import MIN_WORK, Workers
from tierstore.pool.pool import Pool
from tierstore.store.pools import Pools

ROWS, DIM, STEPS = 2000, 8, 40
CONFIG = tierstore.TableConfig(
    name="t", num_embeddings=ROWS, embedding_dim=DIM, init=tierstore.init.Constant(0.0), optimizer=optim.SGD(lr=1.0)
)


@pytest.mark.parametrize("tiers", [{"policy": "lru"}, {"hbm": "36KiB"}, {"hbm": "1MiB"}], ids=str)
def test_readers_see_whole_rows_that_never_go_back(store_dir: Path, tiers: dict[str, Any]) -> None:
    """Every step subtracts 1 from every column of the rows it touches, so a row's columns are equal at all times."""
    with tierstore.open(store_dir, ddr="480KiB", threads=2, **tiers) as store:
        table = store.create_table(CONFIG)
        collection = tierstore.TieredEmbeddingBagCollection(store)
        done = threading.Event()
        failures: list[str] = []
        checked = [0, 0, 0]

        def read(number: int) -> None:
            generator = torch.Generator().manual_seed(number)
            lowest = torch.zeros(ROWS)
            try:
                while not done.is_set() or not checked[number]:
                    ids = torch.randint(0, ROWS, (40,), generator=generator).unique()
                    rows = table.read(ids)
                    if not torch.equal(rows, rows[:, :1].expand(-1, DIM)):
                        failures.append(f"torn row: {rows}")
                    if (rows[:, 0] > lowest[ids]).any():
                        failures.append("a row went back to an older value")
                    lowest[ids] = rows[:, 0]
                    checked[number] += 1
            except Exception as error:
                failures.append(repr(error))

        readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
        for reader in readers:
            reader.start()
        generator = torch.Generator().manual_seed(99)
        counts = torch.zeros(ROWS)
        batches = []
        for _ in range(STEPS):
            ids = torch.randint(0, ROWS, (300,), generator=generator)
            counts += torch.bincount(ids, minlength=ROWS)
            batches.append(tierstore.KeyedJaggedTensor(["t"], ids, lengths=torch.ones(300, dtype=torch.int64)))
        for step, features in enumerate(tierstore.prefetch(batches, collection, depth=2)):
            collection(features).values().sum().backward()
            if step % 20 == 19:
                store.commit()
        done.set()
        for reader in readers:
            reader.join()
        assert not failures, failures[0]
        assert min(checked) > 0
        assert torch.equal(table.read(torch.arange(ROWS)), -counts[:, None].expand(-1, DIM))


def test_a_commit_and_a_first_lookup_agree_on_the_version(store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that another thread makes while a commit begins belong to the next version."""
    with tierstore.open(store_dir, ddr="440KiB") as store:
        table = store.create_table(CONFIG)
        begun, has_read = threading.Event(), threading.Event()

        def read() -> None:
            begun.wait(60)
            table.read(torch.arange(5))
            has_read.set()

        thread = threading.Thread(target=read)
        thread.start()

        choose = Pools.__iter__

        def choose_slowly(pools: Pools) -> Iterator[Pool]:
            chosen = choose(pools)
            begun.set()
            has_read.wait(0.2)  # in vain, if the lookup waits for the commit to have begun
            return chosen

        with monkeypatch.context() as patch:
            patch.setattr(Pools, "__iter__", choose_slowly)
            store.commit()
        thread.join()
        for value in range(1, 4):
            table.write(torch.arange(ROWS), torch.full((ROWS, DIM), float(value)))
            assert store.commit() == value + 1


BOUNDS = [0, 3, 3, 7, 10, 11]
RANGES = [(0, 3), (3, 7), (7, 10), (10, 11)]


def in_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def check_that_each_range_is_done_once(workers: Workers) -> None:
    done: list[tuple[int, int]] = []
    workers.run(lambda begin, end: done.append((begin, end)), BOUNDS)
    assert sorted(done) == RANGES


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_range_is_done_once_and_an_error_comes_out(count: int) -> None:
    workers = Workers(count)
    torch.ones(10**6).sum()  # torch's threads are awake

    def check() -> None:
        for wrong in (0, 3, 10):

            def work(begin: int, _end: int, wrong: int = wrong) -> None:
                if begin == wrong:
                    raise KeyError(begin)

            with pytest.raises(KeyError, match=str(wrong)):
                workers.run(work, BOUNDS)
            for _ in range(10):
                check_that_each_range_is_done_once(workers)

    check()
    in_thread(check)
    workers.close()


def test_the_main_thread_borrows_torchs_threads_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    team = threads._torch_team()
    if team is None:
        pytest.skip("torch's OpenMP is not GNU's")
    used: list[bool] = []
    run = type(team).run
    monkeypatch.setattr(type(team), "run", lambda *given: used.append(run(*given)) or used[-1])
    workers = Workers(2)
    check_that_each_range_is_done_once(workers)
    in_thread(lambda: check_that_each_range_is_done_once(workers))
    assert used == [True, False]
    workers.close()


def test_torchs_threads_are_found_beside_those_of_scikit_learn() -> None:
    if threads._torch_team() is None:
        pytest.skip("torch's OpenMP is not GNU's")
    code = "import sklearn.datasets, torch, tierstore.kernels.threads as own; print(own.Workers(2).native_team())"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_work_within_work() -> None:
    workers = Workers(3)
    done: list[int] = []
    workers.run(lambda begin, end: workers.run(lambda a, b: done.append(b - a), range(begin, end + 1)), [0, 4, 9, 11])
    assert done == [1] * 11
    check_that_each_range_is_done_once(workers)
    workers.close()


def test_ranges_of_about_equal_work() -> None:
    workers = Workers(4)
    starts = np.cumsum([0, *([MIN_WORK // 2] * 16), 0, 0]).astype(np.int64)

    def shared(starts: Int64s) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        workers.share(lambda begin, end: ranges.append((begin, end)), starts)
        return sorted(ranges)

    ranges = shared(starts)
    assert [begin for begin, _ in ranges] + [18] == [0] + [end for _, end in ranges]
    assert [int(starts[end] - starts[begin]) for begin, end in ranges] == [2 * MIN_WORK] * 4
    assert shared(starts[:3]) == [(0, 2)], "too little to share"
    assert shared(starts[:1]) == []
    workers.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_thread_that_cannot_start_leaves_no_range_behind(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(threads, "_torch_team", lambda: None)
    workers, calls, start = Workers(2), [0], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        calls[0] += not thread.name.startswith("tierstore-")  # as one that closes what another test dropped
        if calls[0] == 1:
            raise error
        start(thread)

    done: list[tuple[int, int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        workers.run(lambda begin, end: done.append((begin, end)), BOUNDS)
        for _ in range(20):
            check_that_each_range_is_done_once(workers)
    workers.close()
    assert calls[0] == 2
    assert sorted(done) == RANGES
