"""Plans as text for a terminal, in 100 columns."""

from collections.abc import Sequence
from typing import Final

from ...system.sizes import format_size
from .plan import PlacementPlan
from .sharding import ShardPlan

__all__ = ["describe_comparison", "describe_placement", "describe_shards"]

_PARTS_SHOWN: Final = 40
_NAME_CHARACTERS: Final = 28


def describe_comparison(plans: Sequence[PlacementPlan]) -> str:
    """One line a strategy, in their order."""
    rows = [["strategy", "machines", "fits", "step", "samples/s", "bottleneck", "note"]]
    rows += [_compared(plan) for plan in plans]
    return "\n".join(_aligned(rows))


def _compared(plan: PlacementPlan) -> list[str]:
    machines = f"{plan.hosts}" + (f" + {plan.servers}" if plan.servers else "")
    if plan.step is None:
        return [plan.strategy, machines, "no", "", "", "", plan.why]
    fits = "yes" if plan.fits else "no"
    step = plan.step
    return [
        plan.strategy, machines, fits, _seconds(step.step_s), f"{step.samples_per_s:,.0f}", step.bottleneck,
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
    lines = [f"{plan.strategy}: {_short(plan.workload, 40)} on {machines}"]
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
    return _aligned(rows) if plan.tiers else []


def _loads(plan: PlacementPlan) -> list[str]:
    step = plan.step
    assert step is not None
    rows = [["  a step", "takes", "work"]]
    for load in sorted(filter(lambda load: load.seconds, step.loads), key=lambda load: -load.seconds):
        mark = "  <- bottleneck" if load.resource == step.bottleneck else ""
        work = format_size(load.amount) if load.unit == "bytes" else f"{load.amount:,.3g} {load.unit}"
        rows.append([f"  {load.resource}", _seconds(load.seconds), work + mark])
    end = (
        f"  in all {_seconds(step.step_s)}: {step.samples_per_s:,.0f} samples/s; {_seconds(step.overlapped_s)} a step "
        "were everything overlapped"
    )
    return [*_aligned(rows), end]


def _placed(plan: PlacementPlan) -> list[str]:
    rows = [["  table", "in", "place", "rows", "columns", "size"]]
    for part in plan.parts[:_PARTS_SHOWN]:
        first, last = part.first_row, part.first_row + part.num_rows - 1
        columns = f"{part.first_column} - {part.first_column + part.num_columns - 1}"
        size = format_size(part.size_bytes)
        rows.append([f"  {_short(part.table)}", part.tier, f"{part.place}", f"{first:,} - {last:,}", columns, size])
    more = len(plan.parts) - _PARTS_SHOWN
    return ([*_aligned(rows), f"  and {more:,} more parts"] if more > 0 else _aligned(rows)) if plan.parts else []


def describe_shards(plan: ShardPlan) -> str:
    """Cost and bytes of each device, and which tables were split."""
    lines = [
        f"{plan.num_devices} devices, {len(plan.parts):,} parts: the busiest takes {_seconds(plan.cost_s)}, "
        f"{plan.balance:.3f} times the mean; at most {plan.gap:.1%} above the least possible",
    ]
    rows = [["  device", "cost", "rows take", "of", "parts"]]
    counts = [sum(part.device == device for part in plan.parts) for device in range(plan.num_devices)]
    for device in range(min(plan.num_devices, _PARTS_SHOWN)):
        cost, used = float(plan.device_costs_s[device]), format_size(int(plan.device_bytes[device]))
        rows.append([f"  {device}", _seconds(cost), used, format_size(plan.budget_bytes), f"{counts[device]}"])
    lines += _aligned(rows)
    if plan.num_devices > _PARTS_SHOWN:
        lines.append(f"  and {plan.num_devices - _PARTS_SHOWN:,} more devices")
    lines += [
        f"  table {_short(each.table)} is split by {each.kind} into {each.parts}: {each.why}"
        for each in plan.split_tables[:_PARTS_SHOWN]
    ]
    return "\n".join(lines)


def _short(name: str, limit: int = _NAME_CHARACTERS) -> str:
    """A name from a file, which a terminal must not obey."""
    shown = "".join(each if each.isprintable() else "?" for each in name[:limit])
    return shown + ("..." if len(name) > limit else "")


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1:
            return f"{value * scale:,.3g} {unit}"
    return f"{value * 1e9:,.3g} ns"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the last as it is, those between to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *middle, last in rows:
        cells = [cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells, last]).rstrip())
    return lines
