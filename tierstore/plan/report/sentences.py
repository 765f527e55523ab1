"""The plan in sentences: what was asked, and the answer."""

import math

from ...system.sizes import format_size
from ..prediction import Prediction, Setup
from ..result import PlanResult
from .words import count, duration, money, named, resource, share, significant, watts

__all__ = ["answer", "asked", "speed", "summary_of", "targets", "within"]


def asked(result: PlanResult) -> str:
    """The workload, what is done with it, and on what."""
    setup = result.prediction.setup
    workload = setup.workload
    rows = sum(table.num_embeddings for table in workload.tables)
    use = f"training with {workload.optimizer}" if workload.is_training else "serving"
    tables = f"{_some(len(workload.tables), 'table')}, {count(rows)} rows, {format_size(workload.table_bytes)}"
    unit = "step" if workload.is_training else "query"
    return (
        f"{named(workload.name)}: {tables} as {workload.dtype}; {use}, {workload.batch_samples:,} samples a {unit}; "
        f"on {named(setup.host.name)}"
    )


def targets(result: PlanResult) -> str:
    """What was asked for; "" where nothing was."""
    target = result.asked.target
    parts = [f"{count(target.samples_per_s)} samples/s"] if target.samples_per_s else []
    parts += [f"{count(target.queries_per_s)} queries/s"] if target.queries_per_s else []
    parts += [f"{part} of queries within {significant(value)} ms" for part, value in _bounds(result) if value]
    parts += [f"at most {money(target.usd)}"] if target.usd else []
    parts += [f"at most {money(target.usd_a_month)} a month"] if target.usd_a_month else []
    parts += [f"at most {watts(target.watts)}"] if target.watts else []
    return ", ".join(parts)


def _bounds(result: PlanResult) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("99 %", result.asked.target.p99_ms), ("95 %", result.asked.target.p95_ms)


def summary_of(setup: Setup) -> str:
    """The setup's machines and budgets."""
    host = setup.host
    of_it = [f"{format_size(setup.ddr_bytes)} of it for {setup.workload.dtype} rows"]
    of_it += [f"{format_size(setup.page_cache_bytes)} page cache"] if setup.page_cache_bytes else []
    parts = [f"{format_size(host.ddr.capacity_bytes)} DDR, {', '.join(of_it)}"]
    if setup.hbm_bytes:
        parts.append(f"{_some(len(host.accelerators), 'GPU')}, {format_size(setup.hbm_bytes)} HBM of each for rows")
    parts += [_some(len(host.storage), "SSD")] if host.storage else []
    parts += [f"{setup.workers} workers"] if setup.workers > 1 else []
    return f"{setup.num_hosts:,} x {named(host.name)} ({'; '.join(parts)})"


def _some(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
        f"{summary_of(prediction.setup)}: {speed(prediction)}; bound by {resource(prediction.bottleneck)}; "
        f"{money(prediction.price.usd)} to buy, {money(prediction.price.usd_a_month)} a month"
    )


def within(result: PlanResult) -> str:
    """The share of rows that memory holds, for a reader who thinks in those."""
    setup = result.prediction.setup
    whole = setup.workload.table_bytes / setup.hosts
    return f"memory for {share(min(1.0, setup.ddr_bytes / whole))} of the bytes of all rows"
