"""Plans as text for a terminal, in 100 columns."""

from collections.abc import Sequence
from typing import Final

from ...system.sizes import format_size
from ..report.text import columns_of
from ..report.words import duration, named
from .plan import PlacementPlan

__all__ = ["describe_comparison", "describe_placement"]

_PARTS_SHOWN: Final = 40
_NAME_CHARACTERS: Final = 28


def describe_comparison(plans: Sequence[PlacementPlan]) -> str:
    """One line a strategy, in their order."""
    rows = [["strategy", "machines", "fits", "step", "samples/s", "bottleneck", "note"]]
    rows += [_compared(plan) for plan in plans]
    return "\n".join(columns_of(rows))


def _compared(plan: PlacementPlan) -> list[str]:
    machines = f"{plan.hosts}" + (f" + {plan.servers}" if plan.servers else "")
    if plan.step is None:
        return [plan.strategy, machines, "no", "", "", "", plan.why]
    fits = "yes" if plan.fits else "no"
    step = plan.step
    return [
        plan.strategy, machines, fits, duration(step.step_s), f"{step.samples_per_s:,.0f}", step.bottleneck,
        _lacks(plan),
    ]  # fmt: skip


def _lacks(plan: PlacementPlan) -> str:
    if plan.fits:
        return ""
    what = f"lacks {format_size(plan.missing_bytes)}" if plan.missing_bytes else plan.why
    would = "servers" if plan.strategy == "remote" else "hosts"
    return f"{what}; {plan.hosts_needed:,} {would} would do" if plan.hosts_needed else what


def describe_placement(plan: PlacementPlan) -> str:
    """What is where, how full each memory is, and what a step takes."""
    machines = f"{plan.hosts} x {plan.host}" + (f", {plan.servers} more as servers" if plan.servers else "")
    lines = [f"{plan.strategy}: {named(plan.workload)} on {machines}"]
    lines += [f"  does not fit: {plan.why}; {_lacks(plan)}"] if not plan.fits else []
    lines += _tiers(plan)
    if plan.step is not None:
        lines += _loads(plan)
    return "\n".join(lines + _placed(plan))


def _tiers(plan: PlacementPlan) -> list[str]:
    rows = [["  memory", "for rows", "used", "free"]]
    rows += [
        [f"  {tier.tier}", *(format_size(size) for size in (tier.capacity_bytes, tier.used_bytes, tier.free_bytes))]
        for tier in plan.tiers
    ]
    return columns_of(rows) if plan.tiers else []


def _loads(plan: PlacementPlan) -> list[str]:
    step = plan.step
    assert step is not None
    rows = [["  a step", "takes", "work"]]
    for load in sorted(filter(lambda load: load.seconds, step.loads), key=lambda load: -load.seconds):
        mark = "  <- bottleneck" if load.resource == step.bottleneck else ""
        work = format_size(load.amount) if load.unit == "bytes" else f"{load.amount:,.3g} {load.unit}"
        rows.append([f"  {load.resource}", duration(load.seconds), work + mark])
    end = (
        f"  in all {duration(step.step_s)}: {step.samples_per_s:,.0f} samples/s; {duration(step.overlapped_s)} a step "
        "were everything overlapped"
    )
    return [*columns_of(rows), end]


def _placed(plan: PlacementPlan) -> list[str]:
    rows = [["  table", "in", "place", "rows", "columns", "size"]]
    for part in plan.parts[:_PARTS_SHOWN]:
        first, last = part.first_row, part.first_row + part.num_rows - 1
        columns = f"{part.first_column} - {part.first_column + part.num_columns - 1}"
        size = format_size(part.size_bytes)
        rows.append(
            [
                f"  {named(part.table, _NAME_CHARACTERS)}",
                part.tier,
                f"{part.place}",
                f"{first:,} - {last:,}",
                columns,
                size,
            ]
        )
    more = len(plan.parts) - _PARTS_SHOWN
    return ([*columns_of(rows), f"  and {more:,} more parts"] if more > 0 else columns_of(rows)) if plan.parts else []
