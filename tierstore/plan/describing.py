"""Workloads as text: a line for people, and the file that ``presets.load_workload`` reads."""

from dataclasses import fields

from ..settings.sections import toml_value
from ..system.sizes import format_size
from .workload import TableShape, Workload

__all__ = ["describe_workload", "workload_toml"]


def describe_workload(workload: Workload) -> str:
    """One line."""
    rows = sum(table.num_embeddings for table in workload.tables)
    ids = sum(table.pooling_factor for table in workload.tables)
    dims = sorted({table.embedding_dim for table in workload.tables})
    widths = f"{dims[0]}" if len(dims) == 1 else f"{dims[0]} to {dims[-1]}"
    return (
        f"{workload.name}: {len(workload.tables)} tables, {rows:,} rows of {widths} columns, "
        f"{format_size(workload.table_bytes)}, {ids:g} lookups a sample, {workload.dense_flops / 1e6:g} Mflop a sample"
    )


def workload_toml(workload: Workload) -> str:
    """TOML: ``[workload]``, and a ``[[table]]`` for each."""
    lines = ["[workload]"]
    lines += [
        f"{each.name} = {toml_value(getattr(workload, each.name))}"
        for each in fields(Workload)
        if each.name != "tables"
    ]
    for table in workload.tables:
        lines += ["", "[[table]]"]
        lines += [f"{each.name} = {toml_value(getattr(table, each.name))}" for each in fields(TableShape)]
    return "\n".join(lines) + "\n"
