"""What several runs found, added up."""

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Counts:
    """Base of dataclasses whose fields are numbers, counters and lists."""

    def add(self, other: "Counts | Mapping[str, Any]") -> None:
        """Add what another run found, or its fields as JSON has them."""
        for name, value in (vars(other) if isinstance(other, Counts) else other).items():
            own = getattr(self, name)
            setattr(self, name, own + (Counter(value) if isinstance(own, Counter) else value))
