"""Three arrays in a folder: ``dense.npy`` [N, C], ``sparse.npy`` [N, F], ``label.npy`` [N], mapped into memory."""

import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...kernels.arrays import Bools
from .base import CRITEO_SCHEMA, MISSING, DataError, RawRows, Reader, Schema, fits_float32, require_data_file

_MAX_REASON: Final = 200
_HEAD_BYTES: Final = 12
_MAX_HEADER_BYTES: Final = 10_000
_MAX_CATEGORY: Final = np.iinfo(np.int64).max
_UNREADABLE: Final = (
    ArithmeticError,
    EOFError,
    MemoryError,
    OSError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    tokenize.TokenError,
)
"""What numpy lets out for one broken header or another, which it reads as Python literals."""


class NpyReader(Reader):
    """Reads arrays of any integer or floating type, one row of each at a time.

    Dense values are raw ones, NaN where missing; categories are integers, negative where missing; labels are 0 or 1.

    Raises:
        DataError: where a file is missing, is no array of the right kind, or is longer than another.
    """

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA) -> None:
        self.path = Path(path)
        self.schema = schema
        self._label = _map(self.path / "label.npy", "biuf", ())
        self._dense = _map(self.path / "dense.npy", "iuf", (len(schema.dense),))
        self._sparse = _map(self.path / "sparse.npy", "iu", (len(schema.sparse),))
        lengths = {"label.npy": len(self._label), "dense.npy": len(self._dense), "sparse.npy": len(self._sparse)}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{self.path}: the arrays differ in rows: {lengths}")

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        stop = len(self._label) if stop_row is None else min(stop_row, len(self._label))
        for begin in range(start_row, stop, chunk_rows):
            rows = slice(begin, min(begin + chunk_rows, stop))
            label, dense, sparse = self._label[rows], self._dense[rows], self._sparse[rows]
            self._check("label.npy", begin, label, np.isin(label, (0, 1)), "0 or 1")
            self._check("dense.npy", begin, dense, fits_float32(dense), "finite as float32; NaN stands for missing")
            self._check("sparse.npy", begin, sparse, sparse <= _MAX_CATEGORY, "below 2**63")
            categories = sparse.astype(np.int64)
            np.maximum(categories, MISSING, out=categories)
            yield RawRows(labels=label.astype(np.float32), dense=dense.astype(np.float32), categories=categories)

    def _check(self, name: str, begin: int, rows: NDArray[Any], good: Bools, expected: str) -> None:
        if not good.all():
            row, *column = (int(indexes[0]) for indexes in np.nonzero(~good))
            place = f"row {begin + row}" + (f", column {column[0]}" if column else "")
            raise DataError(f"{self.path / name}, {place}: {rows[(row, *column)]} is not {expected}")


def _map(path: Path, kinds: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if not path.exists():
        raise DataError(f"{path} does not exist; the npy format needs dense.npy, sparse.npy and label.npy")
    require_data_file(path)
    _check_header(path)
    try:
        with np.errstate(over="raise"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the header is Python 2's, and read all the same
            array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except _UNREADABLE as error:
        raise DataError(f"{path} is not an npy file, or is cut short: {str(error)[:_MAX_REASON]}") from error
    if array.dtype.kind not in kinds or array.shape[1:] != shape or not array.ndim:
        wanted = f"[rows{''.join(f', {n}' for n in shape)}]"
        held = f"{str(array.dtype)[:_MAX_REASON]} {list(array.shape)}"
        raise DataError(f"{path} holds {held}; expected {wanted} of numbers ({kinds})")
    return array


def _check_header(path: Path) -> None:
    """DataError for a header that claims to be long: numpy would read up to 4 GiB of it before it looks."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    length = int.from_bytes(head[8 : 10 if head[6:7] == b"\x01" else 12], "little")
    if length > _MAX_HEADER_BYTES:
        raise DataError(f"{path} is not an npy file, or is cut short: its header would take {length:,} bytes")
