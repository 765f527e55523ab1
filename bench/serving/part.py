"""What a part of the benchmark is: figures that are measured, and what is told of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..common import Goal, Run, Table
from .load import Quantiles

__all__ = ["Part", "Told", "ms"]


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


def ms(quantiles: Quantiles | dict[str, float], name: str) -> str:
    """One of the quantiles, as it is shown."""
    value = quantiles[name] if isinstance(quantiles, dict) else getattr(quantiles, name)
    return f"{value:.1f}"
