"""Which rank owns which rows and columns of each table, by TorchRec's names; and files of that.

A plan file is JSON::

    {"world_size": 2,
     "tables": {"user": {"sharding_type": "row_wise", "ranks": [0, 1], "exchange": "rows"},
                "item": {"sharding_type": "table_wise", "ranks": [1], "exchange": "pooled"}}}
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from ..system.checks import excerpt, require_choice, require_int
from ..system.files import write_text

ShardingType = Literal[
    "data_parallel", "table_wise", "row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid_shard"
]
Exchange = Literal["rows", "pooled"]
MAX_RANKS: Final = 2**16


class Shard(NamedTuple):
    """What one rank has of a table: a range of rows and of columns."""

    rank: int
    first_row: int
    num_rows: int
    first_column: int
    num_columns: int


class Sharding(NamedTuple):
    """How one table is sharded.

    Attributes:
        sharding_type: "table_wise": one rank has all rows. "row_wise": each rank has a range of rows, as TorchRec
            divides them. "column_wise": each rank has an equal range of the columns. "table_row_wise" and
            "table_column_wise": the same, over ranks of one host. "grid_shard": each host has an equal range of the
            columns, and its ranks ranges of rows. "data_parallel": all ranks have all rows.
        ranks: who has rows, in order of the ranges; of columns first.
        exchange: "rows": each distinct row of a rank's batch crosses once, the requester pools. "pooled": owners pool.
        column_ranges: how many, of "grid_shard"; as many ranks have each.
    """

    sharding_type: ShardingType
    ranks: tuple[int, ...]
    exchange: Exchange = "rows"
    column_ranges: int = 1

    @classmethod
    def checked(
        cls, sharding_type: Any, ranks: Any, exchange: Any, world_size: int, column_ranges: Any = 1
    ) -> "Sharding":
        """ValueError, TypeError unless it is a sharding over so many ranks."""
        require_choice(sharding_type, get_args(ShardingType), "sharding_type")
        require_choice(exchange, get_args(Exchange), "exchange")
        found = tuple(require_int(rank, "ranks", 0, world_size - 1) for rank in ranks)
        if not found or len(set(found)) < len(found) or (sharding_type == "table_wise" and len(found) > 1):
            wanted = "one rank" if sharding_type == "table_wise" else "distinct ranks, at least one"
            raise ValueError(f"ranks={list(found)}: a {sharding_type} table is on {wanted}")
        if sharding_type == "data_parallel" and set(found) != set(range(world_size)):
            raise ValueError(f"ranks={list(found)}: a data_parallel table is on all {world_size} ranks")
        if sharding_type == "data_parallel" and exchange == "pooled":
            raise ValueError('exchange="pooled": every rank has the rows of a data_parallel table; leave it "rows"')
        require_int(column_ranges, "column_ranges", 1, len(found))
        if column_ranges > 1 and (sharding_type != "grid_shard" or len(found) % column_ranges):
            raise ValueError(
                f"column_ranges={column_ranges}: it is of grid_shard, and divides its number of ranks; not of "
                f"{sharding_type} over {len(found)} ranks"
            )
        return cls(sharding_type, found, exchange, column_ranges)

    @property
    def parts(self) -> int:
        """Ranges of columns that each row is divided into."""
        is_by_columns = self.sharding_type in ("column_wise", "table_column_wise")
        return len(self.ranks) if is_by_columns else self.column_ranges

    def shards(self, num_rows: int, dim: int) -> list[Shard]:
        """Those that are not empty, in order; ValueError if the columns cannot be divided equally."""
        if self.sharding_type == "data_parallel":
            return [Shard(rank, 0, num_rows, 0, dim) for rank in self.ranks]
        if dim % self.parts:
            raise ValueError(f"ranks={list(self.ranks)}: {dim} columns cannot be divided equally among {self.parts}")
        width, owners = dim // self.parts, len(self.ranks) // self.parts
        size = -(-num_rows // owners)
        places = (divmod(place, owners) for place in range(len(self.ranks)))
        return [
            Shard(rank, row * size, min(size, num_rows - row * size), part * width, width)
            for rank, (part, row) in zip(self.ranks, places, strict=True)
            if row * size < num_rows
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; ``from_json`` reads it back."""
        fields = self._asdict() | {"ranks": list(self.ranks)}
        if self.column_ranges == 1:
            del fields["column_ranges"]  # releases that do not know it read all other tables
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], world_size: int) -> "Sharding":
        """Inverse of ``to_json``; errors as of ``checked``."""
        if not isinstance(fields, Mapping):
            raise TypeError(f"{excerpt(fields)}: a sharding is a table of sharding_type, ranks and so on")
        unknown = set(fields) - set(cls._fields)
        if unknown or "sharding_type" not in fields or "ranks" not in fields:
            raise ValueError(
                f"{excerpt(dict(fields))}: a sharding has sharding_type, ranks and perhaps exchange and column_ranges"
            )
        return cls.checked(**{"exchange": "rows"} | dict(fields), world_size=world_size)


class Plan(NamedTuple):
    """The sharding of each table, by its name, over so many ranks."""

    world_size: int
    tables: dict[str, Sharding]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a plan file."""
        fields = {name: each.to_json() for name, each in self.tables.items()}
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in fields.items())
        inner = ",\n  ".join(lines)
        write_text(Path(path), f'{{"world_size": {self.world_size},\n "tables": {{\n  {inner}}}}}\n', force=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan file. OSError: it cannot be read. ValueError, TypeError: it is no plan; names the table."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        is_plan = isinstance(fields, dict) and set(fields) == {"world_size", "tables"}
        if not is_plan or not isinstance(fields["tables"], dict):
            raise ValueError(f"{path} is no plan: it has world_size and tables, and nothing else")
        size = require_int(fields["world_size"], "world_size", 1, MAX_RANKS)
        found = {}
        for name, each in fields["tables"].items():
            try:
                found[name] = Sharding.from_json(each, size)
            except (ValueError, TypeError) as error:
                raise type(error)(f"{path}: table {name!r}: {error}") from None
        return cls(size, found)
