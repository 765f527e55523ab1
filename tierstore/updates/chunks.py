"""One chunk of an update: ids and rows, laid out so that zlib finds something, and taken apart without trusting it.

Neighbouring ids differ by little, and the first bytes of neighbouring floats are alike. So ids are written as
differences, and of both ids and rows first all elements' first bytes, then all their second bytes, and so on.
"""

import zlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..io.reads import CHUNK_BYTES
from ..layout import RowLayout

MAX_CHUNK_BYTES: Final = 2 * CHUNK_BYTES
"""A chunk before it was compressed: what a reader holds in memory, some times over, for a few bytes of a file. A
publisher reads ``CHUNK_BYTES`` of rows at a time, and a row of 8 bytes comes with an id of as many."""
_ID_BYTES: Final = 8


def decompress(data: bytes, raw_bytes: int) -> bytes:
    """Exactly ``raw_bytes``, and never more memory than that; FormatError if it is not that many, or not of zlib."""
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, raw_bytes + 1)
    except zlib.error as error:
        raise FormatError(f"a chunk cannot be decompressed ({error})") from error
    if len(raw) != raw_bytes or not inflater.eof or inflater.unused_data:
        raise FormatError(f"a chunk does not decompress to the {raw_bytes} bytes that its header says")
    return raw


def _planes(values: NDArray[Any]) -> bytes:
    """First bytes of all elements, then second bytes, and so on."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return flat.reshape(-1, values.dtype.itemsize).T.tobytes()


def _from_planes(raw: bytes, dtype: "np.dtype[Any]") -> NDArray[Any]:
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)


def chunk_bytes(num_rows: int, layout: RowLayout) -> int:
    """Of a chunk with so many rows, before compression."""
    return num_rows * (_ID_BYTES + layout.stored_columns * layout.numpy_dtype.itemsize)


def pack_chunk(ids: NDArray[np.int64], weights: NDArray[np.uint64], layout: RowLayout) -> bytes:
    """A chunk, not compressed yet, of ascending ids [n] and weights [n, weight words], without what pads a row."""
    rows = weights.view(layout.numpy_dtype)[:, : layout.stored_columns]
    return _planes(np.diff(ids, prepend=np.int64(0))) + _planes(rows)


def unpack_chunk(raw: bytes, num_rows: int, layout: RowLayout) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Inverse of ``pack_chunk``; ids may be anything. FormatError for another length than so many rows have."""
    if len(raw) != chunk_bytes(num_rows, layout):
        raise FormatError(f"a chunk has {len(raw)} bytes, and {num_rows} rows have {chunk_bytes(num_rows, layout)}")
    split = num_rows * _ID_BYTES
    with np.errstate(over="ignore"):
        ids = np.cumsum(_from_planes(raw[:split], np.dtype("<i8")))
    values = _from_planes(raw[split:], layout.numpy_dtype).reshape(num_rows, layout.stored_columns)
    weights = np.zeros((num_rows, layout.weight_words), np.uint64)
    weights.view(layout.numpy_dtype)[:, : layout.stored_columns] = values
    return ids, weights
