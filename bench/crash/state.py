"""Everything that a version holds, as bits, and how much of it differs from another."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.exchange.rows import read_rows

__all__ = ["Difference", "State", "bits_of"]

Bits = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How two states differ.

    Attributes:
        rows: of all tables together, in weights or optimizer state.
        bits: of rows and dense tensors.
        words: what differs, empty if nothing does.
    """

    rows: int
    bits: int
    words: str


@dataclass(frozen=True, kw_only=True)
class State:
    """What is there at a position.

    Attributes:
        position: actions done.
        rows: of each table uint8 [rows, bytes]: weights and optimizer state of each row; if its ids are dynamic, of
            those that have rows, in order, and before these the id and its score.
        tables: of each table its updates so far and its learning rate.
        tensors: dense tensors and random states, as uint8 vectors.
    """

    position: int
    rows: dict[str, Bits]
    tables: dict[str, tuple[int, float]]
    tensors: dict[str, Bits]

    @classmethod
    def of(cls, store: "tierstore.Store") -> "State":
        """What an open store shows."""
        rows = {}
        for name, table in store.tables.items():
            if table.ids is None:
                columns: list[Any] = list(read_rows(table, 0, table.config.num_embeddings))
            else:
                ids = table.ids.listed()
                given = torch.from_numpy(ids)
                scores = table.ids.scores_of(ids).astype(np.uint32)
                columns = [ids[:, None], scores[:, None], table.read(given).numpy(), table.read_state(given).numpy()]
            rows[name] = np.hstack([each.view(np.uint8) for each in columns])
        return cls(
            position=store.extra.get("position", 0),
            rows=rows,
            tables={name: (table.state.step, table.state.learning_rate) for name, table in store.tables.items()},
            tensors=bits_of(store.tensors()),
        )

    def only(self, tables: Collection[str]) -> "State":
        """The same with no more than these tables: others had not been created."""
        rows = {name: bits for name, bits in self.rows.items() if name in tables}
        return replace(self, rows=rows, tables={name: self.tables[name] for name in rows})

    def difference(self, other: "State") -> Difference:
        """What another state has otherwise; a table or tensor that one of the two lacks differs as a whole."""
        rows, bits, words = 0, 0, []
        if self.position != other.position:
            words.append(f"position {other.position} instead of {self.position}")
        for name in self.rows.keys() | other.rows.keys():
            wrong, wrong_bits = _differing(self.rows.get(name), other.rows.get(name))
            rows, bits = rows + len(wrong), bits + wrong_bits
            if len(wrong):
                words.append(f"{len(wrong)} rows of table {name!r}, the first is {wrong[0]}")
        for name in self.tensors.keys() | other.tensors.keys():
            wrong, wrong_bits = _differing(self.tensors.get(name), other.tensors.get(name))
            bits += wrong_bits
            if len(wrong):
                words.append(f"tensor {name!r}")
        if self.tables != other.tables:
            words.append(f"optimizer steps and rates {other.tables} instead of {self.tables}")
        return Difference(rows=rows, bits=bits, words="; ".join(words))


def bits_of(tensors: dict[str, torch.Tensor]) -> dict[str, Bits]:
    """The bytes of each tensor."""
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy() for name, tensor in tensors.items()}


def _differing(one: Any, other: Any) -> tuple[Any, int]:
    """(indices along the first axis at which they differ, bits that differ)."""
    if one is None or other is None or one.shape != other.shape:
        missing = one if other is None or (one is not None and len(one) > len(other)) else other
        return np.arange(len(missing)), 8 * missing.size
    different = one ^ other
    return np.flatnonzero(different.reshape(len(one), different[:1].size).any(1)), int(np.unpackbits(different).sum())
