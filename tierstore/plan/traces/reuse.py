"""Accesses with a given histogram of how often rows are used, as Meta's published embedding traces come with."""

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...rows import MAX_ROWS
from ...system.excerpt import excerpt
from ..accesses import Accesses
from .batches import starts_of
from .histogram import ReuseBin
from .scatter import scatter, scatter_of

__all__ = ["ReuseProfile", "draw_reuse", "fitted_uses", "read_reuse_profiles"]

_TABLE: Final = "t0"
_WORD: Final = (1 << 64) - 1
_MAX_BYTES: Final = 1 << 26
_MAX_ACCESSES: Final = 1 << 31
_ROUNDING: Final = 0.0005
"""Shares are given to three digits."""
_TYPICAL: Final = 1.44
"""Mean uses over the lowest, where row counts fall as one over the uses: (2 - 1) / log 2."""
_TOLERATED: Final = 0.02
_BIN: Final = re.compile(r"\((\d+)(?:, (\d+)\]|\+): ([0-9.]+)$")
_SIZE: Final = re.compile(r"Locality stats after processing (\d+) batches of size (\d+)$")
_COUNTS: Final = {"Avg # of indices: ": "accesses", "Avg # of unique cols: ": "rows"}
_ROWS: Final = "Histogram of col sizes:"
_SHARES: Final = "Ratio of index distribution at different column sizes:"


class ReuseProfile(NamedTuple):
    """One batch of samples, over all its tables.

    Attributes:
        samples: of the batch.
        accesses: ids in it; rows: distinct ones.
        bins: by how often a row is used in the batch, ascending.
    """

    name: str
    samples: int
    accesses: int
    rows: int
    bins: tuple[ReuseBin, ...]


def read_reuse_profiles(path: str | os.PathLike[str]) -> list[ReuseProfile]:
    """Read the histograms that are published with Meta's traces (facebookresearch/dlrm_datasets), one a batch.

    Raises:
        ValueError: the file is something else; names it, and what is missing. FileNotFoundError.
    """
    size = os.stat(path).st_size
    if not 0 < size <= _MAX_BYTES:
        raise ValueError(f"{os.fspath(path)} has {size} bytes; a file of reuse histograms is expected")
    text = Path(path).read_text(errors="replace")
    try:
        return [_parsed(block) for block in re.split(r"\n\s*\n", text.strip())]
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} has no reuse histograms: {error}") from None


def _parsed(block: str) -> ReuseProfile:
    lines = block.split("\n")
    name = lines[0].strip()
    size = next((found for line in lines if (found := _SIZE.match(line.strip()))), None)
    counts = {
        what: int(line.removeprefix(start))
        for line in lines
        for start, what in _COUNTS.items()
        if line.startswith(start)
    }
    if size is None or len(counts) < len(_COUNTS) or _ROWS not in lines or _SHARES not in lines:
        raise ValueError(f"the block {excerpt(name)} lacks its size, its counts or one of its two histograms")
    samples = int(size[1]) * int(size[2])
    if min(samples, *counts.values()) < 1 or counts["rows"] > min(counts["accesses"], MAX_ROWS):
        raise ValueError(f"the block {excerpt(name)} has counts that cannot be")
    rows, shares = _bins(lines, _ROWS), _bins(lines, _SHARES)
    if not rows or rows.keys() != shares.keys():
        raise ValueError(f"the two histograms of {excerpt(name)} have different bins")
    bins = tuple(ReuseBin(low, high, rows[low, high], shares[low, high]) for low, high in rows)
    for low, high in rows:
        if high is not None and high <= low:
            raise ValueError(f"the bin ({low}, {high}] of {excerpt(name)} is empty")
    return ReuseProfile(name, samples, counts["accesses"], counts["rows"], bins)


def _bins(lines: list[str], title: str) -> dict[tuple[int, int | None], float]:
    """The histogram under a title."""
    found: dict[tuple[int, int | None], float] = {}
    for line in lines[lines.index(title) + 1 :]:
        matched = _BIN.match(line.strip())
        if matched is None:
            break
        found[int(matched[1]), int(matched[2]) if matched[2] else None] = float(matched[3])
    return found


def draw_reuse(
    profile: ReuseProfile, *, scale: float, seed: int, clustering: float = 0.0, batch_accesses: int | None = None
) -> Accesses:
    """Accesses of one table with the profile's histogram, ``scale`` times its rows and accesses.

    Args:
        clustering: 0: the accesses of a row are anywhere, independent of each other. Up to 1: they are within this
            much less than the whole time, around an instant of their own; 0.9: within a tenth of it.
        batch_accesses: default: those of a sample of the profile's batch.

    Raises:
        ValueError, TypeError: an argument that cannot be, or a scale so small that the histogram is lost.
    """
    if not 0 <= clustering < 1:
        raise ValueError(f"clustering={clustering}: expected a number from 0, and below 1")
    uses = fitted_uses(profile, scale)
    generator = np.random.default_rng(seed & _WORD)
    rows = scatter(np.arange(len(uses)), scatter_of(len(uses), seed))
    keys = np.repeat(rows, uses)
    if clustering:
        times = np.repeat(generator.random(len(uses)), uses)
        times += (1 - clustering) * generator.random(len(keys))
        keys = keys[np.argsort(times % 1, kind="stable")]
    else:
        generator.shuffle(keys)
    each = max(1, round(profile.accesses / profile.samples)) if batch_accesses is None else batch_accesses
    return Accesses(keys, starts_of(len(keys), each), (_TABLE,))


def fitted_uses(profile: ReuseProfile, scale: float) -> NDArray[np.int64]:
    """How often each row is used: int64 [rows].

    Each bin gets its share of the accesses, as far as whole rows have such sums; of its share of rows, which is known
    to three digits, what is nearest to rows that become rarer as one over their uses.

    Raises:
        ValueError: ``scale`` is not above 0, makes more accesses than there can be, or so few that a bin's share of
            rows or accesses is off by two points or more.
    """
    if not 0 < scale * profile.accesses <= _MAX_ACCESSES:
        raise ValueError(f"scale={scale}: expected above 0, and at most {_MAX_ACCESSES / profile.accesses:g}")
    parts = [_uses(each, scale * profile.rows, scale * profile.accesses) for each in profile.bins]
    accesses, rows = sum(int(part.sum()) for part in parts), sum(len(part) for part in parts)
    for each, part in zip(profile.bins, parts, strict=True):
        errors = len(part) / max(1, rows) - each.rows, int(part.sum()) / max(1, accesses) - each.accesses
        if max(map(abs, errors)) >= _TOLERATED:
            raise ValueError(
                f"scale={scale}: with {accesses:,} accesses the rows that are used more than {each.low:,} times cannot "
                f"have their share of {100 * each.accesses:.1f} %; take a larger scale"
            )
    return np.concatenate(parts)


def _uses(each: ReuseBin, all_rows: float, all_accesses: float) -> NDArray[np.int64]:
    """Of a bin's rows, ascending."""
    accesses, lowest = round(each.accesses * all_accesses), each.low + 1
    if 2 * accesses < lowest:
        return np.empty(0, np.int64)
    accesses = max(accesses, lowest)
    typical = accesses / max(lowest, _TYPICAL * each.low)
    wanted = min(max(typical, (each.rows - _ROUNDING) * all_rows), (each.rows + _ROUNDING) * all_rows)
    fewest = 1 if each.high is None else -(-accesses // each.high)
    rows = max(min(round(wanted), accesses // lowest), fewest, 1)
    highest = max(lowest, 2 * accesses // rows - lowest) if each.high is None else each.high
    accesses = min(max(accesses, rows * lowest), rows * highest)
    return _ramp(rows, accesses, lowest, highest)


def _ramp(rows: int, accesses: int, lowest: int, highest: int) -> NDArray[np.int64]:
    """``rows`` numbers from ``lowest`` to ``highest`` with the sum ``accesses``, which is possible: a power of the
    place, rounded down, and the rest given to the first that have room."""
    room = highest - lowest
    share = (accesses - rows * lowest) / max(1, rows * room)
    places = (np.arange(rows) + 0.5) / rows
    numbers = lowest + np.floor(room * places ** (1 / max(share, 1e-9) - 1)).astype(np.int64)
    rest = accesses - int(numbers.sum())
    while rest:
        step = 1 if rest > 0 else -1
        able = np.flatnonzero(numbers < highest if rest > 0 else numbers > lowest)[: abs(rest)]
        numbers[able] += step
        rest -= step * len(able)
    return np.sort(numbers)
