"""The cheapest setup of a bounded grid that meets a target."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

from ..cache.ddr import POLICIES as STORE_POLICIES
from ..layout import DtypeName
from ..settings.sections import Checked, ConfigError, option
from ..system.sizes import format_size
from .demand import Demand
from .host import Host, Pricing, Setup, describe_setup, with_accelerators, with_memory, years_of_life
from .loads import in_words
from .model import Latency, Prediction, latency_alone, predict
from .workload import Workload

_MAX_RATE: Final = 1e12
_MAX_SETUPS: Final = 100_000
_SHOWN: Final = 5  # beside the best, and as many that fail
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
    """What is asked, of all hosts; 0: nothing. The cheapest setup that reaches it is looked for."""

    GONE = dict.fromkeys(
        ("p95_ms", "usd", "usd_a_month", "watts"), "leave it out: the table of setups has price and watts"
    )
    samples_per_s: float = option(0.0, "of training", low=0, high=_MAX_RATE)
    queries_per_s: float = option(0.0, "of serving", low=0, high=_MAX_RATE)
    p99_ms: float = option(0.0, "latency that 99 of 100 queries keep", low=0, high=1e9)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_s and self.queries_per_s:
            raise ValueError(f"queries_per_s={self.queries_per_s}: samples_per_s is given too; a plan is for one")
        if self.p99_ms and not self.queries_per_s:
            raise ValueError(f"p99_ms={self.p99_ms}: needs queries_per_s, the rate at which it is to hold")


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Checked):
    """[search]: what may vary where the setup leaves it open. The grid is the product of all of it, of drives, of a GPU
    or none, of workers, and of shares of memory for rows. ``search`` without ``dtypes`` looks at all that the work
    allows."""

    GONE = dict.fromkeys(
        ("row_shares", "drives", "accelerators", "workers", "runners_up"), "leave it out: the search varies it"
    )
    hosts: tuple[int, ...] = option((), "counts, ascending; []: 1 to 64")
    memory_shares: tuple[float, ...] = option((), "of the host's DDR, what it is bought with; []: an eighth to all")
    dtypes: tuple[DtypeName, ...] = option((), "of the rows; []: the workload's own")
    in_memory: bool = option(False, "only setups that have every row in DDR or HBM")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < share <= 1 for share in self.memory_shares):
            raise ValueError(f"memory_shares={self.memory_shares}: expected numbers above 0, up to 1")
        if list(self.hosts) != sorted(set(self.hosts)) or min(self.hosts, default=1) < 1:
            raise ValueError(f"hosts={self.hosts}: expected counts from 1 on, ascending")


class Attempt(NamedTuple):
    """A setup that was looked at: ``prediction`` is None if it does not fit, ``reason`` "" if it meets the target. It
    would take ``shortfall`` times what it has, infinite if it does not fit; ``is_rate``: more hosts may help."""

    setup: Setup
    prediction: Prediction | None
    reason: str = ""
    shortfall: float = 0.0
    is_rate: bool = False


class SearchResult(NamedTuple):
    """What a search found."""

    best: Prediction  # the cheapest that meets the target
    runners_up: tuple[Prediction, ...]  # each of other parts, and cheaper, faster or of less power than all before it
    failures: tuple[Attempt, ...]  # nearest to the target first


def search(
    workload: Workload,
    demand: Demand,
    hosts: Sequence[Host],
    target: Target,
    *,
    space: SearchSpace | None = None,
    pricing: Pricing | None = None,
) -> SearchResult:
    """Look at every setup of the grid, of each with as few hosts as meet the target. Deterministic. ``hosts``: each has
    the most memory, drives and accelerators that it can be bought with.
    ValueError: no setup meets the target, and what is nearest; or the grid has over 100,000 setups."""
    finder = _Finder(demand, target, space or SearchSpace(), pricing or Pricing())
    if not (target.samples_per_s or target.queries_per_s):
        raise ConfigError(
            "the target names no rate: give samples_per_s or queries_per_s; or setup.ddr, to predict one setup"
        )
    if target.queries_per_s and workload.is_training:
        raise ValueError("queries_per_s is a target of serving; a workload that trains has samples_per_s")
    grid = [setup for host in hosts for setup in finder.grid(workload, host)]
    size = len(grid) * len(finder.space.hosts or _HOSTS)
    if not grid:
        raise ValueError("none of these hosts has a drive: a store's rows are on SSD")
    if size > _MAX_SETUPS:
        raise ValueError(f"the grid has {size:,} setups; at most {_MAX_SETUPS:,} are looked at. Let less vary")
    met, failed = list[Prediction](), list[Attempt]()
    for least_usd, setup in sorted(((finder.least_usd(each), each) for each in grid), key=lambda pair: pair[0]):
        if len(met) > _SHOWN and least_usd > met[-1].price.usd_a_month:
            break
        tried = finder.best_count(setup)
        if tried.prediction is None or tried.reason:
            failed.append(tried)
        else:
            met = _undominated(sorted([*met, tried.prediction], key=_cost))
    failed.sort(key=lambda each: (each.shortfall, -each.setup.num_hosts * each.setup.ddr_bytes))
    if not met:
        nearest, found = failed[0], failed[0].prediction
        stops = "" if found is None else f"; what stops it is: {in_words(found.bottleneck)}"
        raise ValueError(
            f"no setup meets the target; the nearest, {describe_setup(nearest.setup)}: {nearest.reason}{stops}"
        )
    return SearchResult(met[0], tuple(met[1:]), tuple(failed[:_SHOWN]))


class _Finder(NamedTuple):
    """A search: what stays the same over all setups."""

    demand: Demand
    target: Target
    space: SearchSpace
    pricing: Pricing

    def grid(self, workload: Workload, host: Host) -> Iterator[Setup]:
        """All but the count of hosts. A GPU is to train on one host."""
        space, cores = self.space, host.processor.cores
        may_use_gpu = host.accelerators and workload.is_training and (space.hosts or _HOSTS)[0] == 1
        gpus = (0, 1) if may_use_gpu else (0,)
        workers = (1,) if workload.is_training else [each for each in _WORKERS if each <= cores]
        most = len(host.storage)
        drives = sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
        dtypes = space.dtypes or (_TRAINED_DTYPES if workload.is_training else _SERVED_DTYPES)
        for dtype, ssds, accelerators, share in product(dtypes, drives, gpus, space.memory_shares or _MEMORY_SHARES):
            memory = share * host.ddr.capacity_bytes
            parts = with_accelerators(replace(host, storage=host.storage[:ssds]), host.accelerators[:accelerators])
            parts = with_memory(parts, memory)
            for rows, count in product(_ROW_SHARES, workers):
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
        """Dollars a month below which it cannot be; only of serving, where looking at a setup takes simulations."""
        if setup.workload.is_training:
            return 0.0
        try:
            one = self._predicted(setup)
        except ValueError:
            return 0.0
        return max(1.0, self._fewest(one)) * one.price.usd_a_month

    def _fewest(self, one: Prediction) -> float:
        """Replicas that the rate takes at least, however long queries may wait."""
        of_queries = 0.0 if one.queue is None else self.target.queries_per_s / one.queue.rate_max
        return max(self.target.samples_per_s / one.samples_per_s, of_queries)

    def best_count(self, setup: Setup) -> Attempt:
        """With the fewest hosts that meet the target; or what is nearest."""
        counts: Sequence[int] = (1,) if setup.hbm_bytes else self.space.hosts or _HOSTS
        if not setup.workload.is_training:
            try:
                fewest = self._fewest(self._predicted(setup))
            except ValueError as error:
                return _unfit(setup, error)
            counts = self.space.hosts or range(1, _HOSTS[-1] + 1)
            counts = [count for count in counts if count >= fewest] or counts[-1:]
        tried, is_training = list[Attempt](), setup.workload.is_training
        for count in counts:
            tried.append(self._try(replace(setup, hosts=count) if is_training else replace(setup, replicas=count)))
            if not (tried[-1].reason and tried[-1].is_rate):
                break
        return min(tried, key=lambda each: each.shortfall) if tried[-1].reason else tried[-1]

    def _predicted(self, setup: Setup, queries_per_s: float | None = None) -> Prediction:
        found = predict(setup, self.demand, queries_per_s=queries_per_s, pricing=self.pricing)
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
            found = self._predicted(setup)
            if self.target.queries_per_s and found.queue is not None:
                if over := _over_bound(self.target, latency_alone(found.queue), "queries that never wait"):
                    return Attempt(setup, found, over.text, over.factor)
                found = self._predicted(setup, self.target.queries_per_s)
        except ValueError as error:
            return _unfit(setup, error)
        life = years_of_life(setup.host, found.drive_writes_a_day)
        worn = Lack(self.pricing.years / life, f"its drives wear out in {12 * life:.3g} months")
        lacking = [lack for lack in (*lacks(self.target, found), worn) if not lack.factor <= 1]
        if not lacking:
            return Attempt(setup, found)
        worst = max(lacking, key=lambda lack: lack.factor)
        return Attempt(setup, found, worst.text, worst.factor, is_rate=True)


def _cost(found: Prediction) -> tuple[float, ...]:
    """By which setups are in order: cheaper first; of equal price less of everything, and then faster."""
    setup, price = found.setup, found.price
    parts = (setup.num_hosts, setup.host.ddr.capacity_bytes, len(setup.host.storage), len(setup.host.accelerators))
    return price.usd_a_month, price.usd, *parts, -found.samples_per_s


class Lack(NamedTuple):
    """``factor`` times what there is would do."""

    factor: float
    text: str


def rate(value: float) -> str:
    """33,740 a second, or 4.25."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}"


def lacks(target: Target, found: Prediction) -> Iterator[Lack]:
    """What is asked for and not there."""
    latency = found.latency
    if not found.samples_per_s >= target.samples_per_s:  # NaN is not, here and below
        text = f"{rate(found.samples_per_s)} of {rate(target.samples_per_s)} samples/s"
        yield Lack(target.samples_per_s / found.samples_per_s, text)
    if latency is not None and found.queue is not None and math.isinf(latency.p99_s):
        most = found.setup.replicas * found.queue.rate_max
        text = f"{rate(most)} of {rate(latency.queries_per_s)} queries/s"
        yield Lack(latency.queries_per_s / most * _OVERLOAD, text)
    elif latency is not None and (over := _over_bound(target, latency, "queries")):
        yield over


def _over_bound(target: Target, latency: Latency, which: str) -> Lack | None:
    took_ms, limit = 1e3 * latency.p99_s, target.p99_ms
    if not limit or took_ms <= limit:
        return None
    return Lack(took_ms / limit, f"99 % of {which} within {took_ms:.3g} ms, not {limit:g} ms")


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
    return chosen[: _SHOWN + 1]
