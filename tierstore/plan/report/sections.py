"""What a report says, section by section: the terminal and the page show the same."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

from ...system.sizes import format_size
from ..planning import PlanResult
from ..prediction import Prediction, describe_setup, first_worn, in_words, machines_of, some
from ..what_if import FACTORS, Instead

_SCALES: Final = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"))
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MAX_NAME: Final = 60
_RESOURCES: Final = {"hbm": "HBM", "ddr": "DDR", "ssd": "SSD", "pcie": "PCIe"}
_RULE: Final = (
    "Bars run side by side, the parts of one bar one after another; so the longest bar is the time taken, and its "
    "longest part is the bottleneck."
)
_BAR: Final = 20
_SHOWN: Final = 20
_NEGLIGIBLE: Final = 1e-4  # of the samples a second: a gain of less is nothing


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


def quantity(value: float, unit: str) -> str:
    """An amount with its unit; bytes are scaled as sizes are."""
    return format_size(value) if unit == "bytes" else f"{count(value)} {unit}"


def named(text: str) -> str:
    """A sentence whose words may be of a file: bounded, and without characters that a terminal would obey."""

    def word(each: str) -> str:
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in each[:_MAX_NAME])
        return shown + ("..." if len(each) > _MAX_NAME else "")

    return " ".join(map(word, text.split(" ")))


def resource(name: str) -> str:
    """With its abbreviations as they are written: "page cache", "DDR"."""
    return " ".join(_RESOURCES.get(word, word) for word in name.split(" "))


class Section(NamedTuple):
    """A table of texts, its columns first, and sentences below it; not escaped. ``is_text_last``: its last column."""

    title: str
    lines: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    is_text_last: bool = False


def sections_of(result: PlanResult) -> list[Section]:
    step = "step" if result.prediction.setup.workload.is_training else "query"
    found = [
        Section("Asked", list(_asked(result, step))),
        Section("Assumed, as nobody said it", list(_assumed(result))),
        Section("Answer", [_answer(result)]),
        Section("Warnings", [f"! {text}" for text in result.warnings]),
        Section(f"Tiers of a host, in one {step}", (), _tiers(result)),
        Section(f"Time of a {step}", [_RULE], _loads(result.prediction), is_text_last=True),
        Section("Compared with all rows in memory", list(_in_memory(result))),
        _marginals(result),
        Section("Next best, and what fails", list(_alternatives(result))),
        _price(result),
        Section("Drives", list(_wear(result.prediction))),
        Section("Figures come from", [f"- {text}" for text in result.sources]),
        Section("Not modelled", [f"- {text}" for text in result.prediction.not_modelled]),
    ]
    return [
        each._replace(lines=list(map(named, each.lines)), table=[list(map(named, row)) for row in each.table])
        for each in found
        if each.lines or each.table
    ]


def _asked(result: PlanResult, step: str) -> Iterator[str]:
    workload, target = result.prediction.setup.workload, result.asked.target
    rows = sum(table.num_embeddings for table in workload.tables)
    use = f"training with {workload.optimizer}" if workload.is_training else "serving"
    tables = f"{some(len(workload.tables), 'table')}, {count(rows)} rows, {format_size(workload.table_bytes)}"
    yield (
        f"{workload.name}: {tables} as {workload.dtype}; {use}, {workload.batch_samples:,} samples a {step}; on "
        f"{', '.join(result.hosts)}"
    )
    wanted = (
        (target.samples_per_s, "{} samples/s", count),
        (target.queries_per_s, "{} queries/s", count),
        (target.p99_ms, "99 % of queries within {} ms", significant),
        (target.p95_ms, "95 % of queries within {} ms", significant),
        (target.usd, "at most {}", money),
        (target.usd_a_month, "at most {} a month", money),
        (target.watts, "at most {}", watts),
    )
    parts = [text.format(shown(value)) for value, text, shown in wanted if value]
    if parts:
        yield f"target: {', '.join(parts)}"


def _assumed(result: PlanResult) -> Iterator[str]:
    """Each with what the answer becomes if it is off, and how to say it."""
    for each in result.assumptions:
        key = "workload.dense_flops, or a run file" if each.figure == "dense_flops" else f"{each.figure}, or a trace"
        yield f"- {each.text}; or give {key}"
        for factor, found in zip(FACTORS, each.what_if, strict=True):
            yield f"  - if it is {factor:g} times that, {_if_off(result, found)}"


def _if_off(result: PlanResult, found: Instead) -> str:
    other = found.prediction
    if other is None:
        return found.reason
    machines, latency = machines_of(other.setup), other.latency
    speed = f"{count(other.samples_per_s)} samples/s" if latency is None else f"99 % within {duration(latency.p99_s)}"
    bound = f"{speed}; bound by {in_words(other.bottleneck)}"
    if machines == machines_of(result.prediction.setup):
        return f"the same machines: {bound}"
    return f"{machines}: {bound}; {money(other.price.usd)} to buy, {money(other.price.usd_a_month)} a month"


def _speed(prediction: Prediction) -> str:
    """Samples a second; of serving what its queries wait."""
    latency = prediction.latency
    if latency is None:
        return f"{count(prediction.samples_per_s)} samples/s, {duration(prediction.step_s)} a step"
    queries = f"{count(latency.queries_per_s)} queries/s"
    if math.isinf(latency.p99_s):
        return f"{queries} come faster than they are answered"
    return f"{queries}, half of them within {duration(latency.p50_s)}, 99 % within {duration(latency.p99_s)}"


def _answer(result: PlanResult) -> str:
    found, price = result.prediction, result.prediction.price
    parts = [f"{describe_setup(found.setup)}: {_speed(found)}", f"bound by {in_words(found.bottleneck)}"]
    parts += [f"{money(price.usd)} to buy, {money(price.usd_a_month)} a month, {watts(price.watts)}", *result.marks]
    return "; ".join(parts)


def _tiers(result: PlanResult) -> list[tuple[str, ...]]:
    """SSD has every row, so it has no hit rate; the page cache is a line of its own where it has some."""
    rows: list[tuple[str, ...]] = [("tier", "capacity", "rows", "lookups", "hit rate")]
    for tier in result.prediction.tiers:
        size, lookups = format_size(tier.capacity_bytes), tier.lookups
        if tier.tier != "ssd":
            rows.append((tier.tier.upper(), size, count(tier.rows), count(lookups), share(tier.hit_rate, 2)))
            continue
        if lookups and tier.hit_rate:
            cache = format_size(result.prediction.setup.page_cache_bytes)
            rows.append(("page cache", cache, "-", count(lookups), share(tier.hit_rate, 2)))
            lookups *= 1 - tier.hit_rate
        rows.append(("SSD", size, count(tier.rows), count(lookups), "-"))
    return rows


def _loads(found: Prediction) -> list[tuple[str, ...]]:
    """Lanes that take time, the longest first, each with its resources, the longest first; and bars."""
    loads = {load.resource: load for load in found.loads if load.seconds}
    rows: list[tuple[str, ...]] = [("resource", "time", "work", "")]

    def bar(seconds: float, mark: str) -> str:
        return mark * round(_BAR * seconds / found.lanes[0].seconds)

    for index, lane in enumerate(found.lanes):
        busy = sorted((loads[name] for name in lane.resources if name in loads), key=lambda load: -load.seconds)
        indent, mark = ("  ", "-") if len(busy) > 1 else ("", "#")
        if len(busy) > 1:
            rows.append((in_words(lane.name), duration(lane.seconds), "", bar(lane.seconds, "#")))
        for rank, load in enumerate(busy):
            work = "" if load.unit == "seconds" else quantity(load.amount, load.unit)  # of waits there is none
            drawn = bar(load.seconds, mark) + (" <- bottleneck" if index == rank == 0 else "")
            rows.append((indent + in_words(load.resource), duration(load.seconds), work, drawn))
    return rows


def _in_memory(result: PlanResult) -> Iterator[str]:
    """What the answer saves compared with the cheapest fleet that has every row in memory."""
    own, found = result.prediction.price, result.in_memory
    if found is None:
        return
    if found.prediction is None:
        yield f"all rows in DDR or HBM: {found.reason}"
        return
    memory, price = found.prediction, found.prediction.price
    fleet = f"{machines_of(memory.setup)}: {money(price.usd_a_month)} a month, {watts(price.watts)}"
    month, power = price.usd_a_month - own.usd_a_month, price.watts - own.watts
    shares = share(month / (price.usd_a_month or 1.0), 0), share(power / (price.watts or 1.0), 0)
    yield f"all rows in DDR or HBM: {fleet}; bound by {in_words(memory.bottleneck)}"
    yield f"this plan saves {money(month)} a month ({shares[0]}) and {watts(power)} ({shares[1]})"


def _marginals(result: PlanResult) -> Section:
    """Those that bring something, the most first; of the others the names."""
    now, rows, rest = result.prediction.samples_per_s, [], []
    for gain in result.marginals:
        more = gain.samples_per_s
        if more <= _NEGLIGIBLE * now:
            rest.append(resource(gain.resource))
            continue
        usd = "-" if gain.usd is None else money(gain.usd)
        rows.append((resource(gain.resource), gain.change, f"+{count(more)}", f"+{share(more / now, 2)}", usd))
    head = [("resource", "change", "samples/s", "of now", "USD")] if rows else []
    lines = [f"nothing: {', '.join(rest)}"] if rest else []
    return Section("What more of one resource would bring", lines, [*head, *rows])


def _alternatives(result: PlanResult) -> Iterator[str]:
    for each in result.alternatives[:_SHOWN]:
        found = each.prediction
        known = "" if found is None else f": {_speed(found)}; {money(found.price.usd_a_month)} a month"
        reason = f"; fails: {each.reason}" if each.reason else ""
        yield f"- {describe_setup(each.setup)}{known}{reason}"


def _price(result: PlanResult) -> Section:
    found, price, pricing = result.prediction.setup, result.prediction.price, result.asked.pricing
    host, rows = found.host, [("part", "count", "USD", "power")]
    parts: list[tuple[str, Any]] = [("processors", host.processor), ("memory", host.ddr)]
    parts += [("GPU", gpu) for gpu in host.accelerators] + [("SSD", drive) for drive in host.storage]
    for (name, part), alike in groupby([*parts, ("board, case, power supply", host)]):
        number = found.num_hosts * len(list(alike))
        rows.append((name, f"{number:,}", money(number * part.usd), watts(number * part.watts)))
    rows.append(("all", "", money(price.usd), watts(price.watts)))
    terms = f"bought over {pricing.years:g} years, with power at ${pricing.usd_per_kwh:g} a kWh"
    return Section("Price", [f"{money(price.usd_a_month)} a month, {terms}"], rows)


def _wear(found: Prediction) -> Iterator[str]:
    if written := found.drive_writes_a_day:
        rated = first_worn(found.setup.host).drive_writes_a_day
        yield f"the first to wear out is written {significant(written)} times a day, rated for {significant(rated)}"
