"""The fewest bytes that pooling and updates must move through device memory: the limit they are measured against.

Counted once: each distinct row (read, and in an update also written), each id, each offset, each gradient, each
result. No kernel can move less; what a kernel reads a second time, it should find in a cache.
"""

from typing import Final, NamedTuple

__all__ = ["Work", "pooled_bytes", "updated_bytes"]

_INDEX_BYTES: Final = 4
"""Of an id, and of an offset, as the kernels take them."""


class Work(NamedTuple):
    """One batch.

    Attributes:
        positions: ids.
        distinct: rows.
        bags: each has one result, or one gradient.
        weight_bytes: of a row.
        result_bytes: of a bag's result, and of its gradient.
    """

    positions: int
    distinct: int
    bags: int
    weight_bytes: int
    result_bytes: int


def _index_bytes(work: Work) -> int:
    return _INDEX_BYTES * (work.positions + work.bags + 1)


def pooled_bytes(work: Work) -> int:
    """Of a forward: a result is written, not zeroed, read and written."""
    return work.distinct * work.weight_bytes + work.bags * work.result_bytes + _index_bytes(work)


def updated_bytes(work: Work, state_bytes: int) -> int:
    """Of a backward with its update.

    Args:
        state_bytes: of a row, that the optimizer reads and writes.
    """
    rows = 2 * work.distinct * (work.weight_bytes + state_bytes)
    return rows + work.bags * work.result_bytes + _index_bytes(work)
