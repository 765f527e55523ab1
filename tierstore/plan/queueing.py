"""Latency of queries by simulation of their queue: they come at random times (a Poisson process), wait in order, and
are answered by executors that each take what waits, as far as a batch holds it, in a time that grows with its samples.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from ..kernels.arrays import Float64s
from ..kernels.jit import kernel

NUM_QUERIES: Final = 100_000
_WARM_SHARE: Final = 0.1  # of the queries, the first, which meet an emptier queue; they do not count


class Latency(NamedTuple):
    """Of queries at a rate, waiting included, in seconds; infinite where they come faster than they are answered."""

    queries_per_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Executors, and the time that they need.

    Attributes:
        base_s, sample_s: seconds of a batch, whatever its samples, and of each of its samples.
        sizes: samples of a query, each entry as likely as any other.
        batch_samples: most samples of a batch of several queries; 1: every query is a batch of its own.
    """

    base_s: float
    sample_s: float
    sizes: tuple[float, ...] = (1.0,)
    executors: int = 1
    batch_samples: float = 1.0

    @property
    def rate_max(self) -> float:
        """Queries a second that could be answered were there always some waiting."""
        together = _queries_a_batch(self.sizes, float(self.batch_samples))
        busy = self.base_s / together + self.sample_s * float(np.mean(self.sizes))
        return self.executors / busy if busy else math.inf


@lru_cache(maxsize=64)
def _queries_a_batch(sizes: tuple[float, ...], batch_samples: float) -> float:
    """The mean while there are always some waiting: the first that does not fit ends a batch, however full that is."""
    drawn = np.random.default_rng(0).choice(sizes, NUM_QUERIES)
    num_batches, nothing = np.zeros(1), np.zeros(NUM_QUERIES)
    _serve(nothing, drawn, 1.0, 0.0, batch_samples, num_batches, np.empty(NUM_QUERIES))
    return float(NUM_QUERIES / num_batches[0])


def latencies(queue: Queue, queries_per_s: float, *, num_queries: int = NUM_QUERIES) -> Float64s:
    """Seconds from arrival to answer of simulated queries, float64 [num_queries], in order of arrival: the same queries
    at every rate, and the same gaps but for their scale. ValueError: the rate is not more than 0."""
    if not queries_per_s > 0 or not math.isfinite(queries_per_s):
        raise ValueError(f"queries_per_s={queries_per_s!r}: expected more than 0")
    generator = np.random.default_rng(0)
    arrivals = np.cumsum(generator.standard_exponential(num_queries)) / queries_per_s
    sizes = np.array(queue.sizes, np.float64)[generator.integers(0, len(queue.sizes), num_queries)]
    waited, free = np.empty(num_queries), np.zeros(queue.executors)
    _serve(arrivals, sizes, queue.base_s, queue.sample_s, float(queue.batch_samples), free, waited)
    return waited


@kernel
def _serve(
    arrivals: Any, sizes: Any, base_s: float, sample_s: float, batch_samples: float, free: Any, waited: Any
) -> None:
    """``free``: when each executor has done what it took."""
    first = 0
    while first < arrivals.size:
        executor = np.argmin(free)
        start = max(free[executor], arrivals[first])
        samples = sizes[first]
        stop = first + 1
        while stop < arrivals.size and arrivals[stop] <= start and samples + sizes[stop] <= batch_samples:
            samples += sizes[stop]
            stop += 1
        free[executor] = start + base_s + sample_s * samples
        for query in range(first, stop):
            waited[query] = free[executor] - arrivals[query]
        first = stop


def latency_at(queue: Queue, queries_per_s: float, *, num_queries: int = NUM_QUERIES) -> Latency:
    """Percentiles, without the first tenth of the queries; all infinite at a rate that no queue can carry."""
    if queries_per_s >= queue.rate_max:
        return Latency(queries_per_s, math.inf, math.inf, math.inf)
    found = latencies(queue, queries_per_s, num_queries=num_queries)
    return _percentiles(queries_per_s, found[int(len(found) * _WARM_SHARE) :])


def latency_alone(queue: Queue) -> Latency:
    """Of queries so rare that none waits."""
    return _percentiles(0.0, queue.base_s + queue.sample_s * np.array(queue.sizes))


def _percentiles(queries_per_s: float, seconds: Float64s) -> Latency:
    return Latency(queries_per_s, *np.quantile(seconds, (0.5, 0.95, 0.99), method="higher").tolist())
