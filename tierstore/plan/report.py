"""A plan as text and as a page: the same sections, the answer first, and on the page its curves."""

import math
from itertools import pairwise
from typing import Final

import numpy as np

from ..report import Line, Section, Step, figure, page_of, text_of
from ..system.sizes import format_count, format_size
from .host import describe_setup, first_worn
from .loads import in_words
from .model import Prediction
from .planning import PlanResult, ShownCurve

_SCALES: Final = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"))
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MAX_NAME: Final = 60
_RULE: Final = "Lines work side by side, indented parts one after another: the longest line is the time."
_NEGLIGIBLE: Final = 1e-4  # of the samples a second: a gain of less is nothing
_POINTS: Final = 120
_ROWS: Final = ((1_000_000, "million row"), (1000, "thousand row"), (1, "row"))
_LEAST: Final = 1000  # of rows in what they are counted in


def significant(value: float, digits: int = 3) -> str:
    """A number with so many digits that count: 1234.5 -> "1,230", 0.012345 -> "0.0123"."""
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "unknown"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def count(value: float) -> str:
    """Whole below ten thousand or so, then scaled: 12345678 -> "12.3 M"."""
    for scale, unit in _SCALES:
        if abs(value) >= scale and math.isfinite(value):
            return significant(value / scale) + unit
    return f"{value:,.0f}" if abs(value) >= 100 and math.isfinite(value) else significant(value)


def duration(seconds: float) -> str:
    """In the largest unit of which there is one: 0.00123 -> "1.23 ms"."""
    for scale, unit in _DURATIONS:
        if abs(seconds) >= scale and math.isfinite(seconds):
            return f"{significant(seconds / scale)} {unit}"
    if not math.isfinite(seconds):
        return significant(seconds)
    return f"{significant(seconds * 1e9)} ns" if seconds else "0 s"


def share(part: float, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * part:.{digits}f} %"


def money(usd: float) -> str:
    return f"${usd:,.0f}" if abs(usd) >= 100 else f"${usd:,.2f}"


def watts(value: float) -> str:
    return f"{value:,.0f} W" if value < 10_000 else f"{significant(value / 1000)} kW"


def named(text: str) -> str:
    """A sentence whose words may be of a file: bounded, and without characters that a terminal would obey."""

    def word(each: str) -> str:
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in each[:_MAX_NAME])
        return shown + ("..." if len(each) > _MAX_NAME else "")

    return " ".join(map(word, text.split(" ")))


def sections_of(result: PlanResult) -> list[Section]:
    prediction = result.prediction
    step, terms = "step" if prediction.setup.workload.is_training else "query", result.asked.pricing
    workload, target = prediction.setup.workload, result.asked.target
    rows = sum(table.num_embeddings for table in workload.tables)
    use = f"training with {workload.optimizer}" if workload.is_training else "serving"
    tables = f"{format_count(len(workload.tables), 'table')}, {count(rows)} rows, {format_size(workload.table_bytes)}"
    asked = [
        f"{workload.name}: {tables} as {workload.dtype}; {use}, {workload.batch_samples:,} samples a {step}; on "
        f"{', '.join(result.hosts)}"
    ]
    if wanted := {key: value for key, value in vars(target).items() if value}:
        asked.append(f"target: {', '.join(f'{key} = {value:,g}' for key, value in wanted.items())}")
    money_terms = (
        f"money: hosts are bought over {terms.years:g} years, with power at ${terms.usd_per_kwh:g} a kWh, "
        f"{terms.pue:g} W of the building for each of theirs"
    )
    found = [
        Section("Answer", [_answer(result)]),
        Section("Warnings", [f"! {text}" for text in result.warnings]),
        Section("Asked", asked),
        Section("Assumed", [f"- {text}" for text in (*result.assumptions, money_terms)]),
        Section("Setups compared", *_compared(result), is_text_last=True),
        Section(f"Time of a {step}", [_RULE], _loads(prediction), is_text_last=True),
        Section("What more of one resource would bring", *_marginals(result)),
        Section(f"Tiers of a host, in one {step}", *_tiers(prediction)),
        Section("Figures come from", [f"- {text}" for text in result.sources]),
    ]
    return [
        each._replace(lines=list(map(named, each.lines)), table=[list(map(named, row)) for row in each.table])
        for each in found
        if each.lines or each.table
    ]


def _answer(result: PlanResult) -> str:
    """Samples a second; of serving what its queries wait."""
    found, price, latency = result.prediction, result.prediction.price, result.prediction.latency
    if latency is None:
        speed = f"{count(found.samples_per_s)} samples/s, {duration(found.step_s)} a step"
    elif math.isinf(latency.p99_s):
        speed = f"{count(latency.queries_per_s)} queries/s come faster than they are answered"
    else:
        waits = f"half of them within {duration(latency.p50_s)}, 99 % within {duration(latency.p99_s)}"
        speed = f"{count(latency.queries_per_s)} queries/s, {waits}"
    parts = [f"{describe_setup(found.setup)}: {speed}", f"bound by {in_words(found.bottleneck)}"]
    parts += [f"{money(price.usd)} to buy, {money(price.usd_a_month)} a month, {watts(price.watts)}", *result.marks]
    return "; ".join(parts)


def _compared(result: PlanResult) -> tuple[list[str], list[tuple[str, ...]]]:
    """The answer, the next best, those that fail, and the cheapest with every row in memory; and what binds each."""
    memory, found = result.in_memory, result.prediction
    others = [
        (each.setup, each.prediction, f"fails: {each.reason}" * bool(each.reason)) for each in result.alternatives
    ]
    if isinstance(memory, Prediction):
        others.append((memory.setup, memory, "all rows in memory"))
    speed = "samples/s" if found.latency is None else "99 % within"
    rows: list[tuple[str, ...]] = [("hosts", "DDR", "for rows", "SSDs", speed, "a month", "power", "bound by")]
    for setup, other, note in [(found.setup, found, ""), *others]:
        dtype = "" if setup.workload.dtype == found.setup.workload.dtype else f", {setup.workload.dtype}"
        parts = (format_size(setup.host.ddr.capacity_bytes), format_size(setup.ddr_bytes), str(len(setup.host.storage)))
        figures, bound = ("-", "-", "-"), note
        if other is not None:
            if other.latency is not None:
                speed = duration(other.latency.p99_s)
            else:  # of a server that fails before queries wait, there is no latency
                speed = count(other.samples_per_s) if found.latency is None else "-"
            figures = (speed, money(other.price.usd_a_month), watts(other.price.watts))
            bound = "; ".join(filter(None, (in_words(other.bottleneck), note)))
        rows.append((f"{setup.num_hosts} x {setup.host.name}{dtype}", *parts, *figures, bound))
    return [f"all rows in DDR or HBM: {memory}"] if isinstance(memory, str) else [], rows if others else []


def _loads(found: Prediction) -> list[tuple[str, ...]]:
    """Lanes that take time, the longest first, each with its resources, the longest first."""
    rows: list[tuple[str, ...]] = [("resource", "time", "of all", "work")]
    loads = {load.resource: load for load in found.loads if load.seconds}

    def row(name: str, seconds: float, work: str) -> tuple[str, ...]:
        return name, duration(seconds), share(seconds / found.step_s, 0), work

    for index, lane in enumerate(found.lanes):
        parts = sorted((loads[name] for name in lane.resources if name in loads), key=lambda load: -load.seconds)
        if len(parts) > 1:
            rows.append(row(in_words(lane.name), lane.seconds, ""))
        for rank, load in enumerate(parts):
            work = format_size(load.amount) if load.unit == "bytes" else f"{count(load.amount)} {load.unit}"
            work = "" if load.unit == "seconds" else work  # of waits there is none
            mark = " <- bottleneck" if index == rank == 0 else ""
            rows.append(row("  " * (len(parts) > 1) + in_words(load.resource), load.seconds, work + mark))
    return rows


def _marginals(result: PlanResult) -> tuple[list[str], list[tuple[str, ...]]]:
    """Those that bring something, the most first; of the others the names."""
    before, rows, rest = result.prediction.samples_per_s, [], []
    for gain in result.marginals:
        more = gain.samples_per_s
        if more <= _NEGLIGIBLE * before:
            rest.append(gain.resource)
            continue
        rows.append((gain.resource, gain.change, f"+{count(more)}", f"+{share(more / before, 2)}"))
    head = [("resource", "change", "samples/s", "of now")] if rows else []
    return [f"nothing: {', '.join(rest)}"] if rest else [], [*head, *rows]


def _tiers(prediction: Prediction) -> tuple[list[str], list[tuple[str, ...]]]:
    """SSD has every row, so it has no hit rate; the page cache is a line of its own where it has some."""
    rows: list[tuple[str, ...]] = [("tier", "capacity", "rows", "lookups", "hit rate")]
    for tier in prediction.tiers:
        size, lookups = format_size(tier.capacity_bytes), tier.lookups
        if tier.tier != "ssd":
            rows.append((tier.tier.upper(), size, count(tier.rows), count(lookups), share(tier.hit_rate, 2)))
            continue
        if lookups and tier.hit_rate:
            cache = format_size(prediction.setup.page_cache_bytes)
            rows.append(("page cache", cache, "-", count(lookups), share(tier.hit_rate, 2)))
            lookups *= 1 - tier.hit_rate
        rows.append(("SSD", size, count(tier.rows), count(lookups), "-"))
    if not (written := prediction.drive_writes_a_day):
        return [], rows
    rated = significant(first_worn(prediction.setup.host).drive_writes_a_day)
    return [f"the SSD that wears out first is written {significant(written)} times a day, rated for {rated}"], rows


def describe(result: PlanResult) -> str:
    """The answer, and what supports it, as text."""
    return text_of(sections_of(result))


def plan_page(result: PlanResult) -> str:
    """The same as a page, with the curves."""
    curves = [section for each in result.curves for section in _picture(each)]
    title = f"{named(result.prediction.setup.workload.name)}: a plan"
    return page_of(title, [*sections_of(result), *curves])


def _picture(shown: ShownCurve) -> list[Section]:
    """The curve, and a line up to it where the plan is."""
    curve = shown.curve
    top = max(int(curve.sizes[-1]), _POINTS)
    scale, over = next((each for each in _ROWS if top >= _LEAST * each[0]), _ROWS[-1])

    def percent(rows: float) -> float:
        return 100 * curve.miss_ratio(max(1.0, scale * rows))

    ends = np.linspace(0, top // scale, _POINTS + 1).astype(int).tolist()
    steps = [Step(before + 1, end, percent((before + end) / 2)) for before, end in pairwise(ends)]
    rows = round(min(max(shown.chosen_rows / scale, 1), ends[-1]))
    plan = [Step(rows, rows, value) for value in (0.0, percent(rows))]
    lines = [Line("missed", "c1", steps), Line("this plan", "mark", plan)]
    title = f"How often memory misses a row of a batch, by how many it has: {named(shown.name)}"
    return figure(title, lines, unit="%", low=0, over=over)
