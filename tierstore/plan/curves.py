"""Miss-ratio curves: which share of accesses misses, by how many rows the cache has; exactly or from a sample.

*LRU* at every size in one pass, by stack distances (R. Mattson et al., Evaluation techniques for storage hierarchies,
IBM Systems Journal 9, 1970): an access hits a cache of c rows if fewer than c other rows were accessed since the row's
last access. A tree of sums (P. Fenwick, A new data structure for cumulative frequency tables, 1994) over the accesses
counts those that are the last one to their row. A store pins the rows of in-flight batches, which are those used last:
while not all slots are pinned the least recently used row is none of them, and where all are, they are let go. So
distances hold at every size.

*LFU and TinyLFU* by the DDR tier's own code, once a size: batch by batch, with the pins that it has.

*Under Zipf's law* by formula, over rows in bins, so that 2^40 rows are few. Each id is drawn independently of all
others (the *independent reference model*); a row is accessed at most once a batch, as the tiers of a store count.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ..cache.ddr import POLICIES, DdrCache, resolve_policy
from ..kernels.arrays import Float64s, Int64s
from ..kernels.jit import uncounted_inline as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..pool.leases import HELD_SHARE
from ..system.checks import excerpt, require_choice, require_int
from ..system.terminal import columns_of
from .traces import BIN_GROWTH, Accesses, Numbered, first_uses, numbered, zipf_bins

_MANY_BINS: Final = 2048
_LEAST_CHANCE: Final = 1e-300
_WINDOWS: Final = 160
_FEW_BATCHES: Final = np.linspace(0.0, 4.0, 81)  # windows where hit rates bend most
_PHASES: Final = np.linspace(0.0, 1.0, 25) ** 2  # times in a batch, most of them early, where most rows are used first
_LONG: Final = 40.0  # accesses that a row has had, on average, when it is certain that it had one: the odds are e^-40
_FORMULA_SIZES: Final = 512
_FORMULA_BATCHES: Final = 1_000_000  # whose accesses a curve says it is of
_ALMOST_CERTAIN: Final = 1 - 1e-15
_NUM_SIZES: Final = 10
_INTERPOLATED: Final = 16  # rows; below, a part of a row makes a difference
_EVERY_SIZE, _STEP = 4096, 1.02  # and the ratio of sizes beyond
_NUM_SIMULATED: Final = 24
_SMALLEST_SIMULATED: Final = 1 / 2000  # of all rows
_DEEPEST: Final = 1024  # batches fetched ahead, at most
_MEAN_POINTS, _WORST_POINTS = 70, 170
"""Points of hit rate that the curve of a recorded sample is off on average over sizes, times the root of its rows: the
mean over curves and the worst of them, of eight traces and samples of 100 to 5,000 rows."""
_MOST_POINTS: Final = 2.0  # that a curve may be off without a warning, at worst


@dataclass(frozen=True, kw_only=True)
class MissRatioCurve:
    """One policy's."""

    policy: str
    sizes: Int64s  # int64 [k], ascending, rows of the cache, from 1 on
    miss_ratios: Float64s  # float64 [k]
    num_accesses: int  # of a recorded sample what the whole has by estimate
    num_rows: int  # distinct ones, likewise
    sampling_rate: float = 1.0  # of the rows that were recorded
    warning: str = ""  # how far it may be off, and what to do, if that is much

    def miss_ratio(self, rows: float) -> float:
        """Between two sizes by a straight line over the logarithm of the size; beyond the largest its own."""
        if rows < 1:
            return 1.0
        return float(np.interp(np.log(rows), np.log(self.sizes), self.miss_ratios))

    def hit_rate(self, rows: float) -> float:
        """1 - miss_ratio."""
        return 1 - self.miss_ratio(rows)


def describe_curves(curves: Mapping[str, MissRatioCurve]) -> str:
    """Hit rates by name at some sizes in rows, up to the largest of all curves, lines of text."""
    # Sizes of two figures, evenly apart on a scale of logarithms, and the largest.
    largest = max(int(curve.sizes[-1]) for curve in curves.values())
    exact = np.geomspace(max(1.0, largest / 1000), largest, _NUM_SIZES)[:-1]
    units = 10.0 ** np.maximum(0, np.floor(np.log10(exact)) - 1)
    chosen = sorted({*(np.rint(exact / units) * units).astype(int).tolist(), largest})
    rows = [["hit rate with rows cached", *(f"{size:,}" for size in chosen), "of rows", "accesses"]]
    for name, curve in curves.items():
        rates = [f"{curve.hit_rate(size):.4f}" for size in chosen]
        rows.append([name, *rates, f"{curve.num_rows:,}", f"{curve.num_accesses:,}"])
    return "\n".join(columns_of(list(zip(*rows, strict=True)), is_last_text=False))


@inline
def _add(tree: Any, time: Any, amount: Any) -> None:
    place = time + 1
    while place < tree.shape[0]:
        tree[place] += amount
        place += place & -place


@inline
def _sum_to(tree: Any, time: Any) -> Any:
    found, place = 0, time + 1
    while place > 0:
        found += tree[place]
        place -= place & -place
    return found


@kernel
def _count_distances(numbers: Any, begin: Any, end: Any, latest: Any, tree: Any, num_rows: Any, histogram: Any) -> Any:
    """``num_rows``: distinct ones before ``begin``; returned of those before ``end``."""
    for time in range(begin, end):
        last = latest[numbers[time]]
        if last >= 0:
            histogram[num_rows - _sum_to(tree, last)] += 1
            _add(tree, last, -1)
        else:
            num_rows += 1
        _add(tree, time, 1)
        latest[numbers[time]] = time
    return num_rows


def distances(accesses: Numbered, *, skip: int = 0) -> Int64s:
    """int64 [rows]: accesses by how many other rows came since the row's last one, without the first ``skip``. A row's
    first access is in none. 8 bytes of memory a row, and 4 an access."""
    total, num_rows = len(accesses.numbers), accesses.num_rows
    tree, latest = np.zeros(total + 1, np.int32), np.full(num_rows, -1, np.int64)
    skipped, counted = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    before = _count_distances(accesses.numbers, 0, skip, latest, tree, 0, skipped)
    _count_distances(accesses.numbers, skip, total, latest, tree, before, counted)
    return counted


def curve(
    accesses: Accesses,
    policy: str,
    *,
    sizes: Sequence[int] | Int64s | None = None,
    prefetch_depth: int = 0,
    skip: int = 0,
) -> MissRatioCurve:
    """The miss-ratio curve of a cache that starts empty.

    Of a recorded sample of the rows (``accesses.sampling_rate``) the curve is that of all rows, by estimate: caches are
    as much smaller (C. Waldspurger et al., Efficient MRC construction with SHARDS, FAST 2015, and Cache modeling and
    optimization using miniature simulations, ATC 2017). ValueError: no access, no such policy, a size out of range.

    Args:
        accesses: each counts; one to a row that its batch has used before hits. What the tiers of a store count is
            ``once_a_batch(accesses)``.
        policy: of ``tierstore.cache.ddr.POLICIES``.
        sizes: rows. By default, lru: every size up to 4,096 and then each 2 % more; others, replayed once a size: 24.
        prefetch_depth: batches whose rows are fetched ahead of the one in use; 0: a plain loop, or serving. LRU does
            not depend on it.
        skip: batches at the start that fill the cache and do not count.
    """
    if not len(accesses.keys):
        raise ValueError("there is no access: a curve needs one at least")
    require_choice(policy, POLICIES, "policy")
    policy = resolve_policy(policy)
    require_int(prefetch_depth, "prefetch_depth", 0, _DEEPEST)
    require_int(skip, "skip", 0, accesses.num_batches - 1)
    rows, rate = numbered(accesses.keys), accesses.sampling_rate
    asked, first = _sizes(sizes, policy, accesses, rows.num_rows), int(accesses.starts[skip])
    # The rate's share of the accesses to all rows; each batch is taken to have as many as another.
    counted = float(len(accesses.keys) - first)
    if accesses.all_lookups is not None:
        counted = sum(accesses.all_lookups) * rate * (1 - skip / accesses.num_batches)
    own = np.minimum(_sampled_sizes(policy, asked, rate), rows.num_rows)
    # Between two whole sizes misses lie on a straight line.
    low, high = np.floor(own).astype(np.int64), np.ceil(own).astype(np.int64)
    wanted = np.unique(np.concatenate([low, high]))
    if policy == "lru":
        nearer = np.append(0, np.cumsum(distances(rows, skip=first)))
        missed = len(accesses.keys) - first - nearer[wanted]
    else:
        missed = _store_misses(policy, accesses, rows, wanted, first, prefetch_depth)
    at_low, at_high = (missed[np.searchsorted(wanted, ends)] for ends in (low, high))
    return MissRatioCurve(
        policy=policy,
        sizes=asked,
        # Accesses beyond or below a sample's share are taken for hits, as SHARDS-adj does: any cache has the rows that
        # make the difference. The estimate of a sample may be a little more than all.
        miss_ratios=np.minimum((at_low + (at_high - at_low) * (own - low)) / counted, 1.0),
        num_accesses=round(counted / rate),
        num_rows=round(rows.num_rows / rate),
        sampling_rate=rate,
        warning=_warning(rows.num_rows, rate),
    )


def _store_misses(policy: Any, accesses: Accesses, rows: Numbered, sizes: Int64s, first: int, depth: int) -> Int64s:
    """int64 [k]: accesses from the ``first`` on that miss the DDR tier's cache, replayed for each size."""
    is_first = first_uses(rows, accesses.starts)
    keys, starts = accesses.keys[is_first], np.append(0, np.cumsum(is_first))[accesses.starts]
    missed, total = np.empty(len(sizes), np.int64), len(accesses.keys)
    for index, capacity in enumerate(sizes.tolist()):
        is_hit = np.ones(total, np.bool_)  # a row that its own batch has used is there
        is_hit[is_first] = False
        if capacity:
            cache = DdrCache(capacity, weight_words=0, state_words=0, policy=policy)
            is_hit[is_first] = cache.access(keys, starts, depth=depth, held_rows=int(capacity * HELD_SHARE))
        missed[index] = np.count_nonzero(~is_hit[first:])
    return missed


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

    The newest row, which these policies always let in, is in a cache of sampled rows too, with a share of the others:
    so it is larger than its share. For LRU, whose distances are whole numbers, by half of that row.
    """
    newest = 0.5 if policy == "lru" else 1.0
    found: Float64s = sizes.astype(np.float64) * rate + newest * (1 - rate)
    # Policies that are replayed for each size take the nearest whole one, but of small caches.
    return found if policy == "lru" else np.where(found < _INTERPOLATED, found, np.rint(found))


def _warning(num_rows: int, rate: float) -> str:
    enough = int((_WORST_POINTS / _MOST_POINTS) ** 2)
    if rate == 1 or num_rows >= enough:
        return ""
    root, needed = math.sqrt(max(num_rows, 1)), rate * enough / max(num_rows, 1)
    rows = f"{needed:.2g} of the rows" if needed < 1 else "every row"
    return (
        f"{num_rows:,} sampled rows say little: hit rates may be off by {_MEAN_POINTS / root:.1f} points, "
        f"{_WORST_POINTS / root:.0f} at worst; record {rows}"
    )


class Popularity(NamedTuple):
    """Bins of rows that are alike, float64 [bins]: how many, and the chance that one is in a batch."""

    rows: Float64s
    chances: Float64s

    @property
    def unique(self) -> float:
        """Distinct rows of a batch, on average."""
        return float(self.rows @ self.chances)


def popularity(tables: Sequence[tuple[int, float, float]]) -> Popularity:
    """Of the rows of tables that share a cache."""
    kinds: dict[tuple[int, float, float], int] = {}
    for table in tables:
        kinds[table] = kinds.get(table, 0) + 1
    bins = [(count, *zipf_bins(num_rows, exponent), ids) for (num_rows, exponent, ids), count in kinds.items()]
    rows = np.concatenate([count * own for count, own, _, _ in bins])
    chances = np.concatenate([_in_batch(shares, lookups) for _, _, shares, lookups in bins])
    if len(rows) <= _MANY_BINS:
        return Popularity(rows, chances)
    # Bins of nearly equal chance as one, of their mean.
    steps = np.round(np.log(np.maximum(chances, _LEAST_CHANCE)) / math.log(BIN_GROWTH))
    _, places = np.unique(steps, return_inverse=True)
    merged = np.bincount(places, weights=rows).astype(np.float64)
    return Popularity(merged, np.bincount(places, weights=rows * chances) / merged)


def _in_batch(shares: Float64s, lookups: float) -> Float64s:
    """That a row of this share of all ids is among so many: never more than the ids it has on average."""
    if not lookups:
        return np.zeros_like(shares)
    with np.errstate(divide="ignore"):
        some = -np.expm1(lookups * np.log1p(-np.minimum(shares, 1.0)))
    return np.minimum(some, lookups * shares)


def lru_curve(found: Popularity) -> MissRatioCurve:
    """Of least-recently-used, by Che's approximation (H. Che, Y. Tung, Z. Wang, Hierarchical web caching systems, IEEE
    JSAC 20, 2002; C. Fricker, P. Robert, J. Roberts, A versatile and accurate approximation for LRU cache performance,
    ITC 24, 2012), here over batches. A cache holds what was accessed in a window that reaches back so far that it has
    as many rows. The time of a row's first use in a batch has an exponential density, cut off at the batch's end. So
    the window holds what the batch has used so far, whole batches before, and the end of one more."""
    used = found.chances > 0
    rows, chances = found.rows[used], np.minimum(found.chances[used], _ALMOST_CERTAIN)
    sizes = _formula_sizes(found)
    if not len(rows):
        return _by_formula("lru", sizes, np.zeros(len(sizes)), found)
    rates = -np.log1p(-chances)
    windows = np.union1d(_FEW_BATCHES, np.geomspace(1, 1 + _LONG / float(rates.min()), _WINDOWS))
    # float64 [windows, rows]: the chance that a row has no use in the last so many batches, of which the first, a part
    # of one, counts first uses within the batch only.
    whole = np.floor(windows)[:, None]
    begin = 1 - (windows[:, None] - whole)
    absent = np.exp(-rates * whole) * (1 - np.exp(-rates * begin) + np.exp(-rates))
    hits = np.zeros(len(sizes))
    for start, stop in itertools.pairwise(_PHASES):
        held = rows.sum() - absent @ (rows * np.exp(-rates * (start + stop) / 2))
        first_used = rows * (np.exp(-rates * start) - np.exp(-rates * stop))
        hits += np.interp(sizes, held, first_used.sum() - absent @ first_used, left=0.0)
    return _by_formula("lru", sizes, 1 - hits / found.unique, found)


def frequency_curve(found: Popularity, policy: str = "tinylfu") -> MissRatioCurve:
    """Of a cache of the rows that are accessed most: what counting every row's accesses for ever leads to."""
    order = np.argsort(-found.chances, kind="stable")
    rows, chances = found.rows[order], found.chances[order]
    held = np.append(0.0, np.cumsum(rows))
    hits = np.append(0.0, np.cumsum(rows * chances)) / (found.unique or 1.0)
    sizes = _formula_sizes(found)
    return _by_formula(policy, sizes, 1 - np.interp(sizes, held, hits), found)


def _formula_sizes(found: Popularity) -> Float64s:
    return np.unique(np.round(np.geomspace(1, max(round(found.rows.sum()), 1), _FORMULA_SIZES)))


def _by_formula(policy: str, sizes: Float64s, miss_ratios: Float64s, found: Popularity) -> MissRatioCurve:
    return MissRatioCurve(
        policy=policy,
        sizes=sizes.astype(np.int64),
        miss_ratios=np.minimum.accumulate(np.clip(miss_ratios, 0.0, 1.0)),
        num_accesses=round(found.unique * _FORMULA_BATCHES),
        num_rows=round(found.rows.sum()),
    )
