"""Which rank owns which rows of a table, by TorchRec's names."""

from typing import Any, Literal, NamedTuple, get_args

from ..config import require_choice, require_int

ShardingType = Literal["table_wise", "row_wise"]


class Sharding(NamedTuple):
    """How one table is sharded.

    Attributes:
        sharding_type: "table_wise": one rank has all rows; "row_wise": each rank has a range of rows, of one size but
            for the last ones, as TorchRec divides them.
        ranks: who has rows, in order of the ranges.
    """

    sharding_type: ShardingType
    ranks: tuple[int, ...]

    @classmethod
    def checked(cls, sharding_type: Any, ranks: Any, world_size: int) -> "Sharding":
        """ValueError, TypeError unless it is a sharding over so many ranks."""
        require_choice(sharding_type, get_args(ShardingType), "sharding_type")
        found = tuple(require_int(rank, "ranks", 0, world_size - 1) for rank in ranks)
        if not found or len(set(found)) < len(found) or (sharding_type == "table_wise" and len(found) > 1):
            wanted = "one rank" if sharding_type == "table_wise" else "distinct ranks, at least one"
            raise ValueError(f"ranks={list(found)}: a {sharding_type} table is on {wanted}")
        return cls(sharding_type, found)

    def ranges(self, num_rows: int) -> list[tuple[int, int]]:
        """(first row, rank) of each range that is not empty."""
        size = -(-num_rows // len(self.ranks))
        return [(place * size, rank) for place, rank in enumerate(self.ranks) if place * size < num_rows]
