"""A table of a store: read, write and pooled lookup by id."""

import contextlib
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ..errors import TableError
from ..kernels.arrays import Floats, Int64s
from ..kernels.slots import MODES, row_keys
from ..layout import KEY_ROW_BITS
from ..lookup.base import AnyLookup, Found, LookupTable, Use
from ..lookup.lookup import DeviceJagged, make_lookup
from ..optim.configs import RowWiseAdagradOfColumns
from ..pool.converting import floats
from ..pool.direct import OneTable
from ..pool.joined import Features, Jagged
from ..pool.stats import IdStats
from ..system.checks import Unpicklable, require_choice
from ..system.signals import shielded
from .arguments import FLOAT_TYPES, check_ids, check_jagged, refuse_traces, refuse_transforms, require_tensor
from .table_ids import TableIds
from .version import TableState

OF_MODULES: Final = frozenset(
    "are_in_memory calling columns converted dropped find_newer find_or_require first_rate follows give_rows go_on_at "  # noqa: SIM905
    "has_rows_of id_error in_pool index is_gone is_whole jagged keys_of layout local next_hyper note_change pool "
    "note_partly_trained num_changes offsets_type optimizer_in_use pooled_directly rehearse_newer require_float shown "
    "require_open require_whole require_whole_steps require_writable restore rounding_seed rows_in_memory workers "
    "use_optimizer written_rows pool_of".split()
)
"""What stores and tables have for modules and servers, and that is not completed where users type."""


class Table(Unpicklable, LookupTable):
    """One table; made by ``Store.create_table`` and found as ``store[name]``. Attributes as of ``LookupTable``.
    ``ids``: of a table with dynamic ids, which have rows; else None."""

    ids: TableIds | None = None
    _one_table: OneTable | None = None

    @property
    def columns(self) -> range:
        """Of the whole table, that this store has; all, but for tables that are sharded over processes."""
        return range(self.layout.stored_columns)

    @property
    def local(self) -> "Table":
        """Itself; of a sharded table its part."""
        return self

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, were they all in memory."""
        return len(self.rows) * self.layout.row_bytes

    @property
    def state(self) -> TableState:
        """What a commit keeps besides the rows: the count of updates, by which Adam corrects its bias, and the rate."""
        return TableState(self._step, self.learning_rate)

    def restore(self, state: TableState) -> None:
        """Go on from that state."""
        self._step = state.step
        self.go_on_at(state.learning_rate)
        self.note_change()

    def require_whole(self) -> None:
        """TableError unless all its rows are used in this store."""
        if not self.is_whole or isinstance(self.config.optimizer, RowWiseAdagradOfColumns):
            raise TableError(
                f"table {self.name!r} is only a part here, as it is sharded over ranks: open it by open_sharded, and "
                "look it up by a ShardedTieredEmbeddingBagCollection"
            )

    def keys_of(self, ids: Int64s, use: Use) -> Found:
        if self.ids is not None:
            return self._admit(ids) if use is Use.ADMIT else self.ids.find(ids, use)
        keys: Int64s = np.empty(len(ids), np.int64)
        outside = row_keys(ids, self.rows.start, self.rows.stop, self.index << KEY_ROW_BITS, keys)
        if outside >= 0:
            raise self.id_error(int(ids[outside]))
        return Found(keys)

    @shielded
    def _admit(self, ids: Int64s) -> Found:
        known = self._require_dynamic("admit")
        self.require_float()
        with self.store.shown.changing():  # rows may get other ids, and other threads look rows up
            return known.admit(ids, self._put)

    @shielded
    def give_rows(self, ids: Int64s, scores: Int64s | None = None) -> Int64s:
        """Keys of the rows that dynamic ids have or get; see ``TableIds.give``."""
        known = self._require_dynamic("give a row")
        with self.store.shown.changing():
            return known.give(ids, scores, self._put)

    def _put(self, keys: Int64s, ids: Int64s) -> None:
        self.in_pool(lambda pool: pool.tier.put_first_values(keys, ids))

    def _keys(self, ids: Tensor) -> Int64s:
        refuse_traces((ids,))
        given: Any = check_ids(ids, device=self.store.device)
        return self.keys_of(given if self.ids is None else given.astype(np.int64, copy=False), Use.READ).keys

    def are_in_memory(self, ids: Tensor) -> bool:
        """Whether to look these rows up, int64 or int32 [n], reads nothing from SSD and copies nothing to a device.
        ValueError, TypeError: wrong ids. ClosedError."""
        keys = self._keys(ids)
        return self.in_pool(lambda pool: pool.tier.are_in_memory(keys[keys >= 0]))

    def rows_in_memory(self, ids: Int64s) -> Floats | None:
        """float32 [n, embedding_dim]: what ``read`` gives, if ``are_in_memory``, else None. ValueError: an id is no
        row. TableError: the table is only a part here."""

        def look_up() -> tuple[Int64s, Floats | None]:
            if (direct := self._direct()) is not None:
                return ids | (self.index << KEY_ROW_BITS), direct.rows(ids)
            keys = self._keys(torch.from_numpy(ids))
            if (keys < 0).any():
                return keys, None
            rows = self.in_pool(lambda pool: pool.tier.read_in_memory(keys))
            return keys, None if rows is None else rows.float().numpy()

        rows: Floats | None
        keys, rows = self.store.shown.at_one(look_up)
        if rows is not None and self.store.recorder is not None:
            self.store.recorder.note_rows(keys)
        return rows

    def _direct(self) -> OneTable | None:
        if self._one_table is None or self._one_table.is_over:
            self.require_whole()
            if self.ids is not None or self.layout.is_quantized:
                return None
            self._one_table = self.pool.tier.one_table(self.index, self.config.num_embeddings)
        return self._one_table

    def read(self, ids: Tensor) -> Tensor:
        """Rows of ``ids``.

        Args:
            ids: int64 or int32 [n], any order, duplicates allowed.

        Returns:
            [n, embedding_dim] of the table's dtype (float32 where rows are quantized), a copy, on the store's device.

        Raises:
            ValueError, TypeError: wrong ids. ChecksumError: a row on SSD is damaged. ClosedError.
        """

        def look_up() -> tuple[Int64s, Tensor]:
            keys = self._keys(ids)
            self.store.require_open()
            if len(keys) and (self.ids is None or (keys >= 0).all()):
                return keys, self.in_pool(lambda pool: pool.tier.read(keys))
            has_row = torch.from_numpy(keys >= 0)
            out = torch.zeros((len(keys), self.layout.dim), dtype=self.layout.torch_dtype, device=self.store.device)
            if has_row.any():
                out[has_row] = self.in_pool(lambda pool: pool.tier.read(keys[keys >= 0]))
            if self.config.counts_unseen:
                out[~has_row] = self.first_values(ids[~has_row]).to(out)
            return keys, out

        rows: Tensor
        keys, rows = self.store.shown.at_one(look_up)
        if self.store.recorder is not None:
            self.store.recorder.note_rows(keys)
        return rows

    def read_state(self, ids: Tensor) -> Tensor:
        """Optimizer state of rows. Arguments and errors as of ``read``.

        Returns:
            float32 [n, columns of state], a copy, on the CPU: none of SGD or where ``dtype=`` of ``tierstore.open``
            leaves state out; one of row-wise Adagrad, its sum; ``embedding_dim`` of Adagrad; twice as many of Adam, the
            first moments before the second.
        """

        def look_up() -> Floats:
            keys = self._keys(ids)
            self.store.require_open()
            out, has_row = np.zeros((len(keys), self.layout.state_dim), np.float32), keys >= 0
            if has_row.any():
                out[has_row] = self.in_pool(lambda pool: pool.tier.read_state(keys[has_row])).cpu().numpy()
            return out

        return torch.from_numpy(self.store.shown.at_one(look_up))

    def written(self) -> Iterator[Tensor]:
        """Which rows were ever trained or written: int64 [n], ascending, in parts. All others have first values.

        In a store open for writing, dirty rows are written to SSD first. Rows written while parts are taken may be
        missing. DiskFullError. DamagedError: the rows' index cannot be read. ClosedError, TableError: the store was
        closed, or the table changed, before the next part.
        """
        if self.ids is not None:
            self.store.require_open()
        for part in self.store.written_rows(self) if self.ids is None else [self.ids.listed()]:
            yield torch.from_numpy(part)

    def first_values(self, ids: Tensor) -> Tensor:
        """float32 [n, embedding_dim]: what ``read`` gives of rows never written, or once dynamic ids have got rows."""
        keys = self._keys(ids) if self.ids is None else check_ids(ids, device=self.store.device).astype(np.int64)
        return floats(self.config.init.rows(keys, self.layout), self.layout)

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Overwrite weights; of equal ids the last wins. Optimizer state stays. Durable from the next commit on.

        Args:
            ids: int64 or int32 [n].
            rows: float32, float16 or bfloat16 [n, embedding_dim]; rounded to the table's dtype.

        Raises:
            ValueError, TypeError: wrong ids or rows; nothing was written. ReadOnlyError: the store was opened for
                reading, or the rows are quantized. ClosedError, DiskFullError.
        """
        self.store.require_writable()
        self.require_float()
        with self.store.shown.changing() if self.ids is not None else contextlib.nullcontext():  # ids keep their rows
            keys = self._keys(ids)
            if self.ids is not None:
                way = "forward passes that train admit ids, and Table.admit does"
                self.ids.require_rows(check_ids(ids, device=self.store.device), keys, way)
            if require_tensor(rows, "rows").dtype not in FLOAT_TYPES:
                raise TypeError(f"rows must be float32, float16 or bfloat16, not {rows.dtype}; rows.float() converts")
            if rows.shape != (len(keys), self.layout.dim):
                raise ValueError(f"rows must be [{len(keys)}, {self.layout.dim}], not {list(rows.shape)}")
            if len(keys):
                new = rows.detach().to(self.layout.torch_dtype)
                self.note_change()
                self.in_pool(lambda pool: pool.tier.write(keys, new))

    def admit(self, ids: Tensor) -> int:
        """Use ids, int64 or int32 [n], as a batch that trains does: they count, and get rows by the rules of
        ``config.ids``.

        Returns how many of them, duplicates included, have a row then (with ``unseen="error"`` all, or IdError).
        TableError: the table's ids are not dynamic, or it is only a part here. ReadOnlyError, ClosedError. Others as of
        ``read``.
        """
        self.store.require_writable()
        if not self.is_whole:
            raise TableError(f"table {self.name!r} is sharded over ranks, which admit ids by training alone")
        found = self._admit(check_ids(ids, device=self.store.device).astype(np.int64))
        return int(np.count_nonzero(found.keys >= 0))

    @shielded
    def evict(self, ids: Tensor) -> int:
        """Take the rows from ids, int64 or int32 [n], which become as ids never seen; those that an in-flight batch
        uses stay. Returns how many had a row. Errors as of ``admit``."""
        self.store.require_writable()
        known = self._require_dynamic("evict")
        given = check_ids(ids, device=self.store.device).astype(np.int64)
        with self.store.shown.changing():
            return known.evict(given)

    def id_stats(self) -> IdStats:
        """Of dynamic ids: how many have rows, and what became of others. TableError: the table's are not dynamic."""
        self.store.require_open()
        known = self._require_dynamic("count")
        _ = known.counts  # which reads them
        return known.stats()

    def _require_dynamic(self, action: str) -> TableIds:
        if self.ids is None:
            raise TableError(
                f"table {self.name!r} has a row for each id in [0, {self.config.num_embeddings}), so there is none to "
                f"{action}: make it with TableConfig(ids=tierstore.DynamicIds())"
            )
        return self.ids

    def pooled(
        self, ids: Tensor, offsets: Tensor, *, mode: str | None = None, per_sample_weights: Tensor | None = None,
        include_last_offset: bool = True,
    ) -> Tensor:  # fmt: skip
        """One pooled row a bag, without gradients (``TieredEmbeddingBag`` has them).

        Args:
            ids: int64 or int32 [n].
            offsets: int64 or int32, as ``include_last_offset`` says; bag i is ``ids[offsets[i]:offsets[i + 1]]``.
            mode: "sum", "mean" or "max"; default: ``config.pooling``, by which the table is trained and served. An
                empty bag gives zeros.
            per_sample_weights: float32 [n], with "sum" only.
            include_last_offset: True: offsets are [bags + 1], from 0 to n. False: offsets are [bags], without the end.

        Returns:
            float32 [bags, embedding_dim], on the store's device.
        """
        refuse_traces((ids, offsets))
        mode = self.config.pooling if mode is None else mode
        if mode not in MODES:
            require_choice(mode, tuple(MODES), "mode")
        last: dict[str, Any] = {"is_last_given": include_last_offset}
        pooled = self.pooled_directly(ids, offsets, mode, **last) if per_sample_weights is None else None
        if pooled is not None:
            return pooled
        jagged = self.jagged(ids, offsets, mode=mode, per_sample_weights=per_sample_weights, **last)
        lookup = self.lookup(jagged, mode=mode)
        out = torch.empty((jagged.batch, self.layout.dim), dtype=torch.float32, device=self.store.device)
        self.store.shown.at_one(lambda: lookup.forward(out, keep=False))
        if lookup.joined.unseen is not None:
            lookup.joined.unseen.add(out, mode)
        if self.store.recorder is not None:
            self.store.recorder.note_lookups([lookup.joined])
        return out

    def pooled_directly(self, ids: Tensor, offsets: Tensor, mode: str, *, is_last_given: bool = True) -> Tensor | None:
        """``pooled`` by a ``OneTable``; None where a ``Lookup`` must do it, as for the mode "max". Unless
        ``is_last_given``, ``offsets`` are all but the last."""
        if mode == "max":
            return None
        pooled, store = None, self.store
        try:
            if (one := self._direct()) is not None:
                pooled = store.shown.at_one(partial(one.pooled, ids, offsets, MODES[mode], is_last_given))
        except RuntimeError:
            refuse_transforms()
            raise
        if pooled is not None and store.recorder is not None:
            ends = offsets.numpy() if is_last_given else np.append(offsets.numpy(), len(ids))
            store.recorder.note_bags(self.index, self.config.num_embeddings, ids.numpy(), ends)
        return pooled

    def jagged(
        self, ids: Tensor, offsets: Tensor, *, mode: str, per_sample_weights: Tensor | None = None,
        is_last_given: bool = True,
    ) -> Jagged | DeviceJagged:  # fmt: skip
        """Checked ids of one feature; see ``check_jagged``."""
        return check_jagged(
            ids, offsets, per_sample_weights, mode, device=self.store.device, offsets_type=self.store.offsets_type,
            is_last_given=is_last_given,
        )  # fmt: skip

    def lookup(self, jagged: Jagged | DeviceJagged, *, mode: str) -> AnyLookup:
        """A lookup of one feature in this table."""
        return make_lookup(jagged.join(self._alone, [0]), mode=mode)

    @cached_property
    def _alone(self) -> Features:
        self.require_whole()
        return Features.of([self], [0])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_MODULES]

    def __repr__(self) -> str:
        config = self.config
        return f"<Table {config.name!r} {config.num_embeddings} x {config.embedding_dim} {config.dtype}>"
