"""What a part of the GPU benchmark is.

Each is a module of this package with ``run(rig, config, folder) -> Iterator[Part]``. It yields what it has found after
each case, every time all of it, so that a part that is stopped has said what it knows.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from ..common import Goal, Table

__all__ = ["PARTS", "Part"]

PARTS: Final = ("rows", "training", "cached", "latency", "ssd", "limits", "admit")
"""In the order of their worth: if time or the machine ends, the first ones were measured."""


@dataclass(kw_only=True)
class Part:
    """What a part found so far; as in ``common.Report``.

    Attributes:
        left: cases that are not measured yet.
    """

    tables: list[Table]
    figures: dict[str, Any]
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "Part":
        """What ``dataclasses.asdict`` made of one."""
        return cls(
            tables=[Table(**table) for table in found["tables"]],
            figures=found["figures"],
            goals=[Goal(**goal) for goal in found["goals"]],
            notes=found["notes"],
            left=found["left"],
        )
