"""Figures as people read them, and the plan in sentences: what was asked, and the answer."""

import math
from collections.abc import Callable
from typing import Final

from ...system.sizes import format_size
from ..assumptions import Fleet, WhatIf, describe_setup, machines_of
from ..gain import Span
from ..plan_file import PlanFile
from ..prediction import Prediction, Setup, in_words, some
from ..result import PlanResult
from ..workload import Workload

__all__ = [
    "answer",
    "asked",
    "count",
    "duration",
    "gain_lines",
    "if_off",
    "in_words",
    "money",
    "named",
    "named_words",
    "quantity",
    "resource",
    "sentence",
    "share",
    "significant",
    "speed",
    "summary_of",
    "targets",
    "watts",
    "within",
]

_SCALES: Final = ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"))
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_MAX_NAME: Final = 60
_RESOURCES: Final = {"hbm": "HBM", "ddr": "DDR", "ssd": "SSD", "pcie": "PCIe"}


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
    if not math.isfinite(seconds):
        return significant(seconds)
    for scale, unit in _DURATIONS:
        if abs(seconds) >= scale:
            return f"{significant(seconds / scale)} {unit}"
    return f"{significant(seconds * 1e9)} ns" if seconds else "0 s"


def share(part: float, digits: int = 1) -> str:
    """0.1234 -> "12.3 %"."""
    return f"{100 * part:.{digits}f} %"


def money(usd: float) -> str:
    """US dollars."""
    return f"${usd:,.0f}" if abs(usd) >= 100 else f"${usd:,.2f}"


def watts(value: float) -> str:
    return f"{value:,.0f} W" if value < 10_000 else f"{significant(value / 1000)} kW"


def quantity(value: float, unit: str) -> str:
    """An amount with its unit; bytes are scaled as sizes are."""
    if unit == "bytes":
        return format_size(value)
    return f"{count(value)} {unit}" if unit else count(value)


def named(text: str, most: int = _MAX_NAME) -> str:
    """A name that a file gave: bounded, and without characters that a terminal would obey."""
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:most])
    return shown + ("..." if len(text) > most else "")


def named_words(text: str) -> str:
    """A sentence that may hold names that a file gave."""
    return " ".join(named(word) for word in text.split(" "))


def resource(name: str) -> str:
    """Of something that can be had more of, with its abbreviations as they are written: "page cache", "DDR"."""
    return " ".join(_RESOURCES.get(word, word) for word in name.split(" "))


def sentence(text: str) -> str:
    """With a capital."""
    return text[:1].upper() + text[1:]


def asked(workload: Workload, hosts: str) -> str:
    """The workload, what is done with it, and on what."""
    rows = sum(table.num_embeddings for table in workload.tables)
    use = f"training with {workload.optimizer}" if workload.is_training else "serving"
    tables = f"{some(len(workload.tables), 'table')}, {count(rows)} rows, {format_size(workload.table_bytes)}"
    unit = "step" if workload.is_training else "query"
    return (
        f"{named(workload.name)}: {tables} as {workload.dtype}; {use}, {workload.batch_samples:,} samples a {unit}; "
        f"on {named_words(hosts)}"
    )


def targets(asked: PlanFile) -> str:
    """What was asked for; "" where nothing was."""
    target = asked.target
    parts = [f"{count(target.samples_per_s)} samples/s"] if target.samples_per_s else []
    parts += [f"{count(target.queries_per_s)} queries/s"] if target.queries_per_s else []
    parts += [f"{part} of queries within {significant(value)} ms" for part, value in _bounds(asked) if value]
    parts += [f"at most {money(target.usd)}"] if target.usd else []
    parts += [f"at most {money(target.usd_a_month)} a month"] if target.usd_a_month else []
    parts += [f"at most {watts(target.watts)}"] if target.watts else []
    return ", ".join(parts)


def _bounds(asked: PlanFile) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("99 %", asked.target.p99_ms), ("95 %", asked.target.p95_ms)


def summary_of(setup: Setup) -> str:
    """``describe_setup``, bounded."""
    return named_words(describe_setup(setup))


def speed(prediction: Prediction) -> str:
    """Samples a second; of serving what its queries wait."""
    latency = prediction.latency
    if latency is None:
        return f"{count(prediction.samples_per_s)} samples/s, {duration(prediction.step_s)} a step"
    if math.isinf(latency.p99_s):
        return f"{count(latency.queries_per_s)} queries/s come faster than they are answered"
    return (
        f"{count(latency.queries_per_s)} queries/s, half of them within {duration(latency.p50_s)}, "
        f"99 % within {duration(latency.p99_s)}"
    )


def answer(result: PlanResult) -> str:
    """One sentence."""
    prediction = result.prediction
    return (
        f"{summary_of(prediction.setup)}: {speed(prediction)}; bound by {in_words(prediction.bottleneck)}; "
        f"{money(prediction.price.usd)} to buy, {money(prediction.price.usd_a_month)} a month"
        + "".join(f"; {text}" for text in result.marks)
    )


def if_off(result: PlanResult, found: WhatIf) -> str:
    """The answer, were an assumption off."""
    fleet = found.fleet
    if fleet is None:
        return named_words(found.reason)
    speed_then = f"{count(fleet.samples_per_s)} samples/s"
    if fleet.p99_s is not None:
        speed_then = f"99 % within {duration(fleet.p99_s)}"
    is_same = fleet.machines == machines_of(result.prediction.setup)
    machines = "the same machines" if is_same else named_words(fleet.machines)
    price = "" if is_same else f"; {money(fleet.usd)} to buy, {money(fleet.usd_a_month)} a month"
    return f"{machines}: {speed_then}; bound by {in_words(fleet.bottleneck)}{price}"


def gain_lines(result: PlanResult) -> list[str]:
    """What the answer saves beside the cheapest fleet that has every row in memory; none where that is not asked."""
    gain = result.gain
    if gain is None:
        return []
    if gain.memory is None:
        return [f"all rows in DDR or HBM: {named_words(gain.reason)}"]
    memory, month, power = gain.memory, gain.usd_a_month, gain.watts
    assert month is not None
    assert power is not None
    if not month.high and not month.low:
        return [f"all rows in DDR or HBM: {_fleet(memory)}", "this plan saves nothing beside it"]
    saved = f"{_saved(month, memory.usd_a_month, money, ' a month')} and {_saved(power, memory.watts, watts)}"
    return [f"all rows in DDR or HBM: {_fleet(memory)}", f"this plan saves {saved}"]


def _fleet(fleet: Fleet) -> str:
    price = f"{money(fleet.usd_a_month)} a month, {watts(fleet.watts)}"
    return f"{named_words(fleet.machines)}: {price}; bound by {in_words(fleet.bottleneck)}"


def _saved(span: Span, whole: float, shown: Callable[[float], str], unit: str = "") -> str:
    low, own, high = map(shown, span)
    off = "" if low == high else f"; {low} to {high} if an input is off"
    return f"{own}{unit} ({share(span.own / (whole or 1.0), 0)}{off})"


def within(result: PlanResult) -> str:
    """The share of rows that memory holds, for a reader who thinks in those."""
    setup = result.prediction.setup
    whole = setup.workload.table_bytes / setup.hosts
    memory = setup.ddr_bytes + setup.hbm_bytes * len(setup.host.accelerators)
    return f"memory for {share(min(1.0, memory / whole))} of the bytes of all rows"
