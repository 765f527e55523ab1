"""Rows converted from their stored dtype as they are read, without their optimizer state.

A store opened for reading may keep rows in fewer bytes in memory than on SSD. A ``Converter`` between the cold tier and
the caches converts them.
"""

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DamagedError, TableError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.floats import code_of_dtype
from ..kernels.quantized import pack_rows, unpack_rows
from ..layout import KEY_ROW_BITS, ROW_MASK, DtypeName, RowLayout

_CHUNK_BYTES: Final = 1 << 20  # rows read at a time, before they are converted
_NARROWER: Final[dict[DtypeName, tuple[DtypeName, ...]]] = {
    "float32": ("float32", "float16", "bfloat16", "int8", "int4"),
    "float16": ("float16", "int8", "int4"),
    "bfloat16": ("bfloat16", "int8", "int4"),
    "int8": ("int8",),
    "int4": ("int4",),
}
"""What rows stored in a dtype can be kept in memory as."""
RowSource = Callable[[Int64s, Int32s, Words, Words, Bools], None]
"""``ColdTier.read``, whatever version it is of."""


def layout_as(stored: RowLayout, dtype: DtypeName | None) -> RowLayout:
    """How rows lie in memory in a dtype (None: their own), without optimizer state. ValueError: they are stored in
    fewer bits, or quantized."""
    wanted = dtype or stored.dtype
    choices = _NARROWER[stored.dtype]
    if wanted not in choices:
        raise ValueError(f"rows stored as {stored.dtype} cannot be kept as {wanted}; choose from {', '.join(choices)}")
    return RowLayout(dim=stored.dim, dtype=wanted, page_bytes=stored.page_bytes)


def raw_weights(rows: Tensor) -> NDArray[Any]:
    """Numpy view of weights as kernels see them: float32, or uint16 for the dtypes of 16 bits."""
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def values_of(weights: Words, layout: RowLayout) -> Tensor:
    """[n, dim] of weights, uint64 [n, words], in their dtype, float32 of quantized rows; may share their memory."""
    if layout.is_quantized:
        values, slots = np.empty((len(weights), layout.dim), np.float32), np.arange(len(weights), dtype=np.int32)
        unpack_rows(slots, weights.view(np.uint8), layout.dim, code_of_dtype(layout.dtype), values)
        return torch.from_numpy(values)
    return torch.from_numpy(weights.view(layout.numpy_dtype)[:, : layout.dim]).view(layout.torch_dtype)


def floats(weights: Words, layout: RowLayout) -> Tensor:
    """``values_of``, as float32."""
    return values_of(weights, layout).to(torch.float32).contiguous()


def converted(weights: Words, before: RowLayout, after: RowLayout) -> tuple[Words, int]:
    """Weights in another dtype: (uint64 [n, words], -1 or the first row that does not fit it).

    A row fits if it is finite and its numbers are not too large for the dtype. int8 and int4 have the bits that
    ``torch.ops.quantized.embedding_bag_byte_prepack`` and ``embedding_bag_4bit_prepack`` give.

    Args:
        weights: uint64 [n, words] of the layout ``before``.
    """
    if before.dtype == after.dtype:
        return weights, -1
    values = floats(weights, before)
    words = np.zeros((len(weights), after.weight_words), np.uint64)
    if after.is_quantized:
        slots = np.arange(len(weights), dtype=np.int32)
        return words, int(pack_rows(values.numpy(), slots, words.view(np.uint8), after.dim, code_of_dtype(after.dtype)))
    rounded = values.to(after.torch_dtype)
    words.view(after.numpy_dtype)[:, : after.dim] = rounded.view(torch.uint16).numpy()
    unfit = torch.nonzero(~rounded.isfinite().all(1))
    return words, int(unfit[0]) if len(unfit) else -1


class _Layouts(NamedTuple):
    """Of a table's rows."""

    name: str
    stored: RowLayout
    kept: RowLayout


class Converter:
    """Reads stored rows and gives them as they are kept in memory."""

    def __init__(self) -> None:
        self._tables: dict[int, _Layouts] = {}

    def keep(self, table_index: int, name: str, stored: RowLayout, dtype: DtypeName | Literal["stored"]) -> RowLayout:
        """Make a table known: how its rows lie in memory. TableError: they cannot be kept as ``dtype``."""
        try:
            kept = layout_as(stored, None if dtype == "stored" else dtype)
        except ValueError as error:
            raise TableError(f"table {name!r}: {error}") from None
        self._tables[table_index] = _Layouts(name, stored, kept)
        return kept

    def read(self, source: RowSource, keys: Int64s, slots: Int32s, weights: Words, present: Bools) -> None:
        """What ``ColdTier.read`` does, by a source of stored rows; there is no state. DamagedError, too, for a row that
        does not fit the dtype."""
        tables = keys >> KEY_ROW_BITS
        layouts: dict[RowLayout, list[int]] = {}
        for table in np.unique(tables).tolist():
            layouts.setdefault(self._tables[table].stored, []).append(table)
        for stored, own in layouts.items():
            chosen = np.flatnonzero(np.isin(tables, own)) if len(layouts) > 1 else np.arange(len(keys))
            step = max(1, _CHUNK_BYTES // stored.row_bytes)
            for first in range(0, len(chosen), step):
                part = chosen[first : first + step]
                present[part] = self._read_chunk(source, self._tables[own[0]], keys[part], slots[part], weights)

    def _read_chunk(self, source: RowSource, layouts: _Layouts, keys: Int64s, slots: Int32s, weights: Words) -> Bools:
        """Read some rows of one stored layout into ``weights[slots]``; bool [n], whether they were ever written."""
        _, stored, kept = layouts
        count = len(keys)
        rows = np.empty((count, stored.weight_words), np.uint64)
        state = np.empty((count, stored.state_words), np.uint64)
        present = np.empty(count, np.bool_)
        source(np.ascontiguousarray(keys), np.arange(count, dtype=np.int32), rows, state, present)
        words, bad = converted(rows[present], stored, kept)
        if bad >= 0:
            key = int(keys[present][bad])
            raise DamagedError(
                f"row {key & ROW_MASK} of table {self._tables[key >> KEY_ROW_BITS].name!r} holds NaN, infinity or "
                f"numbers too large for {kept.dtype}; open the store with another dtype"
            )
        weights[slots[present]] = words
        return present
