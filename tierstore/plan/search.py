"""The cheapest setup that meets a target: every one of a bounded grid is looked at."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ..cache import POLICIES as STORE_POLICIES
from ..rows import DtypeName
from ..settings.options import check_ranges, option
from ..system.excerpt import excerpt
from ..system.sizes import format_size
from .demand import Demand
from .host import Host
from .model import predict, queue_of
from .prediction import Latency, Prediction, Setup
from .price import Pricing, years_of_life
from .queueing import LatencyBound, Queue, latency_alone
from .workload import Workload

__all__ = ["Failure", "SearchResult", "SearchSpace", "Target", "describe_setup", "search", "with_memory", "with_parts"]

MAX_SETUPS: Final = 100_000
"""Of a grid."""
MAX_FAILURES: Final = 200
"""That are told: the nearest to the target."""
_RUNNERS_UP: Final = 10
_QUANTIZED: Final = ("int8", "int4")
_OVERLOAD: Final = 1.000001
"""So that a rate which is just what could be answered counts as too high."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is asked. With a rate the cheapest setup is looked for, else the fastest.

    Attributes:
        samples_per_s: at least.
        queries_per_s: of serving, at least, within the bounds on latency.
        p95_s, p99_s: at most, waiting included.
        usd: to buy all hosts, at most; usd_a_month: likewise, with power; watts: of all hosts, at most.

    Raises:
        ValueError: nothing is asked, or a number is not more than 0.
    """

    samples_per_s: float | None = None
    queries_per_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    usd: float | None = None
    usd_a_month: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if not {"samples_per_s", "queries_per_s", "usd", "usd_a_month", "watts"} & set(given):
            raise ValueError("the target names no rate and no limit: give samples_per_s, queries_per_s, usd or watts")
        for name, value in given.items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}={excerpt(value)}: expected more than 0")
        if (self.p95_s or self.p99_s) and not self.queries_per_s:
            raise ValueError("a bound on latency needs queries_per_s, the rate at which it is to hold")

    @property
    def has_rate(self) -> bool:
        return self.samples_per_s is not None or self.queries_per_s is not None

    @property
    def bound(self) -> LatencyBound:
        return LatencyBound(self.p95_s or math.inf, self.p99_s or math.inf)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may vary: the grid is the product of all of it.

    Attributes:
        dtypes: of the rows; empty: those that the work allows.
        drives, accelerators: counts of a host, of those that it lists; empty: 1, 2, 4, ... of them; no accelerator too.
        hosts: counts, ascending; of serving they count replicas too.

    Raises:
        ValueError: names the field, its value and what is accepted.
    """

    memory_shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)
    """Of the memory that a host lists: what it is bought with. Its watts and price go along."""
    row_shares: tuple[float, ...] = (0.5, 0.8)
    """Of that memory: the budget for rows."""
    used_share: float = option(
        0.9, "of memory: for rows and page cache together; the rest is the system's", low=0.1, high=1
    )
    hbm_share: float = option(0.8, "of an accelerator's memory: for rows; the rest is the model's", low=0.1, high=1)
    dtypes: tuple[DtypeName, ...] = ()
    drives: tuple[int, ...] = ()
    accelerators: tuple[int, ...] = ()
    workers: tuple[int, ...] = (1, 2, 4, 8)
    """Of serving."""
    hosts: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.memory_shares or not all(0 < share <= 1 for share in self.memory_shares):
            raise ValueError(f"memory_shares={self.memory_shares}: expected numbers above 0, up to 1")
        if not self.row_shares or not all(0 < share <= self.used_share for share in self.row_shares):
            raise ValueError(f"row_shares={self.row_shares}: expected numbers above 0, up to used_share")
        if not self.hosts or list(self.hosts) != sorted(set(self.hosts)) or self.hosts[0] < 1:
            raise ValueError(f"hosts={self.hosts}: expected counts from 1 on, ascending")
        if not self.workers or min(self.workers) < 1:
            raise ValueError(f"workers={self.workers}: expected counts from 1 on")
        for name in ("drives", "accelerators"):
            if min(getattr(self, name), default=0) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected counts from 0 on")


class Failure(NamedTuple):
    """A setup that does not meet the target.

    Attributes:
        reason: what it fails by.
        shortfall: how many times what it has would do; infinite if it does not fit at all.
        prediction: None if it does not fit.
        is_rate: more hosts would help.
    """

    setup: Setup
    reason: str
    shortfall: float
    prediction: Prediction | None = None
    is_rate: bool = False


class SearchResult(NamedTuple):
    """Attributes:
    best: the cheapest that meets the target; the fastest if it names no rate.
    runners_up: the next ones, each of another host, memory, drives, accelerators or dtype.
    failures: nearest to the target first.
    num_setups: of the grid; those that must cost more than all runners-up were passed over.
    """

    best: Prediction
    runners_up: tuple[Prediction, ...]
    failures: tuple[Failure, ...]
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
    """Look at every setup of the grid, at most ``MAX_SETUPS``; of each with as few hosts as meet the target.

    The same arguments give the same result.

    Args:
        hosts: each with the most memory, drives and accelerators that it can be bought with.
        query_sizes: as for ``predict``.

    Raises:
        ValueError: no setup meets the target; names what is nearest and what stops it. Or the grid is too large.
    """
    finder = _Finder(demand, target, space or SearchSpace(), pricing or Pricing(), query_sizes)
    if not hosts:
        raise ValueError("the search was given no host")
    if target.queries_per_s is not None and workload.is_training:
        raise ValueError("queries_per_s is a target of serving; a workload that trains has samples_per_s")
    grid = [setup for host in hosts for setup in finder.grid(workload, host)]
    size = len(grid) * len(finder.space.hosts)
    if not grid:
        raise ValueError("the search space allows no setup of these hosts")
    if size > MAX_SETUPS:
        raise ValueError(f"the grid has {size:,} setups; at most {MAX_SETUPS:,} are looked at. Let less vary")
    met: list[Prediction] = []
    failed: list[Failure] = []
    for setup, least_usd in finder.by_least_price(grid):
        if len(met) > _RUNNERS_UP and least_usd > met[-1].price.usd_a_month:
            break
        found = finder.best_count(setup)
        if isinstance(found, Failure):
            failed.append(found)
        else:
            met = _first_of_parts(sorted([*met, found], key=finder.rank))
    failed.sort(key=lambda each: each.shortfall)
    if not met:
        raise ValueError(_impossible(failed))
    return SearchResult(met[0], tuple(met[1:]), tuple(failed[:MAX_FAILURES]), len(grid))


def with_parts(host: Host, *, memory_bytes: float, drives: int, accelerators: int) -> Host:
    """The host with so much memory (``with_memory``), and the first of its drives and accelerators."""
    less = replace(host, storage=host.storage[:drives], accelerators=host.accelerators[:accelerators])
    return with_memory(less, memory_bytes)


def with_memory(host: Host, memory_bytes: float) -> Host:
    """The host with so much memory, whose watts and price follow."""
    memory, share = host.ddr, memory_bytes / host.ddr.capacity_bytes if host.ddr.capacity_bytes else 0.0
    scaled = replace(memory, capacity_bytes=memory_bytes, watts=share * memory.watts, usd=share * memory.usd)
    return replace(host, ddr=scaled)


def describe_setup(setup: Setup) -> str:
    """In one line."""
    host = setup.host
    parts = [f"{format_size(int(host.ddr.capacity_bytes))} DDR", f"{len(host.storage)} SSD"]
    parts += [f"{len(host.accelerators)} accelerators"] if setup.hbm_bytes else []
    rows = f"{format_size(int(setup.ddr_bytes))} of it for {setup.workload.dtype} rows"
    workers = f", {setup.workers} workers" if setup.workers > 1 else ""
    return f"{setup.num_hosts} x {host.name} ({', '.join(parts)}; {rows}{workers})"


class _Finder(NamedTuple):
    """A search: what stays the same over all setups."""

    demand: Demand
    target: Target
    space: SearchSpace
    pricing: Pricing
    query_sizes: Sequence[float] | None

    def grid(self, workload: Workload, host: Host) -> Iterator[Setup]:
        """All but the count of hosts."""
        space = self.space
        for dtype in space.dtypes or _dtypes(workload):
            own = replace(workload, dtype=dtype)
            for drives in space.drives or _counts(len(host.storage)):
                for accelerators in space.accelerators or (0, *_counts(len(host.accelerators))):
                    if accelerators and dtype in _QUANTIZED:
                        continue  # the tier in device memory has no such rows
                    for share in space.memory_shares:
                        memory_bytes = share * host.ddr.capacity_bytes
                        parts = with_parts(host, memory_bytes=memory_bytes, drives=drives, accelerators=accelerators)
                        yield from self._budgets(own, parts)

    def _budgets(self, workload: Workload, host: Host) -> Iterator[Setup]:
        space, cores = self.space, host.processor.cores
        hbm = space.hbm_share * min((each.hbm.capacity_bytes for each in host.accelerators), default=0.0)
        workers = (1,) if workload.is_training else [each for each in space.workers if each <= cores]
        for rows in space.row_shares:
            for count in workers:
                yield Setup(
                    workload=workload,
                    host=host,
                    ddr_bytes=rows * host.ddr.capacity_bytes,
                    hbm_bytes=hbm,
                    page_cache_bytes=(space.used_share - rows) * host.ddr.capacity_bytes,
                    policy=self.demand.policy if self.demand.policy in STORE_POLICIES else "lru",
                    threads=max(1, cores // count),
                    workers=count,
                )

    def by_least_price(self, grid: Sequence[Setup]) -> list[tuple[Setup, float]]:
        """Setups, and dollars a month below which none of them can be, cheapest first.

        Only of serving at a rate, where looking at a setup takes simulations; else in their order, at no price.
        """
        if grid[0].workload.is_training or not self.target.has_rate:
            return [(setup, 0.0) for setup in grid]
        priced = [(setup, self._least_usd(setup)) for setup in grid]
        return sorted(priced, key=lambda each: each[1])

    def _least_usd(self, setup: Setup) -> float:
        group = self.group(setup)
        return 0.0 if isinstance(group, Failure) else self.least_replicas(group) * group.price.usd_a_month

    def rank(self, found: Prediction) -> tuple[float, ...]:
        """Cheaper first; of equal price less of everything, and then faster."""
        setup, price = found.setup, found.price
        parts = (setup.num_hosts, setup.host.ddr.capacity_bytes, len(setup.host.storage), len(setup.host.accelerators))
        cost = (price.usd_a_month, price.usd, *parts)
        return (*cost, -found.samples_per_s) if self.target.has_rate else (-found.samples_per_s, *cost)

    def best_count(self, setup: Setup) -> "Prediction | Failure":
        """With the fewest hosts that meet the target, or why none does; without a rate, as fast as limits allow."""
        if setup.workload.is_training:
            return self._best(self._try(replace(setup, hosts=count)) for count in self.space.hosts)
        group = self.group(setup)
        if isinstance(group, Failure):
            return group
        most = self.space.hosts[-1] // group.setup.hosts
        if self.target.has_rate:
            return self._least_replicas(group, most)
        counts = [count for count in self.space.hosts if count <= most]
        return self._best(self._try(replace(group.setup, replicas=count)) for count in counts)

    def _best(self, tries: "Iterable[Prediction | Failure]") -> "Prediction | Failure":
        """The first that meets a target with a rate, as more hosts cost more; else the best, or what is nearest."""
        failed, met = [], []
        for tried in tries:
            if isinstance(tried, Failure):
                failed.append(tried)
            elif self.target.has_rate:
                return tried
            else:
                met.append(tried)
        return min(met, key=self.rank) if met else min(failed, key=lambda each: each.shortfall)

    def group(self, setup: Setup) -> "Prediction | Failure":
        """The fewest hosts that can hold the rows, whatever the target; or why the most cannot."""
        for hosts in self.space.hosts:
            found = self._predicted(replace(setup, hosts=hosts))
            if isinstance(found, Prediction):
                return found
        return found

    def least_replicas(self, group: Prediction) -> int:
        """Without so many the rate cannot be carried, however long queries may wait."""
        return max(1, math.ceil(self._asked_of(group)))

    def _least_replicas(self, group: Prediction, most: int) -> "Prediction | Failure":
        """As many as meet the target: found by doubling what is added, and then by bisection."""
        least = min(self.least_replicas(group), most)
        low, count, step = least - 1, least, 1
        while True:
            tried = self._try(replace(group.setup, replicas=count))
            if isinstance(tried, Prediction):
                break
            if count == most or not tried.is_rate:
                return tried
            low, count, step = count, min(count + step, most), 2 * step
        best = tried
        while best.setup.replicas - low > 1:
            tried = self._try(replace(group.setup, replicas=(low + best.setup.replicas) // 2))
            if isinstance(tried, Prediction):
                best = tried
            else:
                low = tried.setup.replicas
        return best

    def _queue(self, prediction: Prediction) -> Queue:
        return queue_of(prediction, self.demand, self.query_sizes)

    def _asked_of(self, prediction: Prediction) -> float:
        """How many times what one replica carries at most is asked for."""
        target = self.target
        if target.queries_per_s is not None:
            return target.queries_per_s / self._queue(prediction).rate_max
        return (target.samples_per_s or 0.0) / prediction.samples_per_s

    def _predicted(self, setup: Setup, queries_per_s: float | None = None) -> "Prediction | Failure":
        """A failure if it does not fit."""
        try:
            return predict(
                setup, self.demand, query_sizes=self.query_sizes, queries_per_s=queries_per_s, pricing=self.pricing
            )
        except ValueError as error:
            return Failure(setup, f"does not fit: {error}", math.inf)

    def _try(self, setup: Setup) -> "Prediction | Failure":
        found = self._predicted(setup)
        if isinstance(found, Prediction) and self.target.queries_per_s is not None:
            alone = latency_alone(self._queue(found))
            if not self.target.bound.allows(alone):
                worst = max(self._over_bound(alone, "of queries that never wait "), key=lambda lack: lack.factor)
                return Failure(setup, worst.text, worst.factor, found)
            found = self._predicted(setup, self.target.queries_per_s)
        if isinstance(found, Failure):
            return found
        lacking = [lack for lack in self._lacks(found) if lack.factor > 1]
        if not lacking:
            return found
        worst = max(lacking, key=lambda lack: lack.factor)
        return Failure(setup, worst.text, worst.factor, found, any(lack.is_rate for lack in lacking))

    def _lacks(self, found: Prediction) -> Iterator["_Lack"]:
        """Each thing asked for, and by how much it is missed."""
        target, price = self.target, found.price
        if target.samples_per_s is not None:
            factor = target.samples_per_s / found.samples_per_s
            yield _Lack(factor, f"too slow by {factor:.3g}: {found.samples_per_s:,.4g} samples/s", is_rate=True)
        if found.latency is not None:
            yield from self._late(found, found.latency)
        limits = (("usd", price.usd), ("usd_a_month", price.usd_a_month), ("watts", price.watts))
        for name, value in limits:
            limit = getattr(target, name)
            if limit is not None:
                yield _Lack(value / limit, f"{name} is {value:,.4g}, {value / limit:.3g} times the limit")
        life = years_of_life(found, self.pricing)
        yield _Lack(self.pricing.years / life, f"its drives wear out in {12 * life:.3g} months")

    def _late(self, found: Prediction, latency: Latency) -> Iterator["_Lack"]:
        if math.isinf(latency.p99_s):
            most = found.setup.replicas * self._queue(found).rate_max
            factor = latency.queries_per_s / most * _OVERLOAD
            yield _Lack(factor, f"too slow: at most {most:,.4g} queries/s", is_rate=True)
        else:
            yield from self._over_bound(latency, "")

    def _over_bound(self, latency: Latency, which: str) -> Iterator["_Lack"]:
        target = self.target
        for name, value, limit in (("p95", latency.p95_s, target.p95_s), ("p99", latency.p99_s, target.p99_s)):
            if limit is not None:
                text = f"{name} {which}is {1e3 * value:.3g} ms, {value / limit:.3g} times the limit"
                yield _Lack(value / limit, text, is_rate=True)


class _Lack(NamedTuple):
    """Attributes:
    is_rate: more hosts would help.
    """

    factor: float
    text: str
    is_rate: bool = False


def _dtypes(workload: Workload) -> tuple[DtypeName, ...]:
    return ("float32", "float16") if workload.is_training else ("float32", "float16", "int8", "int4")


def _counts(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... and all."""
    return tuple(sorted({*(1 << power for power in range(most.bit_length())), most} - {0}))


def _first_of_parts(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Of those built of the same parts the first; as many as are told."""
    chosen: dict[tuple[object, ...], Prediction] = {}
    for each in ranked:
        chosen.setdefault(_parts(each), each)
    return list(chosen.values())[: _RUNNERS_UP + 1]


def _parts(found: Prediction) -> tuple[object, ...]:
    host = found.setup.host
    return host.name, host.ddr.capacity_bytes, len(host.storage), len(host.accelerators), found.setup.workload.dtype


def _impossible(failed: Sequence[Failure]) -> str:
    nearest = failed[0]
    text = f"no setup meets the target; the nearest, {describe_setup(nearest.setup)}: {nearest.reason}"
    if nearest.prediction is None:
        return text
    return f"{text}; what stops it is: {nearest.prediction.bottleneck}"
