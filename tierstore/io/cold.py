"""Copy rows whose pages are not in memory: each page is read once, in the order of the file, many at a time.

They go past the page cache into the buffers of a ring, or without one (``madvise``) into the page cache. Pages that are
there already come through the map. To ask about each (``mincore``) would take a third of the time; so one in
``_LOOK_EVERY`` is asked about, and the ``_LOOK_ON`` after one that was there. Either way is right: what a lease shows
does not change, and the system writes a page to the device before it reads it directly.
"""

from typing import Final, NamedTuple

import numpy as np

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import uncounted_helper as inline
from ..kernels.jit import uncounted_kernel as kernel
from ..layout import PAIR_WORDS
from .gather import How, Scratch, Source, Target, copy_rows, first_bad
from .mapped import is_resident, queue_read
from .ring import BUFFER_WORDS, DEPTH, Queues, Rings, begin_read, wait
from .segments import Geometry, SegmentStatus

_BAD_ROW, _UNREADABLE = int(SegmentStatus.BAD_ROW), int(SegmentStatus.UNREADABLE)
FAILED: Final = -1
"""A read of a ring failed, and the system does not say that the device is to blame: read again, without a ring."""
_QUEUE_DEPTH: Final = 512  # reads that ``madvise`` is called for ahead of the copy
_LOOK_EVERY: Final = 16
_LOOK_ON: Final = 64
_COLD_PART: Final = 64  # where one page in so many had to be read, the next batch is expected to be cold
_OF_DEVICE: Final = -5, -61  # EIO, ENODATA


class _Batch(NamedTuple):
    """Rows to be read, in the order of their places."""

    geo: Geometry
    queues: Queues
    depth: int  # reads in flight
    keys: Int64s
    target: Target
    how: How
    scratch: Scratch
    result: Int64s


def read_cold(
    geo: Geometry, rings: Rings, source: Source, keys: Int64s, target: Target, how: How, scratch: Scratch,
    result: Int64s,
) -> bool:  # fmt: skip
    """Copy the rows that ``gather`` did not, of which ``scratch`` says where they lie.

    Returns:
        Whether pages were not in memory. The status may be FAILED.
    """
    target.present[result[3] :] = False
    order = result[3] + np.flatnonzero(scratch.pairs[result[3] :])
    order = order[np.argsort(scratch.pairs[order])]
    ordered = target._replace(slots=target.slots[order], present=np.empty(len(order), np.bool_))
    by_page = scratch._replace(offsets=scratch.offsets[order], pairs=scratch.pairs[order], seeds=scratch.seeds[order])
    depth = min(DEPTH, BUFFER_WORDS // (geo.pages_per_block * geo.page_words))
    ring = rings.take() if how.direct and depth > 0 else None
    depth = depth if ring else _QUEUE_DEPTH
    queues = ring.queues if ring and ring.queues else Queues(-1, source.words, np.empty((depth, 4), np.int64))
    is_cold = _read(_Batch(geo, queues, depth, keys[order], ordered, how, by_page, result), source)
    if result[0] == FAILED:
        rings.drop()
    elif ring:
        rings.put_back(ring)
    target.present[order] = True
    result[1] = order[result[1]] if result[0] else 0
    return bool(is_cold)


@inline
def _take_rows(batch: _Batch, words: Words, shift: int, start: int, stop: int) -> None:
    """Copy rows that lie ``shift`` words further in the file than in ``words``, unless there was an error before."""
    geo, scratch, result = batch.geo, batch.scratch, batch.result
    if result[0] != 0:
        return
    for i in range(start, stop if shift != 0 else start):
        scratch.offsets[i] -= shift
        scratch.pairs[i] -= shift
    copy_rows(geo, words, start, stop, scratch.offsets, batch.target)
    if batch.how.verify:
        bad = first_bad(words, geo.weight_words + geo.state_words, start, stop, batch.keys, scratch)
        if bad >= 0:
            result[0], result[1] = _BAD_ROW, bad


@inline
def _finish(batch: _Batch, read: int) -> None:
    """Wait for a read, and take its rows."""
    queues, result, slot, shift = batch.queues, batch.result, read % batch.depth, 0
    start, stop, page, size = queues.reads[slot, 0], queues.reads[slot, 1], queues.reads[slot, 2], queues.reads[slot, 3]
    if result[0] != FAILED and queues.descriptor >= 0:
        shift = (page - slot * batch.geo.pages_per_block) * batch.geo.page_words
        got = wait(queues, slot)
        if got != size and (result[0] == 0 or got > size):
            result[0], result[1] = _UNREADABLE if got in _OF_DEVICE else FAILED, start
    _take_rows(batch, queues.buffers, shift, start, stop)


@kernel
def _read(batch: _Batch, source: Source) -> bool:
    """As ``read_cold``."""
    geo, queues, depth, keys, _, how, scratch, result = batch
    words, address, _ = source
    pairs, page_words, num = scratch.pairs, geo.page_words, len(keys)
    stored_words = 1 if geo.pages_per_block == 1 else geo.weight_words + geo.state_words + PAIR_WORDS
    at = begun = ended = looks = units = pages = 0
    counted = -1  # pages up to this one
    while ended < begun or (at < num and result[0] == 0):
        if begun - ended == depth or at == num or result[0] != 0:
            _finish(batch, ended)
            ended += 1
            continue
        page, stop, is_there = pairs[at] // page_words, at + 1, False
        while stop < num and pairs[stop] < (page + 1) * page_words:
            stop += 1
        last = (pairs[stop - 1] + stored_words - 1) // page_words
        pages += last - max(page - 1, counted)
        counted = last
        if how.can_sample and (looks > 0 or units % _LOOK_EVERY == 0):
            is_there = is_resident(address + page * page_words * 8, scratch.flag)
            looks = _LOOK_ON if is_there else looks - 1
        units += 1
        if is_there:
            _take_rows(batch, words, 0, at, stop)
        else:
            slot, start, size = begun % depth, page * page_words * 8, (last + 1 - page) * page_words * 8
            queues.reads[slot, 0], queues.reads[slot, 1] = at, stop
            queues.reads[slot, 2], queues.reads[slot, 3] = page, size
            if queues.descriptor < 0:
                queue_read(address + start, size)
            else:
                begin_read(queues, slot, start, size, page_words * geo.pages_per_block)
                result[4] += last + 1 - page
            begun += 1
        at = stop
    result[2] = max(result[2], pages)
    return how.can_sample and begun * _COLD_PART > units
