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

from ..system.checks import require_choice, require_int
from ..system.excerpt import excerpt

ShardingType = Literal["data_parallel", "table_wise", "row_wise", "table_row_wise", "column_wise"]
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
        sharding_type: "table_wise": one rank has all rows. "row_wise": each rank has a range of rows, of one size but
            for the last ones, as TorchRec divides them; "table_row_wise": the same, over ranks of one host.
            "column_wise": each rank has an equal range of the columns of all rows. "data_parallel": all ranks have all
            rows.
        ranks: who has rows, in order of the ranges.
        exchange: "rows": each distinct row of a rank's batch crosses once, the requester pools. "pooled": owners pool.
    """

    sharding_type: ShardingType
    ranks: tuple[int, ...]
    exchange: Exchange = "rows"

    @classmethod
    def checked(cls, sharding_type: Any, ranks: Any, exchange: Any, world_size: int) -> "Sharding":
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
        return cls(sharding_type, found, exchange)

    def shards(self, num_rows: int, dim: int) -> list[Shard]:
        """Those that are not empty, in order; ValueError if the columns cannot be divided equally."""
        count = len(self.ranks)
        if self.sharding_type == "data_parallel":
            return [Shard(rank, 0, num_rows, 0, dim) for rank in self.ranks]
        if self.sharding_type == "column_wise":
            if dim % count:
                raise ValueError(f"ranks={list(self.ranks)}: {dim} columns cannot be divided equally among {count}")
            width = dim // count
            return [Shard(rank, 0, num_rows, place * width, width) for place, rank in enumerate(self.ranks)]
        size = -(-num_rows // count)
        return [
            Shard(rank, place * size, min(size, num_rows - place * size), 0, dim)
            for place, rank in enumerate(self.ranks)
            if place * size < num_rows
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON-able form; ``from_json`` reads it back."""
        return {"sharding_type": self.sharding_type, "ranks": list(self.ranks), "exchange": self.exchange}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], world_size: int) -> "Sharding":
        """Inverse of ``to_json``; errors as of ``checked``."""
        unknown = set(fields) - {"sharding_type", "ranks", "exchange"}
        if unknown or "sharding_type" not in fields or "ranks" not in fields:
            raise ValueError(f"{excerpt(dict(fields))}: a sharding has sharding_type, ranks and perhaps exchange")
        return cls.checked(fields["sharding_type"], fields["ranks"], fields.get("exchange", "rows"), world_size)


class Plan(NamedTuple):
    """The sharding of each table, by its name, over so many ranks."""

    world_size: int
    tables: dict[str, Sharding]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a plan file."""
        fields = {name: each.to_json() for name, each in self.tables.items()}
        lines = (f"{json.dumps(name)}: {json.dumps(each)}" for name, each in fields.items())
        inner = ",\n  ".join(lines)
        Path(path).write_text(f'{{"world_size": {self.world_size},\n "tables": {{\n  {inner}}}}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan file.

        Raises:
            OSError: it cannot be read. ValueError, TypeError: it is no plan; names the table.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(fields, dict) or set(fields) != {"world_size", "tables"}:
            raise ValueError(f"{path} is no plan: it has world_size and tables, and nothing else")
        size = require_int(fields["world_size"], "world_size", 1, MAX_RANKS)
        found = {}
        for name, each in fields["tables"].items():
            try:
                found[name] = Sharding.from_json(each, size)
            except (ValueError, TypeError) as error:
                raise type(error)(f"{path}: table {name!r}: {error}") from None
        return cls(size, found)

    @classmethod
    def from_torchrec(cls, plan: Any, world_size: int, *, exchange: Exchange = "pooled") -> "Plan":
        """Of TorchRec's ``ShardingPlan``, or of its ``plan`` for one module.

        Args:
            plan: ``ShardingPlan``, ``EmbeddingModuleShardingPlan`` or any mapping of table names to what has
                ``sharding_type`` and ``ranks``.
            exchange: of tables sharded by rows or not at all; TorchRec's owners pool.

        Raises:
            ValueError: two modules have a table of one name, or a sharding that is none of ours.
        """
        modules = list(plan.plan.values()) if hasattr(plan, "plan") else [plan]
        found: dict[str, Sharding] = {}
        for module in modules:
            for name, each in module.items():
                if name in found:
                    raise ValueError(f"two modules of the plan have a table {name!r}; import one module's at a time")
                kind = str(each.sharding_type)
                replicated = kind == "data_parallel"
                ranks = range(world_size) if replicated else each.ranks
                own = "rows" if kind in ("data_parallel", "column_wise") else exchange
                try:
                    found[name] = Sharding.checked(kind, ranks, own, world_size)
                except (ValueError, TypeError) as error:
                    raise type(error)(f"table {name!r}: {error}") from None
        return cls(world_size, found)
