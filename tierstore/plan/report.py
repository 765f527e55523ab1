"""A plan as text and as a page: the same sections, the answer first, and on the page its curves."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from ..report import Line, Section, Step, figure, page_of, text_of
from ..system.sizes import format_count, format_size
from .host import describe_setup
from .loads import in_words
from .model import Prediction
from .planning import PlanResult, ShownCurve

_SCALES: Final = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1.0, ""))
_DURATIONS: Final = ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns"))
_MAX_NAME: Final = 60
_RULE: Final = "Lines work side by side, indented parts one after another: the longest line is the time."
_NEGLIGIBLE: Final = 1e-4  # of the samples a second: a gain of less is nothing
_POINTS: Final = 120
BRIEF: Final = ("Answer", "Warnings", "Asked", "Machines", "Assumed")
"""Sections without details."""
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
    return f"{value:,.0f}" if 100 <= abs(value) < 1e6 else _scaled(value, _SCALES)


def duration(seconds: float) -> str:
    """In the largest unit of which there is one: 0.00123 -> "1.23 ms"."""
    return _scaled(seconds, _DURATIONS) if seconds else "0 s"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return significant(value)
    scale, unit = next((each for each in units if abs(value) >= each[0]), units[-1])
    return f"{significant(value / scale)}{unit}"


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
    """Those of ``BRIEF`` first, which are all there is where nothing fits a host."""
    prediction, workload, target = result.prediction, result.attempts[0].setup.workload, result.asked.target
    step = "step" if workload.is_training else "query"
    rows = sum(table.num_embeddings for table in workload.tables)
    use = f"training with {workload.optimizer}" if workload.is_training else "serving"
    tables = f"{format_count(len(workload.tables), 'table')}, {count(rows)} rows, {format_size(workload.table_bytes)}"
    asked = [
        f"{workload.name}: {tables} as {workload.dtype}; {use}, {format_count(workload.batch_samples, 'sample')} a "
        f"{step}; on {', '.join(result.hosts)}"
    ]
    if wanted := {key: value for key, value in vars(target).items() if value}:
        asked.append(f"target: {', '.join(f'{key} = {value:,g}' for key, value in wanted.items())}")
    answer = result.missed or (_answer(prediction) if prediction is not None else "")
    found = [
        Section("Answer", [answer]),
        Section("Warnings", [f"! {text}" for text in result.warnings]),
        Section("Asked", asked),
        Section("Machines", *_machines(result), is_text_last=True),
        Section("Assumed", [], [("set by --set", ""), *result.assumptions], is_text_last=True),
    ]
    if prediction is not None:
        process = "rank" if prediction.setup.rank_costs else "host"
        found += [
            Section(f"Time of a {step}", [_RULE], _loads(prediction), is_text_last=True),
            Section("What more of one resource would bring", *_marginals(result, prediction)),
            Section(f"Tiers of a {process}, in one {step}", *_tiers(prediction)),
        ]
    found.append(Section("Figures come from", [f"- {text}" for text in result.sources]))
    return [
        each._replace(lines=list(map(named, each.lines)), table=[list(map(named, row)) for row in each.table])
        for each in found
        if each.lines or each.table
    ]


def _answer(found: Prediction) -> str:
    """Samples a second; of serving what its queries wait."""
    price, latency = found.price, found.latency
    if latency is None:
        step = "step" if found.setup.workload.is_training else "query"
        speed = f"{count(found.samples_per_s)} samples/s, {duration(found.step_s)} a {step}"
    elif math.isinf(latency.p99_s):
        speed = f"{count(latency.queries_per_s)} queries/s come faster than they are answered"
    else:
        waits = f"half of them within {duration(latency.p50_s)}, 99 % within {duration(latency.p99_s)}"
        speed = f"{count(latency.queries_per_s)} queries/s, {waits}"
    parts = [f"{describe_setup(found.setup)}: {speed}", f"bound by {in_words(found.bottleneck)}"]
    parts += [f"{money(price.usd)} to buy, {money(price.usd_a_month)} a month, {watts(price.watts)}"]
    return "; ".join(parts)


def _machines(result: PlanResult) -> tuple[list[str], list[tuple[str, ...]]]:
    """The cheapest of each host, or the nearest, and of all with every row in memory; what binds each, and below what
    each lacks."""
    if result.asked.is_fixed:
        return [], []
    is_training = result.attempts[0].setup.workload.is_training
    speed = "samples/s" if is_training else "99 % within"
    rows: list[tuple[str, ...]] = [("machines", "DDR", "workers", speed, "to buy", "power", "bound by")]
    lines, memory = [], result.in_memory
    for each in (*result.attempts, *((memory,) if memory is not None and not memory.reason else ())):
        setup, found = each.setup, each.prediction
        name = f"{setup.hosts} x {setup.host.name}"
        name += "" if setup.workload.dtype == result.attempts[0].setup.workload.dtype else f", {setup.workload.dtype}"
        parts = (format_size(setup.host.ddr.capacity_bytes), str(setup.workers))
        figures, bound = ("-", "-", "-"), ["does not fit"]
        if found is not None:
            price, bound = found.price, [in_words(found.bottleneck)]
            reached = count(found.samples_per_s) if is_training else "-"  # one that fails before queries wait
            reached = reached if found.latency is None else duration(found.latency.p99_s)
            figures = (reached, money(price.usd), watts(price.watts))
            bound += ["misses"] if each.reason else ["all in memory"] if each is memory else []
        rows.append((name, *parts, *figures, ", ".join(bound)))
        lines += [f"! {name}: {each.reason}"] if each.reason else []
    lines += [f"! all rows in DDR or HBM: {memory.reason}"] if memory is not None and memory.reason else []
    return lines, rows


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


def _marginals(result: PlanResult, found: Prediction) -> tuple[list[str], list[tuple[str, ...]]]:
    """Those that bring something, the most first; of the others the names."""
    before, rows, rest = found.samples_per_s, [], []
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
    written, rated = map(significant, prediction.wear[:2])
    text = f"the SSD that wears out first is written {written} times a day, rated for {rated}"
    return [text] if prediction.wear.writes_a_day else [], rows


def describe(result: PlanResult, *, details: bool = True) -> str:
    """The answer and what it assumes, as text; with ``details`` also what supports it."""
    return text_of([each for each in sections_of(result) if details or each.title in BRIEF])


def plan_page(result: PlanResult) -> str:
    """The same as a page, with the curves."""
    curves = [section for each in result.curves for section in _picture(each)]
    title = f"{named(result.attempts[0].setup.workload.name)}: a plan"
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
