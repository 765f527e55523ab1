"""Curves of recordings that hold a share of the rows, beside the exact ones.

A table of Criteo's lookups: python -m bench.planning.recorded
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tierstore.layout import KEY_ROW_BITS
from tierstore.plan import Accesses, accesses_of, once_a_batch
from tierstore.plan.curves import curve
from tierstore.trace.recorded import Recorded
from tierstore.trace.sampling import is_sampled

from ..data import criteo_batches, require_criteo

__all__ = ["RecordedError", "recorded_accesses", "recorded_errors"]

Int64s = NDArray[np.int64]

_NUM_SIZES: Final = 20
_SMALLEST: Final = 0.001
"""Size of the smallest cache that is compared, as a share of the distinct rows."""
_FEWEST_SAMPLED: Final = 10
"""Rows of the sample in that cache."""
_BATCH_SAMPLES: Final = 2048
_RATES: Final = (0.1, 0.05, 0.01)


@dataclass(frozen=True, kw_only=True)
class RecordedError:
    """Mean error of LRU curves in points of the hit rate, over 20 sizes from 0.1 % of the rows to all, if that is ten
    sampled rows.

    Attributes:
        lookups: each lookup an access. uncounted: the same, if it is not known how many there were of all rows.
        once_a_batch: each row once a batch.
        smallest: of ``lookups``, but from 0.1 % of the rows on, however few of the sample that is.
    """

    rate: float
    sampled_rows: int
    lookups: float
    uncounted: float
    once_a_batch: float
    smallest: float


def recorded_accesses(batches: Sequence[Int64s], rate: float) -> Accesses:
    """What a recording holds of batches of keys, with the tables t0, t1, ... that these are of."""
    num_tables = 1 + max(int(keys.max() >> KEY_ROW_BITS) for keys in batches if len(keys))
    recorded = Recorded([f"t{table}" for table in range(num_tables)], rate=rate, max_bytes=1 << 40)
    for keys in batches:
        found = keys if rate == 1 else keys[is_sampled(keys, rate)]
        counts = np.bincount(keys >> KEY_ROW_BITS, minlength=num_tables)
        recorded.add(found, np.zeros(len(found), np.int32), 1, recorded.last, counts)
    return accesses_of(recorded.contents().trace())


def recorded_errors(batches: Sequence[Int64s], rates: Sequence[float]) -> Iterator[RecordedError]:
    """Of recordings at each rate."""
    whole = recorded_accesses(batches, 1.0)
    for rate in rates:
        sampled = recorded_accesses(batches, rate)
        yield RecordedError(
            rate=rate,
            sampled_rows=len(np.unique(sampled.keys)),
            lookups=_points(sampled, whole),
            uncounted=_points(sampled._replace(all_lookups=None), whole),
            once_a_batch=_points(once_a_batch(sampled), once_a_batch(whole)),
            smallest=_points(sampled, whole, fewest=0),
        )


def _points(sampled: Accesses, whole: Accesses, fewest: int = _FEWEST_SAMPLED) -> float:
    num_rows = len(np.unique(whole.keys))
    smallest = max(_SMALLEST * num_rows, fewest / sampled.sampling_rate)
    sizes = np.unique(np.rint(np.geomspace(smallest, num_rows, _NUM_SIZES)).astype(np.int64))
    exact, estimate = curve(whole, "lru", sizes=sizes), curve(sampled, "lru", sizes=sizes)
    return float(100 * np.abs(estimate.miss_ratios - exact.miss_ratios).mean())


def _main() -> None:
    print("rate   rows     each lookup   not counted   once a batch   from 0.1 % of the rows")
    for each in recorded_errors(criteo_batches(require_criteo(), _BATCH_SAMPLES), _RATES):
        print(
            f"{each.rate:<6} {each.sampled_rows:<8,} {each.lookups:<13.2f} {each.uncounted:<13.2f} "
            f"{each.once_a_batch:<14.2f} {each.smallest:.2f}"
        )


if __name__ == "__main__":
    _main()
