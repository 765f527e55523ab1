"""Plans as text for a terminal, in 100 columns."""

from collections.abc import Sequence
from typing import Final

from ...system.sizes import format_size
from ..report.text import columns_of
from ..report.words import duration, named
from .plan import PlacementPlan
from .steps import Step

_PARTS_SHOWN: Final = 40
_NAME_CHARACTERS: Final = 28


def describe_comparison(plans: Sequence[PlacementPlan]) -> str:
    """One line a strategy, in their order."""
    rows = [("strategy", "machines", "fits", "step", "samples/s", "bottleneck", "note")]
    for plan in plans:
        machines, step = f"{plan.hosts}" + (f" + {plan.servers}" if plan.servers else ""), plan.step
        if step is None:
            rows.append((plan.strategy, machines, "no", "", "", "", plan.why))
            continue
        figures = (duration(step.step_s), f"{step.samples_per_s:,.0f}", step.bottleneck)
        rows.append((plan.strategy, machines, "yes" if plan.fits else "no", *figures, _lacks(plan)))
    return "\n".join(columns_of(rows))


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
    if plan.tiers:
        rows: list[tuple[str, ...]] = [("  memory", "for rows", "used", "free")]
        rows += [(f"  {tier}", *map(format_size, sizes)) for tier, *sizes in plan.tiers]
        lines += columns_of(rows)
    if plan.step is not None:
        lines += _loads(plan.step)
    return "\n".join(lines + _placed(plan))


def _loads(step: Step) -> list[str]:
    rows = [("  a step", "takes", "work")]
    for load in sorted(filter(lambda load: load.seconds, step.loads), key=lambda load: -load.seconds):
        mark = "  <- bottleneck" if load.resource == step.bottleneck else ""
        work = format_size(load.amount) if load.unit == "bytes" else f"{load.amount:,.3g} {load.unit}"
        rows.append((f"  {load.resource}", duration(load.seconds), work + mark))
    end = (
        f"  in all {duration(step.step_s)}: {step.samples_per_s:,.0f} samples/s; {duration(step.overlapped_s)} a step "
        "were everything overlapped"
    )
    return [*columns_of(rows), end]


def _placed(plan: PlacementPlan) -> list[str]:
    if not plan.parts:
        return []
    rows = [("  table", "in", "place", "rows", "columns", "size")]
    for table, tier, place, row, num_rows, column, num_columns, size in plan.parts[:_PARTS_SHOWN]:
        spans = (f"{row:,} - {row + num_rows - 1:,}", f"{column} - {column + num_columns - 1}")
        rows.append((f"  {named(table, _NAME_CHARACTERS)}", tier, f"{place}", *spans, format_size(size)))
    more = len(plan.parts) - _PARTS_SHOWN
    return [*columns_of(rows), *([f"  and {more:,} more parts"] if more > 0 else [])]
