"""Keys in a numpy file: one array of integers, in the order of access."""

import warnings
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...system.excerpt import excerpt
from ..accesses import Accesses
from .key_numbers import accesses_by_number

__all__ = ["read_npy", "write_npy"]

_CHUNK: Final = 1 << 20
_KINDS: Final = ("int32", "int64", "uint32", "uint64")


def read_npy(path: Path, batch_accesses: int) -> Accesses:
    """Read the array, a chunk at a time: 8 bytes of memory a key, and 24 where they are no row keys.

    Raises:
        ValueError: it is no such array, is cut short, or has a negative number.
    """
    with path.open("rb") as file:
        dtype, count = _header(file)
        if path.stat().st_size - file.tell() < count * dtype.itemsize:
            raise ValueError(f"it is cut short: its header says {count:,} keys of {dtype.itemsize} bytes")
        numbers = np.empty(count, np.uint64)
        for begin in range(0, count, _CHUNK):
            part: NDArray[Any] = np.fromfile(file, dtype, min(_CHUNK, count - begin))
            negative = np.flatnonzero(part < 0)
            if len(negative):
                raise ValueError(
                    f"number {begin + int(negative[0])} is {part[negative[0]]}; keys are 0 or more. Hashes of 64 bits "
                    "are kept as uint64"
                )
            numbers[begin : begin + len(part)] = part
    return accesses_by_number(numbers, batch_accesses)


def _header(file: IO[bytes]) -> tuple[np.dtype[Any], int]:
    """(dtype, keys)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the header is Python 2's, and read all the same
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
    except Exception as error:  # whatever numpy lets out for one broken header or another
        raise ValueError(f"its header is not one of numpy's: {excerpt(str(error))}") from None
    if len(shape) != 1 or dtype.newbyteorder("=").name not in _KINDS:
        raise ValueError(f"it holds {dtype} {list(shape)}; keys are one array of one dimension: {', '.join(_KINDS)}")
    return dtype, int(shape[0])


def write_npy(accesses: Accesses, file: IO[bytes]) -> None:
    """Write the row keys, int64; batches and names of tables are not in such a file."""
    npy.write_array(file, accesses.keys, allow_pickle=False)
