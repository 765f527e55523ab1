"""Stochastic rounding of updated weights to float16 and bfloat16.

A weight between two neighbouring halfs, ``low <= |weight| <= high``, becomes ``high`` with probability
``(|weight| - low) / (high - low)``, else ``low``, so that on average it stays what it was (G. E. Forsythe: Reprint of
a note on rounding-off errors, SIAM Review 1, 1959). Steps much smaller than the gap between two halfs then add up,
where rounding to nearest drops each of them (S. Gupta, A. Agrawal, K. Gopalakrishnan, P. Narayanan: Deep Learning with
Limited Numerical Precision, ICML 2015).

- A weight that is a half stays it. Signs are kept: ``high`` is the one away from zero.
- There is nothing finite to round up to beyond the largest half. There, and for infinity and NaN, a weight becomes what
  rounding to nearest gives: the largest half, or from half a gap above it on (65520 in float16) infinity.

Random bits are those of ``init``: SplitMix64's output function of a counter. They depend on the seed of the table's
initializer, the number of the table's update, the row's key (table index and row) and the column, and on nothing else:
neither threads nor tiers nor the parts that a batch is worked off in change a bit.
"""

from typing import Final

import numpy as np

from . import floats
from .arrays import Floats, Weights
from .floats import BFLOAT16
from .hashing import mix64, unit
from .jit import inline

NEAREST: Final = 0
"""The seed of updates that round to nearest."""
_DOMAIN: Final = 0x726F756E64696E67
"""Any constant: keeps these bits apart from those of first values, which start from the same seed."""


def update_seed(seed: int, step: int) -> int:
    """What one update of a table, numbered from 1, draws its random bits from, given the seed of the table's
    initializer: in [1, 2**64), and so not ``NEAREST``."""
    table_bits = int(mix64(np.uint64(int(mix64(np.uint64(seed % 2**64))) ^ _DOMAIN)))
    return int(mix64(np.uint64(table_bits ^ step % 2**64))) | 1


@inline
def stochastic_bits(value: np.float32, dtype_code: int, random: np.uint64) -> np.uint16:
    """uint16 bit pattern of one of the two halfs next to a float32 value.

    The outer one is chosen if ``random / 2**64`` is below its probability. That is a multiple of 2**-16 in bfloat16, of
    2**-13 in float16 from 2**-14 on, and taken to within 2**-53 below: so many bits of ``random`` matter.

    Args:
        dtype_code: ``floats.BFLOAT16`` or ``floats.FLOAT16``.
        random: uint64.
    """
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if magnitude >= np.uint32(0x7F7F0000 if dtype_code == BFLOAT16 else 0x477FE000):  # the largest half
        return floats.float_to_bits(value, dtype_code)
    if dtype_code == BFLOAT16:
        low = np.uint32(magnitude >> np.uint32(16))
        is_up = np.uint32(random >> np.uint64(48)) < np.uint32(magnitude & np.uint32(0xFFFF))
    elif magnitude >= np.uint32(0x38800000):
        low = np.uint32(np.uint32(magnitude - np.uint32(0x38000000)) >> np.uint32(13))
        is_up = np.uint32(random >> np.uint64(51)) < np.uint32(magnitude & np.uint32(0x1FFF))
    else:
        # Halfs below 2**-14 are the multiples of 2**-24: scaled by a power of two, which is exact, they are integers.
        scaled = np.float32(magnitude.view(np.float32) * np.float32(16777216))
        low = np.uint32(scaled)
        is_up = unit(random) < np.float64(np.float32(scaled - np.float32(low)))
    return np.uint16(sign | np.uint32(low + np.uint32(is_up)))


@inline
def store_row(values: Floats, row: Weights, dim: int, dtype_code: int, seed: np.uint64, key: int) -> None:
    """Round the first ``dim`` columns of ``values`` (float32) into ``row`` (uint16), by what ``update_seed`` gave, or
    ``NEAREST``, and the row's key, int64."""
    if seed == np.uint64(NEAREST):
        for column in range(dim):
            row[column] = floats.float_to_bits(values[column], dtype_code)
        return
    row_bits = mix64(np.uint64(seed ^ np.uint64(key)))
    for column in range(dim):
        row[column] = stochastic_bits(values[column], dtype_code, mix64(np.uint64(row_bits + np.uint64(column))))
