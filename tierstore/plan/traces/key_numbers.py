"""Numbers from other programs' files as row keys."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...rows import KEY_ROW_BITS
from ..accesses import Accesses, numbered
from .batches import starts_of

__all__ = ["accesses_by_number", "require_numbered"]

_MAX_TABLES: Final = 4096
_MAX_NUMBERED: Final = (1 << 31) - 1


def accesses_by_number(numbers: NDArray[np.uint64], batch_accesses: int) -> Accesses:
    """Accesses to what the numbers, uint64 [n], name.

    They are row keys, ``table index << 40 | row``, if no table's index is 4,096 or more; rows of one table are. All
    others, as hashes are, become rows of one table, numbered from 0 in order of first use. Tables are called t0, t1,
    ...

    Raises:
        ValueError: they are too many to be numbered.
    """
    tables = (int(numbers.max()) >> KEY_ROW_BITS) + 1 if len(numbers) else 1
    keys: Any = numbers.view(np.int64)
    if tables > _MAX_TABLES:
        require_numbered(len(keys))
        keys, tables = numbered(keys).numbers.astype(np.int64), 1
    names = tuple(f"t{index}" for index in range(tables))
    return Accesses(keys, starts_of(len(keys), batch_accesses), names)


def require_numbered(count: int) -> None:
    """ValueError where ``accesses.numbered`` has no numbers left."""
    if count > _MAX_NUMBERED:
        raise ValueError(f"{count:,} accesses; rows of at most {_MAX_NUMBERED:,} can be told apart: split the file")
