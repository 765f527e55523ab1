"""What our own exports hold besides tensors, so that an import can make the tables again: JSON, and nothing else."""

from typing import Any, Final, NamedTuple

from ..config import TableConfig
from ..errors import FormatError
from ..store.version import TableState
from ..system.excerpt import excerpt

_FORMAT: Final = 1


class TableMetadata(NamedTuple):
    """One table of an export; the key is that of its weights."""

    key: str
    config: TableConfig
    state: TableState


class Metadata(NamedTuple):
    version: int
    tables: tuple[TableMetadata, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back, and has FormatError for anything else."""
        tables = [
            {"key": table.key, "config": table.config.to_dict(), **table.state._asdict()} for table in self.tables
        ]
        return {"format_version": _FORMAT, "store_version": self.version, "tables": tables}

    @classmethod
    def from_dict(cls, fields: Any, where: str) -> "Metadata":
        try:
            if fields["format_version"] != _FORMAT:
                raise ValueError(f"format version {fields['format_version']}; this release reads version {_FORMAT}")
            tables = [
                TableMetadata(
                    str(table["key"]),
                    TableConfig.from_dict(table["config"]),
                    TableState.checked(table["step"], table["learning_rate"]),
                )
                for table in fields["tables"]
            ]
            return cls(int(fields["store_version"]), tuple(tables))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise FormatError(
                f"{where}: its tierstore metadata cannot be read ({excerpt(str(error), 200)}); export it again"
            ) from error
