"""Curves of accesses: of all of them, and table by table."""

import math
from collections.abc import Sequence
from typing import Final, TypedDict, Unpack

import numpy as np

from ...cache import resolve_policy
from ...config import require_int
from ...kernels.arrays import Float64s, Int64s
from ...layout import KEY_ROW_BITS
from ...settings.sections import nearest
from ...system.excerpt import excerpt
from ..accesses import Accesses, numbered, of_tables
from .base import POLICIES, MissRatioCurve
from .replays import Progress, Replay

_EVERY_SIZE: Final = 4096
_STEP: Final = 1.02
"""Ratio of sizes beyond."""
_NUM_SIMULATED: Final = 24
_SMALLEST_SIMULATED: Final = 1 / 2000
"""Of all rows."""
_DEEPEST: Final = 1024
"""Batches fetched ahead, at most."""
_MEAN_POINTS, _WORST_POINTS = 70, 170
"""Points of hit rate that the curve of a recorded sample is off on average over sizes, times the root of its rows: the
mean over curves and the worst of them, of eight traces and samples of 100 to 5,000 rows."""
_MOST_POINTS: Final = 2.0
"""That a curve may be off without a warning, at worst."""


class CurveOptions(TypedDict, total=False):
    """How a curve is made.

    Attributes:
        sizes: rows. By default, lru: every size up to 4,096 and then each 2 % more; others, which are replayed once a
            size: 24, and the largest batch's rows. Up to all rows there are.
        prefetch_depth: batches whose rows are fetched ahead of the one in use, as ``tierstore.prefetch`` has them if it
            is never waited for; 0, the default: a plain loop, or serving. LRU does not depend on it.
        skip: batches at the start that fill the cache and do not count; default: 0.
        progress: called with the accesses that are done, each once a replay.
    """

    sizes: Sequence[int] | Int64s | None
    prefetch_depth: int
    skip: int
    progress: Progress | None


def curve(accesses: Accesses, policy: str, **options: Unpack[CurveOptions]) -> MissRatioCurve:
    """The miss-ratio curve of a cache that starts empty.

    Of a recorded sample of the rows (``accesses.sampling_rate``) the curve is that of all rows, by estimate: caches are
    as much smaller (C. Waldspurger et al., Efficient MRC construction with SHARDS, FAST 2015, and Cache modeling and
    optimization using miniature simulations, ATC 2017); ``all_lookups`` make it better.

    Args:
        accesses: each counts; one to a row that its batch has used before hits. What the tiers of a store count is
            ``once_a_batch(accesses)``.
        policy: of ``POLICIES``, or "auto" for what that stands for.
        options: see ``CurveOptions``.

    Raises:
        ValueError: there is no access; no such policy; a size is out of range.
    """
    if not len(accesses.keys):
        raise ValueError("there is no access: a curve needs one at least")
    policy = resolve_policy(policy)
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: {nearest(policy, POLICIES)}")
    depth, skip = options.get("prefetch_depth", 0), options.get("skip", 0)
    require_int(depth, "prefetch_depth", 0, _DEEPEST)
    require_int(skip, "skip", 0, accesses.num_batches - 1)
    rows, rate = numbered(accesses.keys), accesses.sampling_rate
    asked = _sizes(options.get("sizes"), policy, accesses, rows.num_rows)
    counted = _counted(accesses, skip)
    missed = Replay(policy, accesses, rows, skip, depth, options.get("progress")).misses(
        _sampled_sizes(policy, asked, rate)
    )
    return MissRatioCurve(
        policy=policy,
        sizes=asked,
        # Where a sample has more or fewer accesses than its share, they are taken to be hits too many or too few, as
        # SHARDS-adj does: the rows that make the difference are those that any cache has. The estimate of a sample may
        # be a little more than all.
        miss_ratios=np.minimum(missed / counted, 1.0),
        num_accesses=round(counted / rate),
        num_rows=round(rows.num_rows / rate),
        sampling_rate=rate,
        warning=_warning(rows.num_rows, rate),
    )


def by_table(accesses: Accesses, policy: str, **options: Unpack[CurveOptions]) -> dict[str, MissRatioCurve]:
    """Curves of the tables, each in a cache of its own; a table without accesses has none. As ``curve``."""
    used = np.unique(accesses.keys >> KEY_ROW_BITS).tolist()
    return {accesses.tables[index]: curve(of_tables(accesses, [index]), policy, **options) for index in used}


def _counted(accesses: Accesses, skip: int) -> float:
    """Of the accesses to all rows behind the skipped batches, what the sampling rate makes of them. Where it is not
    known how many there are, those that the sample has; else each batch is taken to have as many as another."""
    if accesses.all_lookups is None:
        return float(len(accesses.keys) - accesses.starts[skip])
    return sum(accesses.all_lookups) * accesses.sampling_rate * (1 - skip / accesses.num_batches)


def _sizes(sizes: Sequence[int] | Int64s | None, policy: str, accesses: Accesses, num_rows: int) -> Int64s:
    """Those asked for, or by default some of caches for ``num_rows`` rows, which may be a sample of all."""
    if sizes is not None:
        found = np.unique(np.asarray(sizes))
        if not len(found) or not np.issubdtype(found.dtype, np.integer) or found[0] < 1:
            raise ValueError(f"sizes={excerpt(sizes)}: expected whole numbers of rows, each 1 or more")
        return found.astype(np.int64)
    if policy == "lru":
        last = min(num_rows, _EVERY_SIZE)
        steps = int(np.log(num_rows / last) / np.log(_STEP)) + 2
        small, large = np.arange(1, last), np.geomspace(last, num_rows, steps)
    else:
        smallest = min(num_rows, max(2.0, num_rows * _SMALLEST_SIMULATED))
        small = np.array([1, np.diff(accesses.starts).max()])
        large = np.geomspace(smallest, num_rows, _NUM_SIMULATED - 1)
    own = np.concatenate([small, np.rint(large)]) / accesses.sampling_rate
    return np.unique(np.concatenate([[1], np.rint(own)])).astype(np.int64)


def _sampled_sizes(policy: str, sizes: Int64s, rate: float) -> Float64s:
    """Of the caches that are to a sample what ``sizes`` (int64 [k], rows) are to all rows: float64 [k].

    Of all rows, c - 1 are cached beside the newest, which these policies always let in. Of the sample, the newest is
    there too, with a share of the others: so a small cache of sampled rows is larger than its share. For LRU, whose
    distances are whole numbers that stand for some of both sides, half of that row.
    """
    newest = 0.5 if policy == "lru" else 1.0
    found: Float64s = sizes.astype(np.float64) * rate + newest * (1 - rate)
    return found


def _warning(num_rows: int, rate: float) -> str:
    """What to say of curves from so few recorded rows, or ""."""
    enough = int((_WORST_POINTS / _MOST_POINTS) ** 2)
    if rate == 1 or num_rows >= enough:
        return ""
    root, needed = math.sqrt(max(num_rows, 1)), rate * enough / max(num_rows, 1)
    rows = f"{needed:.2g} of the rows" if needed < 1 else "every row"
    return (
        f"{num_rows:,} sampled rows say little: hit rates may be off by {_MEAN_POINTS / root:.1f} points, "
        f"{_WORST_POINTS / root:.0f} at worst; record {rows}"
    )
