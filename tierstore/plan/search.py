"""The cheapest setup of a bounded grid that meets a target."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

from ..cache.ddr import POLICIES as STORE_POLICIES
from ..layout import DtypeName
from ..settings.sections import Checked, option
from ..system.sizes import format_size
from .demand import Demand
from .host import Host, Pricing, Setup, describe_setup, with_accelerators, with_memory, years_of_life
from .loads import in_words
from .model import Latency, Prediction, latency_alone, predict
from .workload import Workload

_MAX_RATE: Final = 1e12
_MAX_SETUPS, _MAX_FAILURES, _RUNNERS_UP = 100_000, 200, 10
"""Of a grid; that are reported, nearest to the target first."""
_OVERLOAD: Final = 1.000001  # a rate that is just what could be answered is too high
_MEMORY_SHARES: Final = tuple(eighths / 8 for eighths in range(1, 9))
_ROW_SHARES: Final = (0.5, 0.8)
_HOSTS: Final = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
_WORKERS: Final = (1, 2, 4, 8)
_TRAINED_DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "float16")
_SERVED_DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "float16", "int8", "int4")
_USED_SHARE: Final = 0.9  # of memory, for rows and page cache; the rest is the system's
_HBM_SHARE: Final = 0.8  # of an accelerator's memory, for rows; the rest is the model's


@dataclass(frozen=True, kw_only=True)
class Target(Checked):
    """What is asked, of all hosts; 0: nothing. With a rate the cheapest setup is looked for, else the fastest."""

    samples_per_s: float = option(0.0, "of training", low=0, high=_MAX_RATE)
    queries_per_s: float = option(0.0, "of serving", low=0, high=_MAX_RATE)
    p99_ms: float = option(0.0, "latency that 99 of 100 queries keep", low=0, high=1e9)
    p95_ms: float = option(0.0, "latency that 95 of 100 queries keep", low=0, high=1e9)
    usd: float = option(0.0, "price to buy, at most", low=0, high=_MAX_RATE)
    usd_a_month: float = option(0.0, "price a month, with power, at most", low=0, high=_MAX_RATE)
    watts: float = option(0.0, "power, at most", low=0, high=_MAX_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_s and self.queries_per_s:
            raise ValueError(f"queries_per_s={self.queries_per_s}: samples_per_s is given too; a plan is for one")
        for name in ("p95_ms", "p99_ms"):
            if getattr(self, name) and not self.queries_per_s:
                raise ValueError(f"{name}={getattr(self, name)}: needs queries_per_s, the rate at which it is to hold")

    def require(self) -> None:
        """ValueError unless a search has something to reach."""
        if not (self.has_rate or self.usd or self.usd_a_month or self.watts):
            raise ValueError("the target names no rate and no limit: give samples_per_s, queries_per_s, usd or watts")

    @property
    def has_rate(self) -> bool:
        return bool(self.samples_per_s or self.queries_per_s)


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Checked):
    """[search]: what may vary where the setup leaves it open. The grid is the product of all of it. ``search`` without
    ``dtypes`` looks at all that the work allows."""

    hosts: tuple[int, ...] = option((), "counts, ascending; []: 1 to 64")
    memory_shares: tuple[float, ...] = option((), "of the host's DDR, what it is bought with; []: an eighth to all")
    row_shares: tuple[float, ...] = option((), "of that memory, the budget for rows; []: 0.5 and 0.8")
    dtypes: tuple[DtypeName, ...] = option((), "of the rows; []: the workload's own")
    drives: tuple[int, ...] = option((), "of a host, of those it has; []: 1, 2, 4, ... and all")
    accelerators: tuple[int, ...] = option((), "GPUs of a host: 0, or 1 to train on one host; []: both")
    workers: tuple[int, ...] = option((), "of serving; []: 1, 2, 4 and 8")
    in_memory: bool = option(False, "only setups that have every row in DDR or HBM")
    runners_up: int = option(5, "shown beside the best, and as many that fail", low=0, high=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("memory_shares", 1.0), ("row_shares", _USED_SHARE)):
            if not all(0 < share <= most for share in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)}: expected numbers above 0, up to {most:g}")
        for name, least in (("hosts", 1), ("workers", 1), ("drives", 0)):
            if min(getattr(self, name), default=least) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected counts from {least} on")
        if not set(self.accelerators) <= {0, 1}:
            raise ValueError(f"accelerators={self.accelerators}: expected 0 or 1, as a store uses one GPU")
        if list(self.hosts) != sorted(set(self.hosts)):
            raise ValueError(f"hosts={self.hosts}: expected counts, ascending")


class Attempt(NamedTuple):
    """A setup that was looked at: ``prediction`` is None if it does not fit, ``reason`` "" if it meets the target. It
    would take ``shortfall`` times what it has, infinite if it does not fit; ``is_rate``: more hosts would help."""

    setup: Setup
    prediction: Prediction | None
    reason: str = ""
    shortfall: float = 0.0
    is_rate: bool = False


class SearchResult(NamedTuple):
    """What a search found; ``num_setups``: of the grid; those that must cost more than all runners-up were passed
    over."""

    best: Prediction  # the cheapest that meets the target; the fastest if it names no rate
    runners_up: tuple[Prediction, ...]  # each of other parts, and cheaper, faster or of less power than all before it
    failures: tuple[Attempt, ...]  # nearest to the target first
    num_setups: int


def search(
    workload: Workload,
    demand: Demand,
    hosts: Sequence[Host],
    target: Target,
    *,
    space: SearchSpace | None = None,
    pricing: Pricing | None = None,
    query_sizes: Sequence[float] | None = None,
) -> SearchResult:
    """Look at every setup of the grid, of each with as few hosts as meet the target. Deterministic. ``hosts``: each has
    the most memory, drives and accelerators that it can be bought with; ``query_sizes``: as for ``predict``.
    ValueError: no setup meets the target, and what is nearest; or the grid has over 100,000 setups."""
    finder = _Finder(demand, target, space or SearchSpace(), pricing or Pricing(), query_sizes)
    target.require()
    if not hosts:
        raise ValueError("the search was given no host")
    if target.queries_per_s and workload.is_training:
        raise ValueError("queries_per_s is a target of serving; a workload that trains has samples_per_s")
    grid = [setup for host in hosts for setup in finder.grid(workload, host)]
    size = len(grid) * len(finder.space.hosts or _HOSTS)
    if not grid:
        raise ValueError(
            "the search space allows no setup of these hosts: ask for drives and GPUs that they have; a GPU is to "
            "train on one host"
        )
    if size > _MAX_SETUPS:
        raise ValueError(f"the grid has {size:,} setups; at most {_MAX_SETUPS:,} are looked at. Let less vary")
    met: list[Prediction] = []
    failed: list[Attempt] = []
    for least_usd, setup in sorted(((finder.least_usd(each), each) for each in grid), key=lambda pair: pair[0]):
        if len(met) > _RUNNERS_UP and least_usd > met[-1].price.usd_a_month:
            break
        tried = finder.best_count(setup)
        if tried.prediction is None or tried.reason:
            failed.append(tried)
        else:
            met = _undominated(sorted([*met, tried.prediction], key=finder.rank))
    failed.sort(key=lambda each: (each.shortfall, -each.setup.num_hosts * each.setup.ddr_bytes))
    if not met:
        nearest, found = failed[0], failed[0].prediction
        stops = "" if found is None else f"; what stops it is: {in_words(found.bottleneck)}"
        raise ValueError(
            f"no setup meets the target; the nearest, {describe_setup(nearest.setup)}: {nearest.reason}{stops}"
        )
    return SearchResult(met[0], tuple(met[1:]), tuple(failed[:_MAX_FAILURES]), len(grid))


class _Finder(NamedTuple):
    """A search: what stays the same over all setups."""

    demand: Demand
    target: Target
    space: SearchSpace
    pricing: Pricing
    query_sizes: Sequence[float] | None

    def grid(self, workload: Workload, host: Host) -> Iterator[Setup]:
        """All but the count of hosts. A GPU is to train on one host."""
        space, cores = self.space, host.processor.cores
        may_use_gpu = host.accelerators and workload.is_training and (space.hosts or _HOSTS)[0] == 1
        gpus = [count for count in space.accelerators or (0, 1) if count <= bool(may_use_gpu)]
        workers = (1,) if workload.is_training else [each for each in space.workers or _WORKERS if each <= cores]
        most = len(host.storage)
        drives = space.drives or sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
        drives = [count for count in drives if count <= most]
        dtypes = space.dtypes or (_TRAINED_DTYPES if workload.is_training else _SERVED_DTYPES)
        for dtype, ssds, accelerators, share in product(dtypes, drives, gpus, space.memory_shares or _MEMORY_SHARES):
            memory = share * host.ddr.capacity_bytes
            parts = with_accelerators(replace(host, storage=host.storage[:ssds]), host.accelerators[:accelerators])
            parts = with_memory(parts, memory)
            for rows, count in product(space.row_shares or _ROW_SHARES, workers):
                yield Setup(
                    workload=replace(workload, dtype=dtype),
                    host=parts,
                    ddr_bytes=rows * memory,
                    hbm_bytes=_HBM_SHARE * sum(each.hbm.capacity_bytes for each in parts.accelerators),
                    page_cache_bytes=(_USED_SHARE - rows) * memory,
                    policy=self.demand.policy if self.demand.policy in STORE_POLICIES else "lru",
                    threads=max(1, cores // count),
                    workers=count,
                )

    def least_usd(self, setup: Setup) -> float:
        """Dollars a month below which it cannot be; only of serving at a rate, where looking at a setup takes
        simulations."""
        if setup.workload.is_training or not self.target.has_rate:
            return 0.0
        try:
            one = self._predicted(setup)
        except ValueError:
            return 0.0
        return self._fewest(one) * one.price.usd_a_month

    def rank(self, found: Prediction) -> tuple[float, ...]:
        """Cheaper first; of equal price less of everything, and then faster."""
        setup, price = found.setup, found.price
        parts = (setup.num_hosts, setup.host.ddr.capacity_bytes, len(setup.host.storage), len(setup.host.accelerators))
        cost = (price.usd_a_month, price.usd, *parts)
        return (*cost, -found.samples_per_s) if self.target.has_rate else (-found.samples_per_s, *cost)

    def best_count(self, setup: Setup) -> Attempt:
        """With the fewest hosts that meet the target, or without a rate as fast as limits allow; or what is nearest."""
        counts: Sequence[int] = (1,) if setup.hbm_bytes else self.space.hosts or _HOSTS
        if not setup.workload.is_training:
            try:
                fewest = self._fewest(self._predicted(setup))
            except ValueError as error:
                return _unfit(setup, error)
            counts = self.space.hosts or range(1, _HOSTS[-1] + 1)
            counts = [count for count in counts if count >= fewest] or counts[-1:]
        tried = []
        for count in counts:
            is_training = setup.workload.is_training
            tried.append(self._try(replace(setup, hosts=count) if is_training else replace(setup, replicas=count)))
            if self.target.has_rate and not (tried[-1].reason and tried[-1].is_rate):
                break
        met = [(self.rank(each.prediction), each) for each in tried if each.prediction is not None and not each.reason]
        return min(met, key=lambda each: each[0])[1] if met else min(tried, key=lambda each: each.shortfall)

    def _fewest(self, one: Prediction) -> int:
        """Replicas that the rate takes at least, however long queries may wait."""
        if one.queue is not None and self.target.queries_per_s:
            return max(1, math.ceil(self.target.queries_per_s / one.queue.rate_max))
        return max(1, math.ceil(self.target.samples_per_s / one.samples_per_s))

    def _predicted(self, setup: Setup, queries_per_s: float | None = None) -> Prediction:
        found = predict(
            setup, self.demand, query_sizes=self.query_sizes, queries_per_s=queries_per_s, pricing=self.pricing
        )
        if self.space.in_memory and not found.is_in_memory:
            whole, there = setup.workload.table_bytes / setup.hosts, setup.ddr_bytes / setup.workers
            hbm = f" and {format_size(setup.hbm_bytes)} of its GPU" if setup.hbm_bytes else ""
            raise ValueError(
                f"memory: {format_size(whole)} of rows of a host are wanted in it, there are {format_size(there)}{hbm} "
                "for rows"
            )
        return found

    def _try(self, setup: Setup) -> Attempt:
        try:
            found, lacking = self._predicted(setup), list[Lack]()
            if self.target.queries_per_s and found.queue is not None:
                alone = latency_alone(found.queue)
                lacking = list(_over_bound(self.target, alone, "queries that never wait", is_rate=False))
                found = found if lacking else self._predicted(setup, self.target.queries_per_s)
        except ValueError as error:
            return _unfit(setup, error)
        life = years_of_life(setup.host, found.drive_writes_a_day, self.pricing)
        worn = Lack(self.pricing.years / life, f"its drives wear out in {12 * life:.3g} months", is_rate=True)
        lacking = lacking or [lack for lack in (*lacks(self.target, found), worn) if not lack.factor <= 1]
        if not lacking:
            return Attempt(setup, found)
        worst = max(lacking, key=lambda lack: lack.factor)
        return Attempt(setup, found, worst.text, worst.factor, any(lack.is_rate for lack in lacking))


class Lack(NamedTuple):
    """``factor`` times what there is would do; ``is_rate``: more hosts may help."""

    factor: float
    text: str
    is_rate: bool = False


def rate(value: float) -> str:
    """33,740 a second, or 4.25."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def lacks(target: Target, found: Prediction) -> Iterator[Lack]:
    """What is asked for and not there."""
    price, latency = found.price, found.latency
    if not found.samples_per_s >= target.samples_per_s:  # NaN is not, here and below
        text = f"{rate(found.samples_per_s)} of {rate(target.samples_per_s)} samples/s"
        yield Lack(target.samples_per_s / found.samples_per_s, text, is_rate=True)
    if latency is not None and found.queue is not None and math.isinf(latency.p99_s):
        most = found.setup.replicas * found.queue.rate_max
        text = f"{rate(most)} of {rate(latency.queries_per_s)} queries/s"
        yield Lack(latency.queries_per_s / most * _OVERLOAD, text, is_rate=True)
    elif latency is not None:
        yield from _over_bound(target, latency, "queries", is_rate=True)
    for name, value, limit in (
        ("US dollars", price.usd, target.usd),
        ("US dollars a month", price.usd_a_month, target.usd_a_month),
        ("watts", price.watts, target.watts),
    ):
        if limit and not value <= limit:
            yield Lack(value / limit, f"{rate(value)} {name}, {rate(limit)} at most were asked for")


def _over_bound(target: Target, latency: Latency, which: str, *, is_rate: bool) -> Iterator[Lack]:
    for name, seconds, limit in (("99 %", latency.p99_s, target.p99_ms), ("95 %", latency.p95_s, target.p95_ms)):
        if limit and not 1e3 * seconds <= limit:
            text = f"{name} of {which} within {1e3 * seconds:.3g} ms, not {limit:g} ms"
            yield Lack(1e3 * seconds / limit, text, is_rate=is_rate)


def _unfit(setup: Setup, error: ValueError) -> Attempt:
    return Attempt(setup, None, f"does not fit: {error}", math.inf, is_rate=True)


def _undominated(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Of those built of the same parts the first, without those that one before of their dtype is no worse than in
    price, power and speed; as many as are shown."""
    chosen: list[Prediction] = []
    seen: list[tuple[Any, tuple[float, ...]]] = []  # parts, of which the first is the dtype; and merits, less is better
    for each in ranked:
        host, price, latency = each.setup.host, each.price, each.latency
        counts = (host.ddr.capacity_bytes, len(host.storage), len(host.accelerators))
        parts = (each.setup.workload.dtype, host.name, counts)
        slowness = -each.samples_per_s if latency is None else latency.p99_s
        merits = (price.usd_a_month, price.usd, price.watts, slowness)
        is_worse = any(
            before == parts or (before[0] == parts[0] and all(a <= b for a, b in zip(better, merits, strict=True)))
            for before, better in seen
        )
        if not is_worse:
            chosen.append(each)
            seen.append((parts, merits))
    return chosen[: _RUNNERS_UP + 1]
