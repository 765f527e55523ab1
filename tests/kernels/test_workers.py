"""Work split over threads: every range once, errors come out, whoever's threads they are."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tierstore.kernels import threads
from tierstore.kernels.arrays import Int64s
from tierstore.kernels.threads import MIN_WORK, Workers

BOUNDS = [0, 3, 3, 7, 10, 11]
RANGES = [(0, 3), (3, 7), (7, 10), (10, 11)]


def in_thread(call: Callable[[], None]) -> None:
    """Run it in another thread; an error there is one here."""
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
