"""The queue, against closed forms and against a simulation event by event."""

import heapq
import math

import numpy as np
import pytest

from tierstore.plan.queueing import Queue, latencies, latency_at, parse_query_sizes

EXPONENTIAL = tuple((-np.log(1 - (np.arange(2000) + 0.5) / 2000)).tolist())
"""Quantiles of the exponential distribution, of mean 1."""
pytestmark = pytest.mark.kernel
FEW = 2000
"""Queries, where kernels may run as plain Python."""


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_mean_latency_of_equal_queries(load: float) -> None:
    """M/D/1: Pollaczek and Khinchine's formula."""
    found = latencies(Queue(base_s=0.01, sample_s=0.0), load / 0.01, num_queries=300_000)
    assert found.mean() == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.02)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_percentiles_of_queries_of_random_size(load: float) -> None:
    """M/M/1: the time from arrival to answer is exponential, of rate mu - lambda."""
    queue = Queue(base_s=0.0, sample_s=0.01, sizes=EXPONENTIAL)
    found = latency_at(queue, load / 0.01, num_queries=400_000)
    for share, seconds in ((0.5, found.p50_s), (0.95, found.p95_s), (0.99, found.p99_s)):
        assert seconds == pytest.approx(-math.log(1 - share) * 0.01 / (1 - load), rel=0.06), share


def test_mean_latency_with_several_executors() -> None:
    """M/M/c: Erlang's formula of the chance to wait."""
    servers, load = 3, 0.7
    offered = servers * load
    idle = sum(offered**k / math.factorial(k) for k in range(servers))
    busy = offered**servers / math.factorial(servers) / (1 - load)
    waited = busy / (idle + busy) / (servers / 0.01 * (1 - load))
    queue = Queue(base_s=0.0, sample_s=0.01, sizes=EXPONENTIAL, executors=servers)
    assert latencies(queue, offered / 0.01, num_queries=300_000).mean() == pytest.approx(0.01 + waited, rel=0.03)


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


@pytest.mark.parametrize("executors", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3, 50])
def test_every_query_as_by_events(executors: int, batch: int) -> None:
    queue = Queue(
        base_s=0.3, sample_s=0.11, sizes=(1.0, 1.5, 2.0, 7.0), executors=executors, batch_samples=float(batch)
    )
    rate = 0.7 * queue.rate_max
    generator = np.random.default_rng(0)
    arrivals = np.cumsum(generator.standard_exponential(FEW)) / rate
    sizes = np.array(queue.sizes)[generator.integers(0, 4, FEW)]
    expected = by_events(queue, arrivals.tolist(), sizes.tolist())
    assert latencies(queue, rate, num_queries=FEW) == pytest.approx(expected, rel=1e-9)


def test_faster_service_and_fewer_queries_never_wait_longer() -> None:
    queue = Queue(base_s=0.002, sample_s=0.001, sizes=(1.0, 4.0))
    slower = Queue(base_s=0.002, sample_s=0.0011, sizes=(1.0, 4.0))
    assert (latencies(queue, 150, num_queries=FEW) <= latencies(slower, 150, num_queries=FEW) + 1e-12).all()
    assert (latencies(queue, 100, num_queries=FEW) <= latencies(queue, 150, num_queries=FEW) + 1e-12).all()


def test_query_sizes_as_text() -> None:
    assert parse_query_sizes("100, 100,200\n700") == (100, 100, 200, 700)
    for text in ("", "100, x", "0", "-1", "nan", "1e999"):
        with pytest.raises(ValueError, match=r"expected"):
            parse_query_sizes(text)
