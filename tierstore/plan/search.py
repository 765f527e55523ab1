"""The cheapest setup of a bounded grid that meets a target."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, NamedTuple

from ..layout import DtypeName
from ..settings.sections import Checked, ConfigError, option
from ..system.checks import excerpt
from ..system.sizes import format_size
from .demand import Demand
from .host import MAX_HOSTS, Host, Pricing, Setup, default_threads, describe_setup, price_of, with_parts
from .loads import in_words
from .model import Prediction, at_rate, predict, processes_bytes
from .workload import Workload

_MAX_RATE: Final = 1e12
_MAX_SETUPS: Final = 100_000
_OVERLOAD: Final = 1.000001  # a rate that is just what could be answered is too high
_MEMORY_SHARES: Final = tuple(eighths / 8 for eighths in range(1, 9))
_ROW_SHARES: Final = (0.5, 0.8)
_HOSTS: Final = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8))
_MOST_SERVERS: Final = 1024
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

    def check(self, workload: Workload) -> None:
        """ConfigError unless it is of what the workload does."""
        if self.queries_per_s and workload.is_training:
            raise ConfigError(
                f"target.queries_per_s = {self.queries_per_s:g}: the workload trains, with {workload.optimizer}; set "
                'workload.optimizer = "none" to plan serving, or ask for samples_per_s'
            )
        if self.samples_per_s and not workload.is_training:
            raise ConfigError(
                f"target.samples_per_s = {self.samples_per_s:g}: the workload's rows are looked up only; set "
                'workload.optimizer = "rowwise_adagrad" to plan training, or ask for queries_per_s'
            )


@dataclass(frozen=True, kw_only=True)
class SearchSpace(Checked):
    """[search]: what may vary where the setup leaves it open. The grid is the product of all of it, of drives, of a GPU
    or none, of workers, and of shares of memory for rows."""

    hosts: tuple[int, ...] = option((), "counts, ascending; []: 1 to 64 that train, 1 to 1,024 that serve")
    memory_shares: tuple[float, ...] = option((), "of the host's DDR, what it is bought with; []: an eighth to all")
    dtypes: tuple[DtypeName, ...] = option((), "of the rows; []: the workload's own")
    in_memory: bool = option(False, "only setups that have every row in DDR or HBM")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(0 < share <= 1 for share in self.memory_shares):
            raise ValueError(f"memory_shares={excerpt(self.memory_shares)}: expected numbers above 0, up to 1")
        if list(self.hosts) != sorted(set(self.hosts)) or not all(1 <= count <= MAX_HOSTS for count in self.hosts):
            raise ValueError(f"hosts={excerpt(self.hosts)}: expected counts from 1 to {MAX_HOSTS:,}, ascending")


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
    target.check(workload)
    if not (target.samples_per_s or target.queries_per_s):
        raise ConfigError(
            "target.queries_per_s = 0, target.samples_per_s = 0: give a rate, as --queries 20000 --p99 20ms or "
            "--samples 100000; or setup.ddr, to predict one setup"
        )
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
        """All but the count of hosts. A GPU is to train on one host. Memory for rows is that of processes, too."""
        space, is_training = self.space, workload.is_training
        may_use_gpu = host.accelerators and is_training and (space.hosts or _HOSTS)[0] == 1
        gpus, workers = (0, 1) if may_use_gpu else (0,), [1] if is_training else _doublings(host.processor.cores)
        dtypes, shares = space.dtypes or (workload.dtype,), space.memory_shares or _MEMORY_SHARES
        for dtype, drives, gpu, share in product(dtypes, _doublings(len(host.storage)), gpus, shares):
            parts = with_parts(host, memory_share=share, drives=drives, gpus=gpu)
            memory = parts.ddr.capacity_bytes
            for rows, count in product(_ROW_SHARES, workers):
                yield Setup(
                    workload=replace(workload, dtype=dtype),
                    host=parts,
                    ddr_bytes=rows * memory,
                    hbm_bytes=_HBM_SHARE * sum(each.hbm.capacity_bytes for each in parts.accelerators),
                    page_cache_bytes=(_USED_SHARE - rows) * memory,
                    policy=self.demand.policy,
                    threads=default_threads(host, count, is_training=is_training),
                    workers=count,
                )

    def nearest(self, grid: Sequence[Setup]) -> Attempt:
        """The cheapest that meets the target; or what is nearest to it. Setups whose fewest hosts are dearer than one
        that meets it are left out."""
        setups = sorted(grid, key=self._usd)
        best = self.best_count(setups[0], math.inf)
        for setup in setups[1:]:
            most_usd = math.inf if best.reason else best.setup.hosts * self._usd(best.setup)
            if min(self.space.hosts, default=1) * self._usd(setup) > most_usd:
                break
            best = min(best, self.best_count(setup, most_usd), key=_order)
        return best

    def _usd(self, setup: Setup) -> float:
        """Of one host, a month."""
        return price_of(setup.host, 1, self.pricing).usd_a_month

    def best_count(self, setup: Setup, most_usd: float) -> Attempt:
        """With the fewest hosts that meet the target; or what is nearest, of those of such a price. Of serving by
        bisection: more hosts are never slower."""
        is_training, tried = setup.workload.is_training, list[Attempt]()
        counts: Sequence[int] = self.space.hosts or (_HOSTS if is_training else range(1, _MOST_SERVERS + 1))
        counts = [1] if setup.hbm_bytes else counts
        counts = counts[: max(1, bisect_right(counts, most_usd, key=lambda count: count * self._usd(setup)))]

        def is_enough(count: int) -> bool:
            found = replace(setup, hosts=count)  # whose processes take their memory from the rows
            ddr_bytes = max(0.0, found.ddr_bytes - processes_bytes(found, self.demand))
            tried.append(self._try(replace(found, ddr_bytes=ddr_bytes)))
            return not (tried[-1].reason and tried[-1].is_rate)

        if is_training:
            any(map(is_enough, counts))  # one after another, until one is
        elif not is_enough(counts[0]):
            bisect_left(counts, True, lo=1, key=is_enough)
        return min(tried, key=lambda each: (each.shortfall, each.setup.hosts))

    def _try(self, setup: Setup) -> Attempt:
        try:
            found = predict(setup, self.demand, pricing=self.pricing)
            if self.space.in_memory and not found.is_in_memory:
                whole, there = setup.workload.table_bytes / setup.parts, setup.ddr_bytes / setup.workers
                hbm = f" and {format_size(setup.hbm_bytes)} of its GPU" if setup.hbm_bytes else ""
                raise ValueError(
                    f"memory: {format_size(whole)} of rows of a host are wanted in it, there are "
                    f"{format_size(there)}{hbm} for rows"
                )
        except ValueError as error:
            return Attempt(setup, None, f"does not fit: {error}", math.inf, is_rate=setup.workload.is_training)
        if found.queue is not None:
            if over := _over_bound(self.target, found.queue.alone_s, "queries that never wait"):
                return Attempt(setup, found, over.text, over.factor)
            found = at_rate(found, self.target.queries_per_s)
        years = found.wear.years
        worn = Lack(self.pricing.years / years, f"its drives wear out in {12 * years:.3g} months")
        lacking = [lack for lack in (*lacks(self.target, found), worn) if not lack.factor <= 1]
        if not lacking:
            return Attempt(setup, found)
        worst = max(lacking, key=lambda lack: lack.factor)
        return Attempt(setup, found, worst.text, worst.factor, is_rate=True)


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
    if latency is not None and math.isinf(latency.p99_s):
        text = f"{rate(found.rate_max)} of {rate(latency.queries_per_s)} queries/s"
        yield Lack(latency.queries_per_s / found.rate_max * _OVERLOAD, text)
    elif latency is not None and (over := _over_bound(target, latency.p99_s, "queries")):
        yield over


def _over_bound(target: Target, seconds: float, which: str) -> Lack | None:
    took_ms, limit = 1e3 * seconds, target.p99_ms
    if not limit or took_ms <= limit:
        return None
    return Lack(took_ms / limit, f"99 % of {which} within {took_ms:.3g} ms, not {limit:g} ms")


def _order(each: Attempt) -> tuple[float, ...]:
    """What meets the target by price, then what is nearest to it; of equal price less of everything, and then faster;
    of what does not fit the largest."""
    host, count, found = each.setup.host, each.setup.hosts, each.prediction
    if found is None:
        return each.shortfall, -count * host.ddr.capacity_bytes
    parts = (count, host.ddr.capacity_bytes, len(host.storage), len(host.accelerators))
    slowness = -found.samples_per_s if found.latency is None else found.latency.p99_s
    return each.shortfall, found.price.usd_a_month, found.price.usd, *parts, slowness


def _doublings(most: int) -> list[int]:
    """1, 2, 4 and so on, and the most; none of 0."""
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})
