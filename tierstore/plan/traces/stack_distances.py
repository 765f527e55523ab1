"""Accesses whose LRU stack distances follow a profile.

The stack distance of an access is the number of distinct rows since the row's last use, the row itself counted: an LRU
cache has the row if its rows are no fewer (R. Mattson et al., "Evaluation Techniques for Storage Hierarchies", IBM
Systems Journal, 1970). Distance 0 stands for a row's first use.

A profile is a text file of two lines: distances, ascending, and the share of accesses up to each of them, both with
commas between. It is the format of DeepRecSys and of DLRM's synthetic data.
"""

import os
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...kernels.hashing import mix64, unit
from ...kernels.jit import inline, kernel
from ...rows import MAX_ROWS
from ...system.excerpt import excerpt
from ..accesses import Accesses
from .batches import starts_of
from .scatter import scatter_of, scattered
from .zipf import random_base

__all__ = ["StackDistances", "draw_stack_distances", "read_stack_distances"]

_TABLE: Final = "t0"
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MAX_BYTES: Final = 1 << 28
_MAX_DRAWS: Final = 1 << 31
_SLACK: Final = 1024
_GONE: Final = -1
_LARGEST_LAST: Final = 1.01
"""Shares in a file are sums of rounded numbers."""


class StackDistances(NamedTuple):
    """A profile.

    Attributes:
        distances: int64 [k], ascending, from 0 on.
        cumulated: float64 [k], ascending; the share of accesses with this distance or a smaller one; the last is 1.
    """

    distances: NDArray[np.int64]
    cumulated: NDArray[np.float64]


def read_stack_distances(path: str | os.PathLike[str]) -> StackDistances:
    """Read a profile.

    Raises:
        ValueError: it is none; names the file, and what is wrong. FileNotFoundError.
    """
    size = os.stat(path).st_size
    if not 0 < size <= _MAX_BYTES:
        raise ValueError(f"{os.fspath(path)} has {size} bytes; a profile of stack distances has two lines of numbers")
    lines = [line for line in Path(path).read_bytes().split(b"\n") if line.strip()]
    try:
        if len(lines) != 2:
            raise ValueError(f"{len(lines)} lines, where two are expected: distances, and shares up to each")
        return _checked(_numbers(lines[0], np.int64), _numbers(lines[1], np.float64))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)} is no profile of stack distances: {error}") from None


def _numbers(line: bytes, kind: Any) -> Any:
    convert = int if kind is np.int64 else float
    return np.array([convert(field) for field in line.split(b",")], kind)


def _checked(distances: NDArray[np.int64], cumulated: NDArray[np.float64]) -> StackDistances:
    if len(distances) != len(cumulated):
        raise ValueError(f"{len(distances)} distances and {len(cumulated)} shares")
    if distances[0] < 0 or (np.diff(distances) <= 0).any():
        raise ValueError("distances must ascend, from 0 on")
    last = float(cumulated[-1])
    if not (cumulated[0] >= 0 and (np.diff(cumulated) >= 0).all() and 1 / _LARGEST_LAST < last < _LARGEST_LAST):
        raise ValueError(f"shares must ascend from 0 to 1; the last is {excerpt(last)}")
    return StackDistances(distances, cumulated / last)


def draw_stack_distances(
    profile: StackDistances, count: int, *, seed: int, rows: int | None = None, batch_accesses: int = 1
) -> Accesses:
    """Accesses of one table, each with a distance drawn from the profile.

    A distance that the table does not have yet, as at the start, becomes a first use. When all ``rows`` are in use,
    what would be a first use is of the row that was not used for longest. Which rows are used first is scattered over
    the table. Memory: 8 bytes an access, and 28 for each row down to the largest distance, or for each of ``rows``
    where they can run out.

    Args:
        rows: of the table; default: as many as there are accesses, which never run out.

    Raises:
        ValueError, TypeError: an argument that cannot be; names it and what is accepted.
    """
    require_int(count, "count", 0, _MAX_DRAWS)
    rows = max(1, count) if rows is None else rows
    require_int(rows, "rows", 1, MAX_ROWS)
    distances, cumulated = _checked(np.asarray(profile.distances, np.int64), np.asarray(profile.cumulated, np.float64))
    kept = rows if rows < count else min(int(distances[-1]), count)
    capacity = 2 * kept + _SLACK
    keys = np.empty(count, np.int64)
    _draw(
        distances, cumulated, kept, random_base(seed), *scatter_of(rows, 0),
        np.zeros(capacity + 1, np.int32), np.full(capacity, _GONE, np.int64), keys,
    )  # fmt: skip
    return Accesses(keys, starts_of(count, batch_accesses), (_TABLE,))


@inline
def _add(tree: Any, place: Any, by: Any) -> None:
    """Fenwick's tree (P. Fenwick, "A new data structure for cumulative frequency tables", 1994): one place more."""
    index = place + 1
    while index < tree.shape[0]:
        tree[index] += by
        index += index & -index


@inline
def _place_of(tree: Any, number: Any, top_bit: Any) -> Any:
    """The place of the ``number``-th row, from 0, counted from the least recently used."""
    index, left, bit = 0, number, top_bit
    while bit:
        if index + bit < tree.shape[0] and tree[index + bit] <= left:
            index += bit
            left -= tree[index]
        bit >>= 1
    return index


@inline
def _compact(tree: Any, places: Any, live: Any, kept: Any) -> Any:
    """Move the ``kept`` most recently used rows to the front; returns how many there are."""
    skipped, count = max(0, live - kept), 0
    for place in range(places.shape[0]):
        row = places[place]
        if row != _GONE:
            if skipped:
                skipped -= 1
            else:
                places[count] = row
                count += 1
    for place in range(count, places.shape[0]):
        places[place] = _GONE
    for index in range(1, tree.shape[0]):
        # Of the places (index - lowest bit, index], those that are filled: all up to count.
        tree[index] = max(0, min(index, count) - (index - (index & -index)))
    return count


@kernel
def _draw(
    distances: Any, cumulated: Any, kept: int, base: Any, rows: Any, mask: Any, shift: Any, keys: Any, tree: Any,
    places: Any, out: Any,
) -> None:  # fmt: skip
    """``places``: the row that was used at each time, if not since; ``tree`` counts those."""
    top_bit = 1
    while 2 * top_bit < tree.shape[0]:
        top_bit *= 2
    live, used, now = 0, 0, 0
    for position in range(out.shape[0]):
        share = unit(mix64(np.uint64(base + np.uint64(position) * _GOLDEN)))
        distance = distances[np.searchsorted(cumulated, share, side="right")]
        is_first = distance == 0 or distance > live
        if is_first and np.uint64(used) < rows:
            row = scattered(used, rows, mask, shift, keys)
            used += 1
        else:
            place = _place_of(tree, 0 if is_first else live - distance, top_bit)
            row = places[place]
            places[place] = _GONE
            _add(tree, place, -1)
            live -= 1
        if now == places.shape[0]:
            now = live = _compact(tree, places, live, kept)
        places[now] = row
        _add(tree, now, 1)
        now += 1
        live += 1
        out[position] = row
