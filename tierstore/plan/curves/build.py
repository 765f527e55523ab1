"""Curves of accesses: of all of them, and table by table."""

import itertools
from collections.abc import Sequence
from typing import Final, TypedDict, Unpack

import numpy as np

from ...cache import resolve_policy
from ...config import require_int
from ...kernels.arrays import Int64s
from ...rows import KEY_ROW_BITS
from ...settings.names import nearest
from ...system.excerpt import excerpt
from ..accesses import Accesses, numbered
from .base import POLICIES, MissRatioCurve
from .replays import Progress, Replay
from .sampled import Sample, sample_of, sample_warning, sampled_sizes

_EVERY_SIZE: Final = 4096
_STEP: Final = 1.02
"""Ratio of sizes beyond."""
_NUM_SIMULATED: Final = 24
_SMALLEST_SIMULATED: Final = 1 / 2000
"""Of all rows."""
_FEWEST_SAMPLED: Final = 1000
_DEEPEST: Final = 1024
"""Batches brought in ahead, at most."""


class CurveOptions(TypedDict, total=False):
    """How a curve is made.

    Attributes:
        sizes: rows. By default, lru: every size up to 4,096 and then each 2 % more; others, which are replayed once a
            size: 24, and the largest batch's rows. Up to all rows there are.
        sampling_rate: the share of the rows of the accesses that stands for all (``sampled``); 1, the default: every
            row.
        prefetch_depth: batches whose rows are brought in ahead of the one in use, as ``tierstore.prefetch`` has them
            if it is never waited for; 0, the default: a plain loop, or serving. LRU does not depend on it.
        skip: batches at the start that fill the cache and do not count; default: 0.
        progress: told of accesses done, each once a replay.
    """

    sizes: Sequence[int] | Int64s | None
    sampling_rate: float
    prefetch_depth: int
    skip: int
    progress: Progress | None


def curve(accesses: Accesses, policy: str, **options: Unpack[CurveOptions]) -> MissRatioCurve:
    """The miss-ratio curve of a cache that starts empty.

    Args:
        accesses: each counts; one to a row that its batch has used before hits. What the tiers of a store count is
            ``once_a_batch(accesses)``. Of a sample of the rows (``accesses.sampling_rate``) the curve is that of all
            rows, by estimate; ``all_lookups`` make it better.
        policy: of ``POLICIES``, or "auto" for what that stands for.
        options: see ``CurveOptions``.

    Raises:
        ValueError: there is no access, or no row in the sample; no such policy; a size or the rate is out of range.
    """
    rate = options.get("sampling_rate", 1.0)
    _check(accesses, rate)
    return curve_of(accesses, resolve_policy(policy), sample_of(accesses, rate), **options)


def by_table(accesses: Accesses, policy: str, **options: Unpack[CurveOptions]) -> dict[str, MissRatioCurve]:
    """Curves of the tables, each in a cache of its own; a table without accesses has none.

    Of tables with few rows more are sampled than ``sampling_rate`` says: 1,000 of them, or all. Arguments and errors
    are as of ``curve``.
    """
    sampling_rate, progress = options.get("sampling_rate", 1.0), options.get("progress")
    _check(accesses, sampling_rate)
    indexes = accesses.keys >> KEY_ROW_BITS
    order = np.argsort(indexes.astype(np.min_scalar_type(len(accesses.tables))), kind="stable")
    ends = np.cumsum(np.bincount(indexes, minlength=len(accesses.tables))).tolist()
    found = {}
    for index, (name, (begin, end)) in enumerate(zip(accesses.tables, itertools.pairwise([0, *ends]), strict=True)):
        if begin == end:
            continue
        positions = order[begin:end]
        keys, starts = accesses.keys[positions], np.searchsorted(positions, accesses.starts)
        own = accesses._replace(keys=keys, starts=starts, all_lookups=accesses.lookups_of([index]))
        rate = max(sampling_rate, min(1.0, _FEWEST_SAMPLED / numbered(keys).num_rows)) if sampling_rate < 1 else 1.0
        told = None if progress is None else _part(progress, begin, end, len(accesses.keys))
        found[name] = curve(own, policy, **(options | CurveOptions(sampling_rate=rate, progress=told)))
    return found


def curve_of(accesses: Accesses, policy: str, sample: Sample, **options: Unpack[CurveOptions]) -> MissRatioCurve:
    """That of ``accesses``, by a sample of them; see ``curve``."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: {nearest(policy, POLICIES)}")
    depth, skip = options.get("prefetch_depth", 0), options.get("skip", 0)
    require_int(depth, "prefetch_depth", 0, _DEEPEST)
    require_int(skip, "skip", 0, accesses.num_batches - 1)
    rows, rate, sizes = numbered(sample.keys), accesses.sampling_rate * sample.rate, options.get("sizes")
    if sizes is None:
        largest = [round(int(np.diff(sample.starts).max()) / rate)] if policy != "lru" else []
        asked = np.union1d(default_sizes(policy, rows.num_rows, rate), largest).astype(np.int64)
    else:
        asked = _checked(sizes)
    counted = _counted(accesses, skip)
    missed = Replay(policy, sample, rows, skip, depth, options.get("progress")).misses(
        sampled_sizes(policy, asked, rate)
    )
    return MissRatioCurve(
        policy=policy,
        sizes=asked,
        # Where a sample has more or fewer accesses than its share, they are taken to be hits too many or too few, as
        # SHARDS-adj does: the rows that make the difference are those that any cache has. The estimate of a sample may
        # be a little more than all.
        miss_ratios=np.minimum(missed / (counted * sample.rate), 1.0),
        num_accesses=round(counted / accesses.sampling_rate),
        num_rows=round(rows.num_rows / rate),
        sampling_rate=rate,
        warning=sample_warning(rows.num_rows, rate, accesses.sampling_rate),
    )


def _counted(accesses: Accesses, skip: int) -> float:
    """Of the accesses to all rows behind the skipped batches, what the sampling rate makes of them. Where it is not
    known how many there are, those that the sample has; else each batch is taken to have as many as another."""
    if accesses.all_lookups is None:
        return float(len(accesses.keys) - accesses.starts[skip])
    return sum(accesses.all_lookups) * accesses.sampling_rate * (1 - skip / accesses.num_batches)


def default_sizes(policy: str, num_rows: int, rate: float) -> Int64s:
    """Of caches for ``num_rows`` rows that are a sample of the rate."""
    if policy == "lru":
        last = min(num_rows, _EVERY_SIZE)
        steps = int(np.log(num_rows / last) / np.log(_STEP)) + 2
        small, large = np.arange(1, last), np.geomspace(last, num_rows, steps)
    else:
        smallest = min(num_rows, max(2.0, num_rows * _SMALLEST_SIMULATED))
        small, large = np.array([1.0]), np.geomspace(smallest, num_rows, _NUM_SIMULATED - 1)
    return np.unique(np.concatenate([[1], np.rint(np.concatenate([small, np.rint(large)]) / rate)])).astype(np.int64)


def _check(accesses: Accesses, rate: float) -> None:
    if not len(accesses.keys):
        raise ValueError("there is no access: a curve needs one at least")
    if not 0 < rate <= 1:
        raise ValueError(f"sampling_rate={excerpt(rate)}: expected a number above 0, and at most 1")


def _checked(sizes: Sequence[int] | Int64s) -> Int64s:
    found = np.unique(np.asarray(sizes))
    if not len(found) or not np.issubdtype(found.dtype, np.integer) or found[0] < 1:
        raise ValueError(f"sizes={excerpt(sizes)}: expected whole numbers of rows, each 1 or more")
    return found.astype(np.int64)


def _part(progress: Progress, begin: int, end: int, total: int) -> Progress:
    """Of one table's progress, that of all."""
    return lambda done, of: progress(begin + (end - begin) * done // of, total)
