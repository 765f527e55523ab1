"""How far curves from few sampled rows are off, which ``curves.sampled.sample_warning`` tells.

A table: python -m bench.planning.small_samples
"""

import tomllib
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.plan import Accesses, accesses_of, once_a_batch
from tierstore.plan.curves import curve
from tierstore.plan.curves.build import curves_of
from tierstore.plan.curves.sampled import Sample, sample_of

from ..data import ROOT
from .beside_stores import POLICIES, traces
from .curves import hashed
from .validation import trace_of

_ROWS: Final = (100, 200, 300, 500, 1000, 2000, 5000)
_NUM_SIZES: Final = 12
_SEEDS: Final = 3
_FEWEST_PER_ROW: Final = 3


class SmallSample(NamedTuple):
    """Points of hit rate that curves from so many sampled rows are off: means over 12 sizes, from the largest batch's
    rows to all rows, of each trace, policy and seed.

    Attributes:
        mean, worst: over and of these curves.
        by_hash, worst_by_hash: the same where a hash chose the rows, as in a recording.
    """

    rows: int
    mean: float
    worst: float
    by_hash: float
    worst_by_hash: float


def _errors(accesses: Accesses, policy: str, rate: float, choose: Callable[..., Sample]) -> list[float]:
    bounds = [0, len(accesses.keys)]
    largest, num_rows = int(np.diff(accesses.starts).max()), len(np.unique(accesses.keys))
    sizes = np.unique(np.geomspace(largest, num_rows, _NUM_SIZES).astype(np.int64))
    exact, found = curve(accesses, policy, sizes=sizes), []
    for seed in range(_SEEDS):
        made = curves_of(accesses, policy, bounds, sizes, choose(accesses, rate, seed))[0]
        found.append(float(100 * np.abs(made.miss_ratios - exact.miss_ratios).mean()))
    return found


def _balanced(accesses: Accesses, rate: float, seed: int) -> Sample:
    return sample_of(accesses, [0, len(accesses.keys)], rate, seed)


def small_samples(config: dict[str, Any]) -> Iterator[SmallSample]:
    """Of the traces of ``beside_stores``."""
    every = [once_a_batch(accesses_of(trace_of(workload))) for workload in traces(config)]
    for rows in _ROWS:
        own = [each for each in every if len(np.unique(each.keys)) > _FEWEST_PER_ROW * rows]
        errors = [
            [
                error
                for accesses in own
                for policy in POLICIES
                for error in _errors(accesses, policy, rows / len(np.unique(accesses.keys)), choose)
            ]
            for choose in (_balanced, hashed)
        ]
        yield SmallSample(rows, *(float(each) for part in errors for each in (np.mean(part), max(part))))


def _main() -> None:
    print("rows    points off   worst   chosen by hash   worst")
    for each in small_samples(tomllib.loads((ROOT / "bench" / "plan.toml").read_text())):
        print(
            f"{each.rows:<7,} {each.mean:<12.2f} {each.worst:<7.2f} {each.by_hash:<16.2f} {each.worst_by_hash:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    _main()
