"""Copy rows out of the mapped file: places first, then the copy, until pages turn out not to be in memory.

A cold page read by touching it costs one trip to the device at a time; ``reads.py`` reads many at once. Nothing says
beforehand, at no cost, which pages are warm. So the copy watches the clock: it stops where a group of rows took longer
than memory by a good part of such a trip, unless ``mincore`` finds the next row there (the thread was interrupted).

Of warm pages (20,000 random rows of 64 float32 out of 8M, in ns a row) the copy takes 55-60, which is memory itself,
the map 7-10, counting pages 2-4, checksums 25-35. Each end of a loop and each look at the clock lets the rows in flight
run dry; hence groups of up to ``MAX_GROUP`` rows. ``HASH_GROUP`` rows are copied, then hashed while their lines are
near. docs/performance.md says what else was tried.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.hashing import SECRET, keyed_hash
from ..kernels.jit import prefetch_word
from ..kernels.jit import uncounted_helper as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import BLOCK_HEADER_WORDS, KEY_ROW_BITS, MAX_ROWS, PAIR_WORDS
from .checksum import is_row
from .mapped import clock_ns, copy_words, is_resident
from .places import Places, SegmentArrays
from .segments import PREFETCH_ROWS, Geometry, SegmentStatus, damage_error, row_seed

_BAD_ROW: Final = int(SegmentStatus.BAD_ROW)
PREFETCH_ENTRIES: Final = 32
MAX_GROUP: Final = 256  # rows between two looks at the clock, at most, while pages are warm
HASH_GROUP: Final = 128  # rows copied before they are hashed: as many as the processor's nearer caches hold twice
GROUP_SLACK_NS: Final = 30_000
ROW_SLACK_NS: Final = 600  # a group of n rows slower than GROUP_SLACK_NS + n * ROW_SLACK_NS waited for the device


def gather_error(path: Path, result: Int64s, keys: Int64s) -> DamagedError:
    """What a status other than DONE amounts to."""
    key, status = int(keys[result[1]]), int(result[0])
    return damage_error(path, [(f"row {key % MAX_ROWS} of table {key >> KEY_ROW_BITS}", status)])


class Target(NamedTuple):  # where rows go
    slots: Int32s
    weights: Words
    state: Words  # flat views of the arenas
    present: Bools


class Source(NamedTuple):  # the file that rows are read from
    words: Words
    address: int  # of ``words[0]``
    limit: int  # pages in the file


class How(NamedTuple):  # in which way rows are read
    verify: bool  # compare each row with its checksum
    can_sample: bool  # whether ``is_resident`` says the truth
    cold: bool  # pages are not expected in memory
    direct: bool  # read such pages past the page cache, if the system can


class Scratch(NamedTuple):  # where rows lie, by position in a batch, and room to work in
    offsets: Int64s  # word offset of the row in the map; 0 for a row that was never written
    pairs: Int64s  # word offset of its key, which its checksum follows; 0 likewise
    seeds: Words  # of its checksum
    seen: NDArray[np.uint32]  # zeros, to count pages by: a bit each, or a hash table of their numbers if that is less
    secret: int  # of ``hashing``
    timespec: Int64s
    flag: NDArray[np.uint8]


def new_scratch(geo: Geometry, limit: int, num_rows: int) -> Scratch:
    row_pages = 1 if geo.pages_per_block == 1 else 2 + geo.row_words // geo.page_words
    return Scratch(
        offsets=np.empty(num_rows, np.int64),
        pairs=np.empty(num_rows, np.int64),
        seeds=np.empty(num_rows, np.uint64),
        seen=np.zeros(min((limit + 31) // 32, 1 << (2 * row_pages * num_rows).bit_length()), np.uint32),
        secret=SECRET,
        timespec=np.empty(2, np.int64),
        flag=np.empty(1, np.uint8),
    )


@inline
def _resolve(
    geo: Geometry, limit: int, keys: Int64s, positions: Int64s, places: Places, segments: SegmentArrays,
    scratch: Scratch, result: Int64s,
) -> None:  # fmt: skip
    offsets, pairs, seeds = scratch.offsets, scratch.pairs, scratch.seeds
    mask = (1 << geo.place_bits) - 1
    for i in range(len(keys)):
        if i + PREFETCH_ENTRIES < len(keys):
            prefetch_word(places, positions[i + PREFETCH_ENTRIES])
        place = np.int64(places[positions[i]])
        if place == 0:
            offsets[i] = pairs[i] = 0
            continue
        slot = place >> geo.place_bits
        index = place & mask
        # Exact: a quotient below 2**32 lies at least 1 / rows_per_block under the next integer.
        block = np.int64(np.float64(index) / np.float64(geo.rows_per_block))
        page = segments.data_pages[slot] + block * geo.pages_per_block if slot < len(segments.data_pages) else limit
        if page + geo.pages_per_block > limit:
            result[0] = 1
            result[1] = i
            return
        at = page * geo.page_words
        in_block = index - block * geo.rows_per_block
        offsets[i] = at + geo.first_row + in_block * geo.row_stride
        pairs[i] = at + BLOCK_HEADER_WORDS + in_block * geo.pair_stride
        seeds[i] = row_seed(np.uint64(keys[i]), segments.numbers[slot], np.uint64(index))


@inline
def count_pages(page_words: int, stored_words: int, limit: int, offsets: Int64s, scratch: Scratch) -> int:
    """Distinct pages the rows lie on, which have these ``offsets``."""
    seen = scratch.seen
    page_shift = 0
    while (1 << page_shift) < page_words:
        page_shift += 1
    in_bits, mask = len(seen) >= (limit + 31) // 32, len(seen) - 1
    count = 0
    for i in range(len(offsets)):
        if offsets[i] == 0:
            continue
        first = offsets[i] >> page_shift
        last = (offsets[i] + stored_words - 1) >> page_shift
        for page in range(first, last + 1):
            at: Any = page >> 5
            entry = np.uint32(1) << np.uint32(page & 31)
            if not in_bits:
                at, entry = np.int64(keyed_hash(page, scratch.secret)) & mask, np.uint32(page)
                while seen[at] != 0 and seen[at] != entry:
                    at = (at + 1) & mask
            before = seen[at]
            seen[at] = before | entry
            count += 1 if before != seen[at] else 0
    return count


@inline
def copy_rows(geo: Geometry, words: Words, start: int, end: int, offsets: Int64s, target: Target) -> None:
    """Copy rows ``[start, end)`` as they are; a row's slot is left alone if it was never written."""
    slots, weights, state, present = target
    for i in range(start, end):
        if i + PREFETCH_ROWS < len(offsets):
            prefetch_word(words, offsets[i + PREFETCH_ROWS])
        offset = offsets[i]
        present[i] = offset != 0
        if offset != 0:
            slot = np.int64(slots[i])
            copy_words(weights, slot * geo.weight_words, words, offset, geo.weight_words)
            if geo.state_words > 0:
                copy_words(state, slot * geo.state_words, words, offset + geo.weight_words, geo.state_words)


@inline
def first_bad(words: Words, row_words: int, start: int, end: int, keys: Int64s, scratch: Scratch) -> int:
    """-1, or the position of the first present row of ``[start, end)`` that is not the one its key names."""
    offsets, pairs, seeds = scratch.offsets, scratch.pairs, scratch.seeds
    for i in range(start, end):
        if i + PREFETCH_ROWS < len(pairs):
            prefetch_word(words, pairs[i + PREFETCH_ROWS])
        at, pair = offsets[i], pairs[i]
        if at != 0 and (
            words[pair] != np.uint64(keys[i]) or not is_row(words, at, row_words, seeds[i], words[pair + 1])
        ):
            return i
    return -1


@kernel
def gather(
    geo: Geometry, source: Source, places: Places, segments: SegmentArrays, keys: Int64s, positions: Int64s,
    target: Target, how: How, scratch: Scratch, result: Int64s,
) -> None:  # fmt: skip
    """Copy rows to their slots until their pages turn out to be cold; see ``ColdTier.read``.

    Args:
        segments: of the layout.
        keys, positions: int64 [n] each, of the rows, and of their entries in ``places``.
        scratch: of as many rows.
        result: int64 [5], zeroed; receives a SegmentStatus, the position it is about, distinct pages, and how many rows
            were looked at before pages were cold. The last is for pages that do not come through the map.
    """
    words, address, limit = source
    timespec = scratch.timespec
    _resolve(geo, limit, keys, positions, places, segments, scratch, result)
    if result[0] != 0 or how.cold:
        return
    offsets = scratch.pairs  # a row of a block of several pages follows its key
    row_words = geo.weight_words + geo.state_words
    stored_words = 1 if geo.pages_per_block == 1 else row_words + PAIR_WORDS
    result[2] = count_pages(geo.page_words, stored_words, limit, offsets, scratch)
    num, group, position, is_cold = len(keys), 2, 0, False
    started = clock_ns(timespec)
    while position < num and not is_cold:
        end, bad = min(num, position + group), -1
        rows, step = end - position, HASH_GROUP if how.verify else group
        while position < end and bad < 0:
            start, position = position, min(end, position + step)
            copy_rows(geo, words, start, position, scratch.offsets, target)
            if how.verify:
                bad = first_bad(words, row_words, start, position, keys, scratch)
        if bad >= 0:
            result[0], result[1] = _BAD_ROW, bad
            return
        now = clock_ns(timespec)
        group = min(group * 2, MAX_GROUP)
        if now - started > GROUP_SLACK_NS + rows * ROW_SLACK_NS and position < num:
            page = offsets[position] // geo.page_words
            is_cold = not (how.can_sample and is_resident(address + page * geo.page_words * 8, scratch.flag))
            group = 2
        started = now
    result[3] = position
