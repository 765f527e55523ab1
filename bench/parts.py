"""A benchmark of several parts: each figures that are measured, and what is told of them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .common import Goal, Report, Run, Table

__all__ = ["Part", "Told", "run_parts"]


@dataclass(kw_only=True)
class Told:
    """A part's share of the report."""

    tables: list[Table]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Part(NamedTuple):
    """Attributes:
    measure: given the request and the figures of other parts, by their names; returns figures ready for JSON.
    tell: given those figures.
    """

    measure: Callable[[Run, dict[str, Any]], dict[str, Any]]
    tell: Callable[[dict[str, Any]], Told]


def run_parts(request: Run, question: str, parts: Mapping[str, Part]) -> Report:
    """Measure the parts that are asked for; the figures of the others stay as they are in the report's file.

    The report is saved after each part, so that one that fails costs none before it.
    """
    figures: dict[str, Any] = dict(request.earlier)
    for name in request.parts or tuple(parts):
        print(f"--- {name}", flush=True)
        start = time.perf_counter()
        found = parts[name].measure(request, figures)
        figures[name] = found | {"measured_seconds": round(time.perf_counter() - start, 1)}
        request.save(_told(question, parts, figures))
    return _told(question, parts, figures)


def _told(question: str, parts: Mapping[str, Part], measured: Mapping[str, Any]) -> Report:
    figures = {name: measured[name] for name in parts if name in measured}
    told = [parts[name].tell(found) for name, found in figures.items()]
    return Report(
        question=question,
        tables=[table for each in told for table in each.tables],
        figures=figures,
        goals=[goal for each in told for goal in each.goals],
        notes=[note for each in told for note in each.notes],
    )
