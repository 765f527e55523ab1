"""Three arrays in a folder: ``dense.npy`` [N, C], ``sparse.npy`` [N, F], ``label.npy`` [N], mapped into memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import CRITEO_SCHEMA, MISSING, DataError, RawRows, Reader, Schema

__all__ = ["NpyReader"]


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
        lengths = {name: len(array) for name, array in self._named()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"{self.path}: the arrays differ in rows: {lengths}")

    def _named(self) -> list[tuple[str, NDArray[Any]]]:
        return [("label.npy", self._label), ("dense.npy", self._dense), ("sparse.npy", self._sparse)]

    def read_chunks(self, start_row: int, stop_row: int | None, chunk_rows: int) -> Iterator[RawRows]:
        stop = len(self._label) if stop_row is None else min(stop_row, len(self._label))
        for begin in range(start_row, stop, chunk_rows):
            rows = slice(begin, min(begin + chunk_rows, stop))
            labels = self._label[rows].astype(np.float32)
            if not np.isin(labels, (0, 1)).all():
                broken = begin + int(np.flatnonzero(~np.isin(labels, (0, 1)))[0])
                raise DataError(f"{self.path / 'label.npy'}, row {broken}: {self._label[broken]} is not 0 or 1")
            categories = self._sparse[rows].astype(np.int64)
            np.maximum(categories, MISSING, out=categories)
            yield RawRows(labels=labels, dense=self._dense[rows].astype(np.float32), categories=categories)


def _map(path: Path, kinds: str, shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; the npy format needs dense.npy, sparse.npy and label.npy") from None
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is not an npy file, or is cut short: {error}") from error
    if array.dtype.kind not in kinds or array.shape[1:] != shape or not array.ndim:
        wanted = f"[rows{''.join(f', {n}' for n in shape)}]"
        raise DataError(f"{path} holds {array.dtype} {list(array.shape)}; expected {wanted} of numbers ({kinds})")
    return array
