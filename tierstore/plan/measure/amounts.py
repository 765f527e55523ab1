"""What is in a batch, and the work that it is."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...nn import KeyedJaggedTensor
from ...rows import RowLayout
from .subject import Subject, transactions_in

__all__ = ["Amounts", "Written"]


class Amounts(NamedTuple):
    """Of a batch: ids, distinct rows, bags; and the work that they are, as ``Loop.work`` has it."""

    ids: float
    rows: float
    bags: float

    @classmethod
    def of(cls, batches: Sequence[KeyedJaggedTensor]) -> "Amounts":
        """Means."""
        rows = statistics.mean(len(np.unique(batch.values().numpy())) for batch in batches)
        return cls(len(batches[0].values()), rows, batches[0].stride())

    def work(self, what: str, layout: RowLayout) -> dict[str, float]:
        """Of pooling ("pool") or training ("update")."""
        counts = {what: self.ids, f"{what}_row": self.rows, f"{what}_bag": self.bags}
        nanoseconds = {f"{name}_ns": count for name, count in counts.items()}
        return nanoseconds | {f"{name}_ns_per_byte": count * layout.row_bytes for name, count in counts.items()}

    def lookup(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in memory."""
        return {"batch_us": 1000, **self.work("pool", layout)}

    def training(self, layout: RowLayout) -> dict[str, float]:
        """Of a training step, beyond its lookup."""
        return {"step_us": 1000, **self.work("update", layout)}

    def hits(self, layout: RowLayout) -> dict[str, float]:
        """Of a lookup whose rows are all in the cache."""
        return {"admit_ns": self.ids, "admit_row_ns": self.rows, **self.lookup(layout)}

    def bringing(self, layout: RowLayout) -> dict[str, float]:
        """In of rows that are not in the cache."""
        return {"miss_ns": self.rows, "miss_ns_per_byte": self.rows * layout.row_bytes}


class Written(NamedTuple):
    """What the cold tier was made to write, in a step or in all: rows appended and moved, and transactions."""

    rows: float
    moved: float
    transactions: float

    @classmethod
    def by(cls, subject: Subject) -> "Written":
        """Since it was opened; of transactions, since its file was made."""
        found = subject.store.stats().ssd
        return cls(found.rows_written, found.rows_moved, transactions_in(subject.store.directory))

    def since(self, before: "Written", steps: int) -> "Written":
        """In each of so many steps."""
        return Written(*((now - then) / steps for now, then in zip(self, before, strict=True)))

    def work(self, layout: RowLayout) -> dict[str, float]:
        """As ``Loop.work`` has it."""
        return {
            "append_ns": self.rows,
            "append_ns_per_byte": self.rows * layout.row_bytes,
            "move_ns": self.moved,
            "move_ns_per_byte": self.moved * layout.row_bytes,
            "transaction_us": 1000 * self.transactions,
        }
