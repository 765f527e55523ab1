"""A drop-in for ``torch.nn.Embedding`` over a table of a store."""

import torch
from torch import Tensor

from ..store import Table
from ..store.arguments import require_tensor
from ..system.hints import hinting
from .function import Padding, Prepared
from .module import NO_COUNTERPART, TieredModule, checked_padding, checked_table


@hinting(NO_COUNTERPART)
class TieredEmbedding(TieredModule):
    """Rows of one table, one for each id; called as ``torch.nn.Embedding`` is.

    The rows are no torch parameters: see ``TieredEmbeddingBag``, of which this is one id a bag. ``max_norm``,
    ``scale_grad_by_freq`` and ``sparse`` of ``nn.Embedding`` have no counterpart.

    Args:
        table: a table of an open store.
        padding_idx: an id whose row is not trained, at whichever place; negative counts from the end. While the row was
            never written it gives zeros, as that of a new ``torch.nn.Embedding``, and the first forward that trains
            writes them: a server gives zeros, too.

    Raises:
        ValueError, TypeError: ``padding_idx`` is no row.
    """

    def __init__(self, table: Table, *, padding_idx: int | None = None) -> None:
        super().__init__(checked_table(table).store)
        self.table = table
        self.num_embeddings = table.config.num_embeddings
        self.embedding_dim = table.config.embedding_dim
        self.padding_idx = None
        if padding_idx is not None:
            self.padding_idx = checked_padding(padding_idx, table)
            self._empty = table.first_values(torch.tensor([self.padding_idx])).to(table.store.device)
            self._written_at = -1  # in terms of ``Shown.changes``: a rollback may take the row back

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch.nn.Embedding's name
        """Rows of ids.

        Args:
            input: int64 or int32 ids of any shape.

        Returns:
            float32 [*input.shape, embedding_dim] on the store's device.

        Raises:
            ValueError, TypeError: a wrong argument, an id that is no row. ClosedError, ChecksumError.
        """
        shape = (*require_tensor(input, "input").shape, self.embedding_dim)
        if self.padding_idx is not None and self.rows.requires_grad and torch.is_grad_enabled():
            self._write_padding()
        return self._run((input,), (input,), shape)

    def _write_padding(self) -> None:
        """Zeros, unless it was written or the table is only read."""
        table = self.table
        if (
            self._written_at != (at := table.store.shown.changes)
            and not table.store.readonly | table.layout.is_quantized
        ):
            row = torch.tensor([self.padding_idx])
            if torch.equal(table.read(row).float(), self._empty):
                table.write(row, torch.zeros((1, self.embedding_dim), dtype=table.layout.torch_dtype))
            self._written_at = at

    @property
    def _tables(self) -> list[Table]:
        return [self.table]

    def _prepare(self, ids: Tensor) -> Prepared:
        flat = require_tensor(ids, "input").reshape(-1)
        padding, mode = None, self.table.config.pooling  # so that a pass merges these lookups with those of bags
        if self.padding_idx is None:
            offsets = torch.arange(len(flat) + 1, dtype=torch.int64, device=flat.device)
        else:
            is_used = flat != self.padding_idx
            flat = flat[is_used]
            offsets = torch.cat([is_used.new_zeros(1, dtype=torch.int64), is_used.cumsum(0)])
            if len(flat) < len(is_used):
                row = self.table.jagged(torch.tensor([self.padding_idx]), torch.tensor([0, 1]), mode="sum")
                places = (~is_used).to(self.table.store.device)
                padding = Padding(self.table.lookup(row, mode="sum"), places, self._empty)
        jagged = self.table.jagged(flat, offsets, mode=mode)
        lookup = self.table.lookup(jagged, mode=mode)
        return Prepared([lookup], (jagged.batch, self.embedding_dim), None, (ids,), self.table.store, padding)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.table!r}{padding}"
