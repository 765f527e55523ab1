"""Loops of training steps that have blocks written, over and over the same: what that costs.

Each step misses all of its rows, and puts as many newer ones out. What writes them may be another thread, so the whole
process's time counts, once every row was rewritten and an anchor was just set, so that no other is set meanwhile:

- with a cache whose budget allows of large transactions and with one of small ones, so that a transaction's cost can be
  told from its blocks' (*write-back*);
- what was written, handed to the device (*sync*).
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ...io.anchor import ANCHOR_NAME, GROWTH_BYTES
from ...nn import KeyedJaggedTensor
from ...rows import RowLayout
from .amounts import Amounts, writing_work
from .fit import Loop
from .page_cache import warm
from .subject import ROWS_FILE, Subject, Walk, opened, transactions_in

__all__ = ["of_writes"]

_CACHED_SHARES: Final = (1 / 8, 1 / 64)
"""Of the rows, those that the caches hold."""
_LEAST_CACHED: Final = 128
_GONE_THROUGH: Final = (1.0, 1 / 8)
"""Of the rows, before each of the loops."""
_WRITTEN_BYTES: Final = GROWTH_BYTES // 4
"""By the steps of a loop: less than what sets an anchor."""


class _Pass(NamedTuple):
    """Some steps.

    Attributes:
        ns: of a step, of all threads.
        blocks, transactions: written in a step.
        sync_ns: of handing to the device what all of them wrote, of the thread that does.
        pages: of that, those of blocks.
    """

    ns: float
    blocks: float
    transactions: float
    sync_ns: float
    pages: float
    amounts: Amounts


def of_writes(path: Path, dim: int, rows: int, miss_rows: int) -> Iterator[Loop]:
    """Time them on the store at ``path``.

    Args:
        rows: of its table.
        miss_rows: at most so many in a step.
    """
    warm(path / ROWS_FILE)
    walk = Walk(rows)
    for share, gone_through in zip(_CACHED_SHARES, _GONE_THROUGH, strict=True):
        cached = max(_LEAST_CACHED, int(rows * share))
        count = max(8, min(miss_rows, cached) // 2)
        with opened(path, dim, cached) as subject:
            _go_round(path, subject, walk, int(rows * gone_through), count)
            found = _steps(path, subject, walk, rows, count)
            name = f"write-back, {subject.name}, 1 of {1 / share:.0f} cached"
            yield Loop(name, "write-back", found.ns, _work(subject.layout, found))
            yield Loop(
                f"sync, {subject.name}, 1 of {1 / share:.0f} cached", "sync", found.sync_ns, {"sync_ns": found.pages}
            )


def _work(layout: RowLayout, found: _Pass) -> dict[str, float]:
    writing = writing_work(layout, found.blocks, found.transactions)
    return {**found.amounts.misses(layout), **found.amounts.training(layout), **writing}


def _go_round(path: Path, subject: Subject, walk: Walk, rows: int, count: int) -> None:
    """Train on all rows once, and on until an anchor is set."""
    train = subject.trainer(walk.next(count))
    for _ in range(-(-rows // count)):
        train(walk.next(count))
    before = _written(subject)
    anchor = path / ANCHOR_NAME
    set_at = anchor.stat().st_mtime_ns
    while anchor.stat().st_mtime_ns == set_at and _written(subject) - before < 2 * GROWTH_BYTES:
        train(walk.next(count))


def _steps(path: Path, subject: Subject, walk: Walk, rows: int, count: int) -> _Pass:
    train = subject.trainer(walk.next(count))
    taken: list[KeyedJaggedTensor] = []
    _sync_ns(path)
    written, transactions, began = _written(subject), transactions_in(path), time.process_time()
    while _written(subject) - written < _WRITTEN_BYTES and len(taken) * count < rows:
        taken.append(walk.next(count))
        train(taken[-1])
    ns = 1e9 * (time.process_time() - began)
    steps, pages = len(taken), (_written(subject) - written) / subject.layout.page_bytes
    return _Pass(
        ns=ns / steps,
        blocks=pages / subject.layout.pages_per_block / steps,
        transactions=(transactions_in(path) - transactions) / steps,
        sync_ns=_sync_ns(path),
        pages=max(pages, 1.0),
        amounts=Amounts.of(taken),
    )


def _written(subject: Subject) -> int:
    """Bytes of blocks."""
    return subject.store.stats().ssd.bytes_written


def _sync_ns(path: Path) -> float:
    """Of this thread, while all that the system has in memory for the file goes to the device."""
    descriptor = os.open(path / ROWS_FILE, os.O_RDONLY)
    try:
        began = time.thread_time()
        os.fsync(descriptor)
        return max(1e9 * (time.thread_time() - began), 1.0)
    finally:
        os.close(descriptor)
