"""The queue, against a simulation event by event."""

import heapq
import math

import numpy as np
import pytest

from tierstore.plan.model import Queue, latencies, latency_at

pytestmark = pytest.mark.kernel
FEW = 1000
"""Queries, where kernels may run as plain Python."""


def by_events(queue: Queue, arrivals: list[float], sizes: list[float]) -> list[float]:
    """Executors take what waits when they get free, the first come first, as far as a batch may hold it."""
    events: list[tuple[float, int, int]] = [(time, 1, number) for number, time in enumerate(arrivals)]
    heapq.heapify(events)
    waiting: list[int] = []
    free, answered = queue.executors, [math.nan] * len(arrivals)
    while events:
        now, kind, number = heapq.heappop(events)
        if kind:
            waiting.append(number)
        else:
            free += 1
        while free and waiting and not (events and events[0][0] == now):
            taken = [waiting.pop(0)]
            while waiting and sum(sizes[each] for each in taken) + sizes[waiting[0]] <= queue.batch_samples:
                taken.append(waiting.pop(0))
            done = now + queue.base_s + queue.sample_s * sum(sizes[each] for each in taken)
            for each in taken:
                answered[each] = done - arrivals[each]
            free -= 1
            heapq.heappush(events, (done, 0, -1))
    return answered


@pytest.mark.parametrize(("executors", "batch"), [(1, 1), (1, 50), (2, 3), (5, 50)])
def test_every_query_as_by_events(executors: int, batch: int) -> None:
    queue = Queue(base_s=0.3, sample_s=0.11, sizes=(1.0, 1.5, 2.0, 7.0), executors=executors, batch_samples=batch)
    rate = 0.7 * queue.rate_max
    generator = np.random.default_rng(0)
    arrivals = np.cumsum(generator.standard_exponential(FEW)) / rate
    sizes = np.array(queue.sizes)[generator.integers(0, 4, FEW)]
    expected = by_events(queue, arrivals.tolist(), sizes.tolist())
    found = latencies(queue, rate, num_queries=FEW)
    assert found == pytest.approx(expected, rel=1e-9)
    told = latency_at(queue, rate, num_queries=FEW)
    settled = np.sort(expected[FEW // 10 :])
    for share, seconds in ((0.5, told.p50_s), (0.95, told.p95_s), (0.99, told.p99_s)):
        assert seconds == pytest.approx(settled[math.ceil(share * (len(settled) - 1))])
    assert latency_at(queue, queue.rate_max).p50_s == math.inf


@pytest.mark.parametrize("sizes", [(1.0, 1000.0), (7.0,), (1.0, 1.0, 2000.0)])
def test_the_highest_rate_is_that_of_executors_for_whom_always_some_wait(sizes: tuple[float, ...]) -> None:
    """Of mixed sizes a batch ends at the first that does not fit: it has fewer queries than their mean size says."""
    queue = Queue(base_s=0.3, sample_s=0.001, sizes=sizes, executors=2, batch_samples=1000.0)
    asked = np.random.default_rng(1).choice(sizes, FEW).tolist()
    assert queue.rate_max == pytest.approx(FEW / max(by_events(queue, [0.0] * FEW, asked)), rel=0.05)
