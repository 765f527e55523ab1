"""Drop-ins for ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over a table of a store."""

from typing import Any

import torch
from torch import Tensor

from ..config import Pooling
from ..kernels.slots import MODES
from ..optim.curvature import OF_THREAD
from ..store import Table
from ..store.arguments import require_tensor
from ..system.checks import hinting, require_choice
from .function import Padding, Prepared
from .module import NO_COUNTERPART, TieredModule, checked_padding, checked_table


class _OfTable(TieredModule):
    def __init__(self, table: Table, padding_idx: int | None) -> None:
        super().__init__(checked_table(table).store)
        self.table = table
        self.num_embeddings = table.config.num_embeddings
        self.embedding_dim = table.config.embedding_dim
        self.padding_idx = None if padding_idx is None else checked_padding(padding_idx, table)

    @property
    def _tables(self) -> list[Table]:
        return [self.table]

    def _used(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(bool [n], which ids are no padding; int64 [n + 1], how many of them come before each place)."""
        is_used: Any = ids.long() != self.padding_idx
        return is_used, torch.cat([is_used.new_zeros(1, dtype=torch.int64), is_used.cumsum(0)])

    def extra_repr(self) -> str:
        return repr(self.table) + ("" if self.padding_idx is None else f", padding_idx={self.padding_idx}")


@hinting(NO_COUNTERPART)
class TieredEmbedding(_OfTable):
    """Rows of one table, one for each id; called as ``torch.nn.Embedding`` is.

    The rows are no torch parameters: see ``TieredEmbeddingBag``, of which this is one id a bag. ``max_norm``,
    ``scale_grad_by_freq`` and ``sparse`` of ``nn.Embedding`` have no counterpart.

    Args:
        table: a table of an open store.
        padding_idx: an id whose row is not trained, at whichever place; negative counts from the end. While the row was
            never written it gives zeros, as that of a new ``torch.nn.Embedding``, and the first forward that trains
            writes them: a server gives zeros, too. Of dynamic ids, any int64: the module neither counts nor admits it,
            and gives zeros.

    Raises:
        ValueError, TypeError: ``padding_idx`` is no row.
    """

    def __init__(self, table: Table, *, padding_idx: int | None = None) -> None:
        super().__init__(table, padding_idx)
        self._has_padding_row = padding_idx is not None and table.ids is None
        if self._has_padding_row:
            self._empty = table.first_values(torch.tensor([self.padding_idx])).to(table.store.device)
            self._written_at = -1  # in terms of ``Shown.changes``: a rollback may take the row back

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch.nn.Embedding's name
        """Rows of ids, int64 or int32 of any shape: float32 [*input.shape, embedding_dim] on the store's device.

        ValueError, TypeError: a wrong argument, an id that is no row. ClosedError, ChecksumError.
        """
        shape = (*require_tensor(input, "input").shape, self.embedding_dim)
        is_constant = OF_THREAD.evaluation.are_constant
        if self._has_padding_row and self.rows.requires_grad and torch.is_grad_enabled() and not is_constant:
            self._write_padding()
        return self._run((input,), (input,), shape)

    def _write_padding(self) -> None:
        table, at = self.table, self.table.store.shown.changes
        if self._written_at != at and not (table.store.readonly or table.layout.is_quantized):
            row = torch.tensor([self.padding_idx])
            if torch.equal(table.read(row).float(), self._empty):
                table.write(row, torch.zeros((1, self.embedding_dim), dtype=table.layout.torch_dtype))
            self._written_at = at

    def _pooled_directly(self, ids: Tensor) -> Tensor | None:
        is_max = self.table.config.pooling == "max"  # which gives the row's own bits, also where they are those of -0
        if self.padding_idx is not None or not ids.is_cpu or is_max:
            return None
        bags = torch.arange(ids.numel() + 1)
        rows = self.table.pooled_directly(ids.reshape(-1), bags, "sum")
        if rows is None or ids.dim() == 1:
            return rows
        return torch.from_numpy(rows.numpy().reshape(*ids.shape, self.embedding_dim))  # not a view, as in ``_forward``

    def _prepare(self, sources: Any, ids: Tensor) -> Prepared:
        flat = require_tensor(ids, "input").reshape(-1)
        padding, mode = None, self.table.config.pooling  # so that a pass merges these lookups with those of bags
        if self.padding_idx is None:
            offsets = torch.arange(len(flat) + 1, dtype=torch.int64, device=flat.device)
        else:
            is_used, offsets = self._used(flat)
            flat = flat[is_used]
            if self._has_padding_row and len(flat) < len(is_used):
                row = self.table.jagged(torch.tensor([self.padding_idx]), torch.tensor([0, 1]), mode="sum")
                places = (~is_used).to(self.table.store.device)
                padding = Padding(self.table.lookup(row, mode="sum"), places, self._empty)
        lookup = self.table.lookup(self.table.jagged(flat, offsets, mode=mode), mode=mode)
        shape = len(offsets) - 1, self.embedding_dim
        return Prepared([lookup], shape, None, sources, self.table.store, padding)


@hinting(NO_COUNTERPART)
class TieredEmbeddingBag(_OfTable):
    """Pools rows of one table; called as ``torch.nn.EmbeddingBag`` is.

    The rows are no torch parameters: the table's optimizer runs at the end of backward, once for all lookups of a
    pass (or in the ``step`` of ``Store.optimizer``), ``Store.commit`` makes the result durable, and
    ``state_dict()`` does not hold them. Under ``torch.no_grad()``, or on a store opened read-only, nothing is
    updated; ``eval()`` alone does not prevent it. ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` of
    ``nn.EmbeddingBag`` have no counterpart.

    Args:
        table: a table of an open store.
        mode: "sum", "mean" or "max"; default, and all that is accepted: ``table.config.pooling``, by which collections
            and servers pool, too. (There the default is "sum"; that of ``nn.EmbeddingBag`` is "mean".)
        include_last_offset: ``offsets`` has one entry more than there are bags, the last being the number of ids.
        padding_idx: an id that is left out of every bag, and of the number of ids in a mean; negative counts from the
            end. A bag of nothing else is empty. Of dynamic ids, any int64, as it is: the module does not admit it.

    Raises:
        ValueError: ``mode`` is none, or not the table's.
    """

    def __init__(
        self, table: Table, *, mode: Pooling | None = None, include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(table, padding_idx)
        pooling = table.config.pooling
        if mode is not None and mode != pooling:
            require_choice(mode, tuple(MODES), "mode")
            raise ValueError(
                f"mode={mode!r}, but table {table.name!r} has pooling={pooling!r}, by which it is served: "
                f"leave mode out, or make the table with TableConfig(pooling={mode!r}), an existing one by "
                f"store.change_table({table.name!r}, pooling={mode!r})"
            )
        self.mode = pooling
        self.include_last_offset = include_last_offset

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None  # noqa: A002
    ) -> Tensor:  # fmt: skip
        """Pooled rows.

        Args:
            input: int64 or int32 ids, [n] with ``offsets``, or [bags, ids a bag] without.
            offsets: int64 or int32 [bags], where each bag begins in ``input``.
            per_sample_weights: float32 of the shape of ``input``; with mode="sum" only. Gets gradients.

        Returns:
            float32 [bags, embedding_dim] on the store's device; an empty bag gives zeros.

        Raises:
            ValueError, TypeError: a wrong argument, an id that is no row. ClosedError, ChecksumError.
        """
        sources = (input, offsets, per_sample_weights)
        return self._run(sources, sources)

    def _pooled_directly(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor | None:
        if per_sample_weights is not None or self.padding_idx is not None:
            return None
        if offsets is not None:
            return self.table.pooled_directly(ids, offsets, self.mode, is_last_given=self.include_last_offset)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.is_cpu:
            return None
        return self.table.pooled_directly(ids.reshape(-1), _evenly(ids), self.mode)

    def _prepare(
        self, sources: Any, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Prepared:
        if require_tensor(ids, "input").dim() not in (1, 2):
            raise ValueError(
                f"input must be 1-D with offsets, or 2-D, not {tuple(ids.shape)}; TieredEmbedding takes any shape"
            )
        scale, is_last_given = per_sample_weights, True
        if ids.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets goes with a 1-D input; a 2-D input has one bag a row")
            if scale is not None and require_tensor(scale, "per_sample_weights").shape != ids.shape:
                raise ValueError(f"per_sample_weights {tuple(scale.shape)} must have input's shape {tuple(ids.shape)}")
            offsets = _evenly(ids)
            flat, scale = ids.reshape(-1), None if scale is None else scale.reshape(-1)
        else:
            if offsets is None:
                raise ValueError("a 1-D input needs offsets, where each bag begins; a 2-D input has one bag a row")
            flat, is_last_given = ids, self.include_last_offset
        if self.padding_idx is not None:
            options: dict[str, Any] = {"mode": self.mode, "is_last_given": is_last_given}
            _ = self.table.jagged(flat, offsets, per_sample_weights=scale, **options).on_host  # its errors come first
            is_used, before = self._used(flat)
            flat, offsets = flat[is_used], before[offsets.long()]
            scale = None if scale is None else scale[is_used]
        jagged = self.table.jagged(flat, offsets, mode=self.mode, per_sample_weights=scale, is_last_given=is_last_given)
        lookup = self.table.lookup(jagged, mode=self.mode)
        return Prepared([lookup], (jagged.batch, self.table.layout.dim), scale, sources, self.table.store)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


def _evenly(ids: Tensor) -> Tensor:
    """int64 [bags + 1]: where each row of ``ids`` begins, and the last ends. One launch."""
    bags, width = ids.shape
    if not width:
        return torch.zeros(bags + 1, dtype=torch.int64, device=ids.device)
    return torch.arange(0, bags * width + 1, width, dtype=torch.int64, device=ids.device)
