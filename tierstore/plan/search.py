"""The cheapest setup of a bounded grid that meets a target."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from ..cache.ddr import POLICIES as STORE_POLICIES
from ..layout import DtypeName
from ..settings.sections import Checked, ConfigError, option
from ..system.sizes import format_size
from .demand import Demand
from .host import Host, Pricing, Setup, describe_setup, price_of, with_accelerators, with_memory, years_of_life
from .loads import in_words
from .model import Latency, Prediction, latency_alone, predict, processes_bytes
from .workload import Workload

_MAX_RATE: Final = 1e12
_MAX_SETUPS: Final = 100_000
_OVERLOAD: Final = 1.000001  # a rate that is just what could be answered is too high
_MEMORY_SHARES: Final = tuple(eighths / 8 for eighths in range(1, 9))
_ROW_SHARES: Final = (0.5, 0.8)
_HOSTS: Final = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
_MOST_REPLICAS: Final = 1024
_TRAINED_DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "float16")
_SERVED_DTYPES: Final[tuple[DtypeName, ...]] = ("float32", "float16", "int8", "int4")
_USED_SHARE: Final = 0.9  # of memory, for rows and page cache; the rest is the system's
_HBM_SHARE: Final = 0.8  # of an accelerator's memory, for rows; the rest is the model's


@dataclass(frozen=True, kw_only=True)
class Target(Checked):
    """What is asked, of all hosts; 0: nothing. The cheapest setup that reaches it is looked for."""

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
    """Of each host the cheapest setup that meets the target, or the nearest to it: in order of price, then of what they
    lack."""

    attempts: tuple[Attempt, ...]

    @property
    def missed(self) -> str:
        """What is nearest, and what stops it, if nothing meets the target; else ""."""
        setup, found, reason = self.attempts[0][:3]
        stops = "" if found is None else f"; what stops it is: {in_words(found.bottleneck)}"
        nearest = f"no setup meets the target; the nearest, {describe_setup(setup)}: {reason}{stops}"
        return nearest if reason else ""

    @property
    def best(self) -> Prediction:
        """The cheapest that meets the target. ValueError: there is none; says what is nearest."""
        found = self.attempts[0].prediction
        if found is None or self.missed:
            raise ValueError(self.missed)
        return found


def search(
    workload: Workload,
    demand: Demand,
    hosts: Sequence[Host],
    target: Target,
    *,
    space: SearchSpace | None = None,
    pricing: Pricing | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """The cheapest setup of each host's grid, each with as few hosts as meet the target. Deterministic. ``hosts``: each
    has the most memory, drives and accelerators that it can be bought with. ``progress``: called with the hosts that
    are done, and all. ValueError: the target names no rate, no host has a drive, or a grid has over 100,000 setups."""
    finder, tried = _Finder(demand, target, space or SearchSpace(), pricing or Pricing()), list[Attempt]()
    if not (target.samples_per_s or target.queries_per_s):
        raise ConfigError(
            "the target names no rate: give samples_per_s or queries_per_s; or setup.ddr, to predict one setup"
        )
    if target.queries_per_s and workload.is_training:
        raise ValueError("queries_per_s is a target of serving; a workload that trains has samples_per_s")
    for number, host in enumerate(hosts, 1):
        grid = list(finder.grid(workload, host))
        if (size := len(grid) * len(finder.space.hosts or _HOSTS)) > _MAX_SETUPS:
            raise ValueError(f"the grid has {size:,} setups; at most {_MAX_SETUPS:,} are looked at. Let less vary")
        tried += [finder.nearest(grid)] if grid else []
        if progress is not None:
            progress(number, len(hosts))
    if not tried:
        raise ValueError("none of these hosts has a drive: a store's rows are on SSD")
    return SearchResult(tuple(sorted(tried, key=_order)))


class _Finder(NamedTuple):
    """A search: what stays the same over all setups."""

    demand: Demand
    target: Target
    space: SearchSpace
    pricing: Pricing

    def grid(self, workload: Workload, host: Host) -> Iterator[Setup]:
        """All but the count of hosts. A GPU is to train on one host. Worker processes take their memory from the
        rows."""
        space, cores = self.space, host.processor.cores
        may_use_gpu = host.accelerators and workload.is_training and (space.hosts or _HOSTS)[0] == 1
        gpus = (0, 1) if may_use_gpu else (0,)
        workers = [1] if workload.is_training else _doublings(cores)
        drives, most_hosts = _doublings(len(host.storage)), max(space.hosts or _HOSTS) if workload.is_training else 1
        dtypes = space.dtypes or (_TRAINED_DTYPES if workload.is_training else _SERVED_DTYPES)
        for dtype, ssds, accelerators, share in product(dtypes, drives, gpus, space.memory_shares or _MEMORY_SHARES):
            memory = share * host.ddr.capacity_bytes
            parts = with_accelerators(replace(host, storage=host.storage[:ssds]), host.accelerators[:accelerators])
            parts = with_memory(parts, memory)
            for rows, count in product(_ROW_SHARES, workers):
                setup = Setup(
                    workload=replace(workload, dtype=dtype),
                    host=parts,
                    ddr_bytes=rows * memory,
                    hbm_bytes=_HBM_SHARE * sum(each.hbm.capacity_bytes for each in parts.accelerators),
                    page_cache_bytes=(_USED_SHARE - rows) * memory,
                    policy=self.demand.policy if self.demand.policy in STORE_POLICIES else "lru",
                    threads=max(1, cores // count),
                    workers=count,
                )
                taken = processes_bytes(replace(setup, hosts=most_hosts), self.demand.laid_out(setup.workload))
                yield replace(setup, ddr_bytes=max(0.0, setup.ddr_bytes - taken))

    def nearest(self, grid: Sequence[Setup]) -> Attempt:
        """The cheapest that meets the target; or what is nearest to it. Setups that cannot be cheaper than one that
        meets it are left out."""
        bounds = sorted(((self._fewest(setup), setup) for setup in grid), key=lambda pair: self._usd(pair[1], pair[0]))
        best = self.best_count(bounds[0][1], bounds[0][0])
        for fewest, setup in bounds[1:]:
            most = math.inf if best.reason else self._usd(best.setup, best.setup.num_hosts)
            if self._usd(setup, fewest) > most:
                break
            best = min(best, self.best_count(setup, fewest, most_usd=most), key=_order)
        return best

    def _usd(self, setup: Setup, count: float) -> float:
        """A month."""
        return count * price_of(setup.host, 1, self.pricing).usd_a_month

    def _fewest(self, setup: Setup) -> int:
        """Hosts below which it cannot be: of serving by the rate alone, however long queries may wait."""
        least = self.space.hosts[0] if self.space.hosts else 1
        if setup.workload.is_training:
            return least
        try:
            one = self._predicted(setup)
        except ValueError:
            return least  # nor with more
        wanted = max(self.target.samples_per_s, self.target.queries_per_s * setup.workload.batch_samples)
        return max(least, math.ceil(min(_MOST_REPLICAS, wanted / one.samples_per_s)))

    def best_count(self, setup: Setup, fewest: int, *, most_usd: float = math.inf) -> Attempt:
        """With the fewest hosts that meet the target; or what is nearest, of those of such a price."""
        counts: Sequence[int] = self.space.hosts or _HOSTS
        if setup.hbm_bytes:
            counts = (1,)
        elif not setup.workload.is_training:
            counts = self.space.hosts or range(fewest, _MOST_REPLICAS + 1, max(1, fewest // 16))
            counts = [count for count in counts if count >= fewest] or counts[-1:]
        tried, is_training = list[Attempt](), setup.workload.is_training
        for count in counts:
            if tried and self._usd(setup, count) > most_usd:
                break
            tried.append(self._try(replace(setup, hosts=count) if is_training else replace(setup, replicas=count)))
            if not (tried[-1].reason and tried[-1].is_rate):
                break
        return min(tried, key=lambda each: each.shortfall)

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
    return Attempt(setup, None, f"does not fit: {error}", math.inf, is_rate=setup.workload.is_training)


def _order(each: Attempt) -> tuple[float, ...]:
    """What meets the target by price, then what is nearest to it; of what does not fit the largest."""
    size = -each.setup.num_hosts * each.setup.host.ddr.capacity_bytes
    return each.shortfall, *(_cost(each.prediction) if each.prediction is not None else (size,))


def _doublings(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most; none of 0."""
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
