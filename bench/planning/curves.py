"""Miss-ratio curves from samples: how far are they from the exact ones, and what do they take?"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.kernels.hashing import mix64
from tierstore.plan import Accesses
from tierstore.plan.curves import POLICIES, MissRatioCurve, curve
from tierstore.plan.curves.build import curve_of
from tierstore.plan.curves.sampled import Sample, part_of, sample_of
from tierstore.trace.sampling import is_sampled

__all__ = [
    "CRITEO_HIT_RATES",
    "SampledError",
    "one_by_one",
    "sampled_errors",
]

Int64s = NDArray[np.int64]

CRITEO_HIT_RATES: Final = {
    ("lru", 2_000): 0.6033,
    ("lru", 10_000): 0.7468,
    ("lru", 20_000): 0.8033,
    ("lfu", 2_000): 0.6666,
    ("lfu", 10_000): 0.7909,
    ("lfu", 20_000): 0.8349,
}
"""Of the 26 tables in one cache, each lookup an access, by policy and rows, as independent programs found them."""
_NUM_SIZES: Final = 20
_SMALLEST: Final = 0.001
"""Size of the smallest cache that is compared, as a share of the distinct rows."""


@dataclass(frozen=True, kw_only=True)
class SampledError:
    """Curves from samples of the rows, beside the exact one; in points of the hit rate, over 20 sizes from 0.1 % of
    the rows to all.

    Attributes:
        points: mean error over the sizes, by seed. plain_points: the same where a hash alone chooses the rows, as
            SHARDS-adj does.
        size_points: mean over the seeds, by size.
        exact_s, sampled_s: of processor time, the sampled curve's with what choosing the rows takes.
    """

    workload: str
    policy: str
    rate: float
    sampled_rows: int
    points: tuple[float, ...]
    plain_points: tuple[float, ...]
    sizes: tuple[int, ...]
    size_points: tuple[float, ...]
    exact_s: float
    sampled_s: float

    @property
    def mean_points(self) -> float:
        return float(np.mean(self.points))


class _Timed(NamedTuple):
    result: Any
    seconds: float


def _timed(action: Callable[[], Any]) -> _Timed:
    start = time.thread_time()
    result = action()
    return _Timed(result, time.thread_time() - start)


def one_by_one(keys: Int64s) -> Accesses:
    """Every key an access of one table, and a batch of its own."""
    return Accesses(keys, np.arange(len(keys) + 1), ("all",))


def sampled_errors(
    workload: str, accesses: Accesses, policies: Sequence[str] = POLICIES, *, rate: float = 0.01, num_seeds: int = 8
) -> Iterator[SampledError]:
    """Of each policy's curve."""
    num_rows = len(np.unique(accesses.keys))
    sizes = np.unique(np.rint(np.geomspace(_SMALLEST * num_rows, num_rows, _NUM_SIZES)).astype(np.int64))
    for policy in policies:
        yield _sampled_error(workload, accesses, policy, rate, num_seeds, sizes)


def _sampled_error(
    workload: str, accesses: Accesses, policy: str, rate: float, num_seeds: int, sizes: Int64s
) -> SampledError:
    def estimate(sample: Sample) -> MissRatioCurve:
        return curve_of(accesses, policy, sample, sizes=sizes)

    curve(one_by_one(accesses.keys[:1000]), policy, sampling_rate=0.5)  # compiles
    exact = _timed(lambda: curve(accesses, policy, sizes=sizes))
    ours = [
        _timed(lambda seed=seed: estimate(sample_of(accesses, rate, seed)))  # type: ignore[misc]
        for seed in range(num_seeds)
    ]
    plain = [estimate(hashed(accesses, rate, seed)) for seed in range(num_seeds)]
    points = np.array([_points(each.result, exact.result) for each in ours])
    return SampledError(
        workload=workload,
        policy=policy,
        rate=rate,
        sampled_rows=round(ours[0].result.num_rows * rate),
        points=tuple(points.mean(1).tolist()),
        plain_points=tuple(float(_points(each, exact.result).mean()) for each in plain),
        sizes=tuple(sizes.tolist()),
        size_points=tuple(points.mean(0).tolist()),
        exact_s=exact.seconds,
        sampled_s=float(np.median([each.seconds for each in ours])),
    )


def _points(estimate: MissRatioCurve, exact: MissRatioCurve) -> NDArray[np.float64]:
    return 100 * np.abs(estimate.miss_ratios - exact.miss_ratios)


def hashed(accesses: Accesses, rate: float, seed: int) -> Sample:
    """The rows that a recording of this rate would have; other seeds are other hashes."""
    salt = int(mix64(np.uint64(seed))) >> 1 if seed else 0
    positions = np.flatnonzero(is_sampled(accesses.keys ^ salt, rate))
    return part_of(accesses, positions, rate)
