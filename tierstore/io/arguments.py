"""What the arguments of reads and writes must be."""

import numpy as np
from numpy.typing import NDArray

from ..rows import KEY_ROW_BITS, MAX_ROWS, RowLayout

__all__ = ["check_arrays", "check_widths", "require_distinct"]

Int64s = NDArray[np.int64]
Int32s = NDArray[np.int32]
Words = NDArray[np.uint64]


def check_arrays(keys: Int64s, slots: Int32s, weights: Words, state: Words) -> None:
    """Raises ValueError for a type or shape the kernels do not take, and for slots out of range."""
    if keys.dtype != np.int64 or keys.ndim != 1 or not keys.flags.c_contiguous:
        raise ValueError("keys must be a contiguous int64 vector")
    if slots.dtype != np.int32 or slots.shape != keys.shape or not slots.flags.c_contiguous:
        raise ValueError("slots must be a contiguous int32 vector as long as keys")
    for name, arena in (("weights", weights), ("state", state)):
        if arena.dtype != np.uint64 or arena.ndim != 2 or not arena.flags.c_contiguous:
            raise ValueError(f"{name} must be a contiguous uint64 matrix")
    if len(weights) != len(state):
        raise ValueError(f"weights has {len(weights)} slots, state has {len(state)}")
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= len(weights)):
        raise ValueError(f"slots must be in [0, {len(weights)})")


def check_widths(layout: RowLayout, weights: Words, state: Words) -> None:
    """Raises ValueError unless a slot holds a row of the layout."""
    if weights.shape[1] != layout.weight_words or state.shape[1] != layout.state_words:
        raise ValueError(
            f"weights and state have {weights.shape[1]} and {state.shape[1]} words a row, the table's layout has "
            f"{layout.weight_words} and {layout.state_words}"
        )


def require_distinct(keys: Int64s) -> None:
    """Raises ValueError if a key is given twice."""
    ordered = np.sort(keys)
    if (twice := ordered[1:] == ordered[:-1]).any():
        key = int(ordered[int(np.argmax(twice))])
        raise ValueError(f"keys has row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS} twice")
