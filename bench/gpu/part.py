"""What a part of the GPU benchmark gives: a module of this package with ``run(rig, config, folder) -> Part``."""

from dataclasses import dataclass, field
from typing import Any, Final

from ..common import Goal, Table

__all__ = ["PARTS", "Part"]

PARTS: Final = ("limits", "find", "rows", "training", "ssd", "latency")


@dataclass(kw_only=True)
class Part:
    """What a part found; as in ``common.Report``."""

    tables: list[Table]
    figures: dict[str, Any]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
