"""What our own exports tell beside the tensors, so that an import can make the tables again: JSON, and nothing else."""

import math
from typing import Any, Final, NamedTuple

from ..config import TableConfig
from ..errors import FormatError
from ..store.version import TableState
from ..system.excerpt import excerpt

__all__ = ["Metadata", "TableMetadata"]

_FORMAT: Final = 1


class TableMetadata(NamedTuple):
    """One table of an export.

    Attributes:
        key: of its weights.
        state: updates so far, and the learning rate in force.
    """

    key: str
    config: TableConfig
    state: TableState


class Metadata(NamedTuple):
    """Of a whole export.

    Attributes:
        version: of the store that was exported.
    """

    version: int
    tables: tuple[TableMetadata, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back."""
        tables = [
            {
                "key": table.key,
                "config": table.config.to_dict(),
                "step": table.state.step,
                "learning_rate": table.state.learning_rate,
            }
            for table in self.tables
        ]
        return {"format_version": _FORMAT, "store_version": self.version, "tables": tables}

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> "Metadata":
        """Inverse of ``to_dict``; FormatError names ``where`` for anything that it did not write."""
        try:
            if fields["format_version"] != _FORMAT:
                raise ValueError(f"format version {fields['format_version']}; this release reads version {_FORMAT}")
            tables = tuple(_table(table) for table in fields["tables"])
            return cls(int(fields["store_version"]), tables)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{where}: its tierstore metadata cannot be read ({excerpt(str(error), 200)}); export it again"
            ) from error


def _table(fields: dict[str, Any]) -> TableMetadata:
    state = TableState(int(fields["step"]), float(fields["learning_rate"]))
    if state.step < 0 or not (math.isfinite(state.learning_rate) and state.learning_rate >= 0):
        raise ValueError(f"{state} is out of range")
    return TableMetadata(str(fields["key"]), TableConfig.from_dict(fields["config"]), state)
