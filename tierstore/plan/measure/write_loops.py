"""Loops of training steps that have rows appended, and moved: what that costs.

Each step misses its rows, and puts as many newer ones out. What writes them may be another thread, so the whole
process's time counts, once every row was rewritten and while no anchor is set:

- rows are used in the same order round after round, so that segments are deleted whole, with a cache whose budget allows
  of large transactions and with one of small ones, so that a transaction's cost can be told from its rows' (*write-back*);
- rows are used in any order, so that cleaning moves as many as it ever does (*cleaning*);
- what was written, handed to the device (*sync*).
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...io.anchor import ANCHOR_NAME, GROWTH_BYTES
from ...nn import KeyedJaggedTensor
from .amounts import Amounts, Written
from .fit import Loop
from .page_cache import warm
from .subject import ROWS_FILE, Subject, Walk, jagged, opened

__all__ = ["of_writes"]

_LOOPS: Final = (("write-back", 8, 1), ("write-back", 64, 1), ("cleaning", 8, 2))
"""Stage, which part of the rows the cache holds, and how often as many as all rows are used before."""
_LEAST_CACHED: Final = 128
_WRITTEN_BYTES: Final = GROWTH_BYTES // 4
"""By the steps of a loop: less than what sets an anchor."""

Draw = Callable[[int], KeyedJaggedTensor]
"""The next batch, of so many ids."""


class _Pass(NamedTuple):
    """Some steps.

    Attributes:
        ns, work: of a step, of all threads.
        sync_ns: of handing to the device what all of them wrote, of the thread that does.
        pages: that is.
    """

    ns: float
    work: dict[str, float]
    sync_ns: float
    pages: float


def of_writes(path: Path, dim: int, rows: int, miss_rows: int) -> Iterator[Loop]:
    """Time them on the store at ``path``.

    Args:
        rows: of its table.
        miss_rows: at most so many in a step.
    """
    warm(path / ROWS_FILE)
    for stage, part, rounds in _LOOPS:
        cached = max(_LEAST_CACHED, rows // part)
        count = max(8, min(miss_rows, cached) // 2)
        draw = Walk(rows).next if stage == "write-back" else _anywhere(rows)
        with opened(path, dim, cached) as subject:
            _go_round(path, subject, draw, rounds * rows, count)
            found = _steps(path, subject, draw, rows, count)
            name = f"{stage}, {subject.name}, 1 of {part} cached"
            yield Loop(name, stage, found.ns, found.work)
            yield Loop(f"sync after {name}", "sync", found.sync_ns, {"sync_ns": found.pages})


def _anywhere(rows: int) -> Draw:
    generator = np.random.default_rng(3)
    return lambda count: jagged(generator.integers(0, rows, count), 1)


def _go_round(path: Path, subject: Subject, draw: Draw, rows: int, count: int) -> None:
    """Train on so many rows, and on until no anchor is due."""
    train, anchor = subject.trainer(draw(count)), path / ANCHOR_NAME
    used, set_at, before = 0, anchor.stat().st_mtime_ns, 0.0
    while used < rows or Written.by(subject).bytes - before > GROWTH_BYTES - _WRITTEN_BYTES:
        train(draw(count))
        used += count
        if anchor.stat().st_mtime_ns != set_at:
            set_at, before = anchor.stat().st_mtime_ns, Written.by(subject).bytes


def _steps(path: Path, subject: Subject, draw: Draw, rows: int, count: int) -> _Pass:
    train, layout = subject.trainer(draw(count)), subject.layout
    taken: list[KeyedJaggedTensor] = []
    _sync_ns(path)
    before, missed, began = Written.by(subject), subject.store.stats().ddr.misses, time.process_time()
    while Written.by(subject).bytes - before.bytes < _WRITTEN_BYTES and len(taken) * count < rows:
        taken.append(draw(count))
        train(taken[-1])
    ns, steps = 1e9 * (time.process_time() - began), len(taken)
    amounts, written = Amounts.of(taken), Written.by(subject).since(before, steps)
    missing = Amounts(0, (subject.store.stats().ddr.misses - missed) / steps, 0)
    work = amounts.hits(layout) | missing.bringing(layout) | amounts.training(layout) | written.work(layout)
    return _Pass(ns / steps, work, _sync_ns(path), max(1.0, written.bytes * steps / layout.page_bytes))


def _sync_ns(path: Path) -> float:
    """Of this thread, while all that the system has in memory for the file goes to the device."""
    descriptor = os.open(path / ROWS_FILE, os.O_RDONLY)
    try:
        began = time.thread_time()
        os.fsync(descriptor)
        return max(1e9 * (time.thread_time() - began), 1.0)
    finally:
        os.close(descriptor)
