"""What tiers would save: the cheapest fleet with all rows in memory beside the cheapest of all, now and with more rows,
and what the two become if an input is off."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ..settings.sections import ConfigError
from ..system.excerpt import excerpt
from .assumptions import FACTORS, Fleet, figure_name, fleet_of
from .demand import Demand
from .host import Accelerator, Host, Memory, Storage
from .json_file import plain
from .plan_file import PlanFile
from .planning import Progress, Question, question_of
from .presets import scaled
from .workload import Workload, times

TIMES_ROWS: Final = (1, 2, 10)
_Part = TypeVar("_Part", Host, Memory, Storage, Accelerator)


Metric = Callable[[Fleet], float]
FleetName = Literal["memory", "tiers"]


class Outcome(NamedTuple):
    """Attributes:
    memory: every row in DDR or HBM; None if no such fleet of the search meets the target.
    tiers: whatever is cheapest; None if no fleet of the search meets the target.
    no_memory, no_tiers: why there is none; else "".
    """

    memory: Fleet | None
    tiers: Fleet | None
    no_memory: str = ""
    no_tiers: str = ""


Figure = Callable[[Outcome], float | None]


class Case(NamedTuple):
    """An input that is off.

    Attributes:
        what: the figure, in words.
        factor: of how many times what the plan has.
    """

    what: str
    factor: float
    outcome: Outcome


class Span(NamedTuple):
    """Of the plan's own inputs, and the least and most that any case has."""

    low: float
    own: float
    high: float


class Scale(NamedTuple):
    """Attributes:
    times: the rows of every table.
    num_rows, table_bytes: of all tables.
    own: with the plan's inputs as they are.
    cases: with one of them off.
    """

    times: int
    num_rows: int
    table_bytes: int
    own: Outcome
    cases: tuple[Case, ...]

    def span(self, figure: Figure) -> Span | None:
        """Over the outcomes that have the figure; None if ``own`` has not."""
        own = figure(self.own)
        found = [figure(case.outcome) for case in self.cases]
        known = [value for value in (own, *found) if value is not None]
        return None if own is None else Span(min(known), own, max(known))


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The answer.

    Attributes:
        hosts: names of those that were compared.
        has_trace: a trace says which rows are looked up.
    """

    asked: PlanFile
    workload: Workload
    hosts: tuple[str, ...]
    has_trace: bool
    scales: tuple[Scale, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        found: dict[str, Any] = plain(self)
        return found


def figure_of(which: FleetName, metric: Metric) -> Figure:
    """Of one of the fleets."""

    def found(outcome: Outcome) -> float | None:
        fleet: Fleet | None = getattr(outcome, which)
        return None if fleet is None else metric(fleet)

    return found


def saved(metric: Metric) -> Figure:
    """What ``tiers`` has less than ``memory``."""

    def found(outcome: Outcome) -> float | None:
        if outcome.memory is None or outcome.tiers is None:
            return None
        return metric(outcome.memory) - metric(outcome.tiers)

    return found


def saved_share(metric: Metric) -> Figure:
    """The same, as a share of what ``memory`` has; 0 of nothing."""

    def found(outcome: Outcome) -> float | None:
        less = saved(metric)(outcome)
        return None if less is None or outcome.memory is None else less / (metric(outcome.memory) or 1.0)

    return found


def gain(asked: PlanFile, *, progress: Progress | None = None) -> Gain:
    """Search both fleets at every number of rows: with the plan's inputs, and with each that is uncertain off.

    Uncertain is what nobody gave (half and twice of it, as ``assumptions_of``) and prices (``Pricing.spread``), one at
    a time. Deterministic.

    Raises:
        ValueError: as of ``plan``; or the file asks for no rate, or gives a setup.
    """
    target = asked.target
    if not target.samples_per_s and not target.queries_per_s:
        raise ConfigError("target.samples_per_s = 0: fleets are compared at one rate; give it, or target.queries_per_s")
    if asked.is_fixed:
        raise ConfigError(f"setup.ddr = {excerpt(asked.setup.ddr)}: both fleets are searched for; leave it out")
    question, workload = question_of(asked)
    finder = _Finder(question, workload)
    scales = []
    for done, number in enumerate(TIMES_ROWS):
        if progress is not None:
            progress(f"{number} x the rows", done, len(TIMES_ROWS))
        scales.append(finder.scale(number))
    if progress is not None:
        progress("", len(TIMES_ROWS), len(TIMES_ROWS))
    names = tuple(host.name for host in question.hosts)
    return Gain(
        asked=asked, workload=workload, hosts=names, has_trace=question.accesses is not None, scales=tuple(scales)
    )


class _Finder(NamedTuple):
    question: Question
    workload: Workload

    def scale(self, number: int) -> Scale:
        """With so many times the rows.

        Raises:
            ValueError: nothing meets the target with as many rows as asked about.
        """
        demand = self._demand(self.workload, number)
        grown = _grown(self.workload, number)
        own = _outcome(self.question, grown, demand)
        if own.tiers is None and number == 1:
            raise ValueError(own.no_tiers)
        cases = tuple(self._cases(number, demand))
        rows = sum(table.num_embeddings for table in grown.tables)
        return Scale(number, rows, grown.table_bytes, own, cases)

    def _demand(self, workload: Workload, number: int) -> Demand:
        if self.question.accesses is None:
            return self.question.demand(_grown(workload, number))
        found = self.question.demand(workload)
        return found if number == 1 else found.stretched(number)

    def _cases(self, number: int, demand: Demand) -> Iterator[Case]:
        for assumed in self.workload.assumed:
            for factor in FACTORS:
                other = times(self.workload, assumed, factor)
                own = demand if other.tables == self.workload.tables else self._demand(other, number)
                outcome = _outcome(self.question, _grown(other, number), own)
                yield Case(figure_name(assumed.figure), factor, outcome)
        spread, grown = self.question.asked.pricing.spread, _grown(self.workload, number)
        for what, priced in _PRICES.items() if spread else ():
            for factor in (1 - spread, 1 + spread):
                yield Case(what, factor, _outcome(priced(self.question, factor), grown, demand))


def _grown(workload: Workload, number: int) -> Workload:
    return workload if number == 1 else replace(scaled(workload, number), name=workload.name)


def _outcome(question: Question, workload: Workload, demand: Demand) -> Outcome:
    space = replace(question.asked.search, in_memory=True)
    in_memory = question._replace(asked=replace(question.asked, search=space))
    (memory, no_memory), (tiers, no_tiers) = (_cheapest(each, workload, demand) for each in (in_memory, question))
    return Outcome(memory, tiers, no_memory, no_tiers)


def _cheapest(question: Question, workload: Workload, demand: Demand) -> tuple[Fleet | None, str]:
    """Or why there is none."""
    try:
        return fleet_of(question.answer(workload, demand).best), ""
    except ValueError as error:
        return None, str(error)


# Prices that are off


def _of_hosts(change: Callable[[Host, float], Host]) -> Callable[[Question, float], Question]:
    def priced(question: Question, factor: float) -> Question:
        return question._replace(hosts=tuple(change(host, factor) for host in question.hosts))

    return priced


def _dearer(part: _Part, factor: float) -> _Part:
    return replace(part, usd=factor * part.usd)


def _dearer_memory(host: Host, factor: float) -> Host:
    return replace(host, ddr=_dearer(host.ddr, factor))


def _dearer_drives(host: Host, factor: float) -> Host:
    return replace(host, storage=tuple(_dearer(drive, factor) for drive in host.storage))


def _dearer_rest(host: Host, factor: float) -> Host:
    gpus = tuple(_dearer(gpu, factor) for gpu in host.accelerators)
    processor = replace(host.processor, usd=factor * host.processor.usd)
    return replace(_dearer(host, factor), processor=processor, accelerators=gpus)


def _dearer_power(question: Question, factor: float) -> Question:
    pricing = question.asked.pricing
    changed = replace(pricing, usd_per_kwh=factor * pricing.usd_per_kwh)
    return question._replace(asked=replace(question.asked, pricing=changed))


_PRICES: Final[dict[str, Callable[[Question, float], Question]]] = {
    "price of memory": _of_hosts(_dearer_memory),
    "price of SSDs": _of_hosts(_dearer_drives),
    "price of all other parts": _of_hosts(_dearer_rest),
    "price of power": _dearer_power,
}
