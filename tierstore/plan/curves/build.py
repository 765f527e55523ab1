"""Curves of accesses: of all of them, window by window, and table by table."""

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from ...cache import resolve_policy
from ...config import require_int
from ...kernels.arrays import Int64s
from ...rows import KEY_ROW_BITS
from ...system.excerpt import excerpt
from ..accesses import Accesses, numbered
from .base import MissRatioCurve
from .replays import Progress, replay_of
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
            if it is never waited for; 0, the default: a plain loop, or serving. Of lfu and tinylfu: of no other policy
            do curves depend on it.
        progress: told of accesses done, each once a replay.
    """

    sizes: Sequence[int] | Int64s | None
    sampling_rate: float
    prefetch_depth: int
    progress: Progress | None


class Window(NamedTuple):
    """Accesses ``[start, stop)``, in a cache that those before have filled."""

    start: int
    stop: int
    curve: MissRatioCurve


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
    return _between(accesses, policy, [0, len(accesses.keys)], **options)[0]


def windows(accesses: Accesses, policy: str, num_windows: int, **options: Unpack[CurveOptions]) -> list[Window]:
    """Equal parts of the accesses, one after another, each with its curve: they differ where popularity drifts.

    A cache stays as the window before has left it. So the curves' misses add up to those of ``curve``, and the first
    window alone begins with an empty cache. Arguments and errors are as of ``curve``.
    """
    if not 1 <= num_windows <= len(accesses.keys):
        raise ValueError(f"num_windows={excerpt(num_windows)}: expected from 1 to the {len(accesses.keys):,} accesses")
    bounds = [len(accesses.keys) * index // num_windows for index in range(num_windows + 1)]
    found = _between(accesses, policy, bounds, **options)
    return [Window(*ends, each) for ends, each in zip(itertools.pairwise(bounds), found, strict=True)]


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


def _between(
    accesses: Accesses,
    policy: str,
    bounds: Sequence[int],
    *,
    sizes: Sequence[int] | Int64s | None = None,
    sampling_rate: float = 1.0,
    prefetch_depth: int = 0,
    progress: Progress | None = None,
) -> list[MissRatioCurve]:
    """One curve for each window between ``bounds``."""
    _check(accesses, sampling_rate)
    require_int(prefetch_depth, "prefetch_depth", 0, _DEEPEST)
    sample = sample_of(accesses, bounds, sampling_rate)
    return curves_of(accesses, resolve_policy(policy), bounds, sizes, sample, prefetch_depth, progress)


def curves_of(
    accesses: Accesses,
    policy: str,
    bounds: Sequence[int],
    sizes: Sequence[int] | Int64s | None,
    sample: Sample,
    prefetch_depth: int = 0,
    progress: Progress | None = None,
) -> list[MissRatioCurve]:
    """One for each window of ``accesses`` between ``bounds``, by a sample of them; see ``curve``."""
    lengths = _shares(accesses, bounds)
    if not np.diff(sample.bounds).all():
        raise ValueError(f"a window has no access in a sample of rate {sample.rate:.3g}; take fewer, or a higher rate")
    replay = replay_of(policy, sample, prefetch_depth=prefetch_depth, progress=progress)
    rate = accesses.sampling_rate * sample.rate
    if sizes is None:
        bends = np.rint(np.array(replay.bends) / rate).astype(np.int64)
        asked = np.union1d(default_sizes(policy, replay.num_rows, rate), bends)
    else:
        asked = _checked(sizes)
    # Where a sample has more or fewer accesses than its share, they are taken to be hits too many or too few, as
    # SHARDS-adj does: the rows that make the difference are those that any cache has.
    shares = replay.misses(sampled_sizes(policy, asked, rate)) / (lengths * sample.rate)[:, None]
    return [
        MissRatioCurve(
            policy=policy,
            sizes=asked,
            # The estimate of a sample may be a little more.
            miss_ratios=np.minimum(ratios, 1.0),
            num_accesses=round(length / accesses.sampling_rate),
            num_rows=round(num_rows / rate),
            sampling_rate=rate,
            warning=sample_warning(replay.num_rows, rate, accesses.sampling_rate),
        )
        for ratios, length, num_rows in zip(shares, lengths.tolist(), _rows(sample, replay.num_rows), strict=True)
    ]


def _shares(accesses: Accesses, bounds: Sequence[int]) -> NDArray[Any]:
    """Of the accesses to all rows, what the sampling rate makes of those of each window, [windows]. Where it is not
    known how many there are, those that the sample has; else each batch is taken to have as many as another."""
    if accesses.all_lookups is None:
        return np.diff(bounds)
    batches = np.diff(np.interp(bounds, accesses.starts, np.arange(len(accesses.starts))))
    shares: NDArray[Any] = sum(accesses.all_lookups) * accesses.sampling_rate * batches / batches.sum()
    return shares


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


def _rows(sample: Sample, num_rows: int) -> list[int]:
    """Distinct rows of each window; the whole's are known."""
    if len(sample.bounds) == 2:
        return [num_rows]
    return [numbered(sample.keys[begin:end]).num_rows for begin, end in itertools.pairwise(sample.bounds)]


def _checked(sizes: Sequence[int] | Int64s) -> Int64s:
    found = np.unique(np.asarray(sizes))
    if not len(found) or not np.issubdtype(found.dtype, np.integer) or found[0] < 1:
        raise ValueError(f"sizes={excerpt(sizes)}: expected whole numbers of rows, each 1 or more")
    return found.astype(np.int64)


def _part(progress: Progress, begin: int, end: int, total: int) -> Progress:
    """Of one table's progress, that of all."""
    return lambda done, of: progress(begin + (end - begin) * done // of, total)
