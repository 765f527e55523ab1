"""Which tensors a table is, and their names in a file: TorchRec's state keys by default, torch.optim's state."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..optim import Optimizer

DEFAULT_KEY: Final = "embedding_bags.{table}.weight"
STATE_NAMES: Final = ("sum", "exp_avg", "exp_avg_sq", "step")
"""Names that may lie alongside a table's weights."""
IDS: Final = "ids"
SCORES: Final = "scores"
"""Of dynamic ids, alongside the weights: int64 [rows] each."""
_PLACE: Final = "{table}"
_WEIGHT: Final = "weight"
_TORCHREC: Final = re.compile(r"(?:.*\.)?embedding_bags\.(?P<table>.+)\.weight")


def weight_keys(template: str, tables: Iterable[str]) -> dict[str, str]:
    """The key of each table's weights; ``{table}`` in the template stands for its name. ValueError: two would have
    one key."""
    keys = {table: template.replace(_PLACE, table) for table in tables}
    owners: dict[str, str] = {}
    for table, key in keys.items():
        other = owners.setdefault(key, table)
        if other != table:
            raise ValueError(
                f"key {template!r} names both {other!r} and {table!r} {key!r}; put {_PLACE} in it, or choose one table"
            )
    return keys


def state_key(weight_key: str, state: str) -> str:
    """The key of an optimizer state alongside its weights: ``a.weight`` and ``sum`` give ``a.sum``."""
    if weight_key == _WEIGHT or weight_key.endswith("." + _WEIGHT):
        return weight_key[: -len(_WEIGHT)] + state
    return f"{weight_key}.{state}"


def part_of(target: str) -> tuple[str, str] | None:
    """The table and the optimizer state, or ids, that ``TABLE.STATE`` names; None if it ends in no such name."""
    table, _, state = target.rpartition(".")
    return (table, state) if table and state in (*STATE_NAMES, IDS) else None


def table_of(key: str, known: Mapping[str, str]) -> str | None:
    """The table that a key's tensor is the weights of; ``known``: those that the file itself names. None if unknown."""
    if key in known:
        return known[key]
    found = _TORCHREC.fullmatch(key)
    return found["table"] if found else None


class StateTensor(NamedTuple):
    """Columns ``[first, last)`` of a row's state: a tensor [rows] of one value a row, else [rows, last - first]."""

    name: str
    first: int
    last: int
    per_row: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.per_row else (rows, self.last - self.first)


def state_tensors(optimizer: Optimizer, dim: int) -> tuple[StateTensor, ...]:
    """The state tensors of a table with ``dim`` columns, in order of their columns; float32 all of them."""
    if optimizer.kind == "adam":
        return StateTensor("exp_avg", 0, dim, False), StateTensor("exp_avg_sq", dim, 2 * dim, False)
    columns = optimizer.state_dim(dim)
    if not columns:
        return ()
    return (StateTensor("sum", 0, columns, optimizer.kind == "rowwise_adagrad"),)
