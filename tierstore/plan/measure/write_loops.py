"""Loops of training steps that have rows appended, and moved: what that costs.

Each step misses its rows, and puts as many newer ones out. What writes them may be another thread, so the whole
process's time counts, with what it takes to have the device keep what was written:

- at first, when no room is to be won back, with a cache whose budget allows of large transactions and with one of small
  ones, so that a transaction's cost can be told from its rows' (*write-back*);
- when every row was rewritten so often that cleaning moves as many as it ever does (*cleaning*).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ...nn import KeyedJaggedTensor
from .amounts import Amounts, Written
from .fit import Loop
from .page_cache import warm
from .subject import ROWS_FILE, Subject, drawn, opened

__all__ = ["of_writes"]

_LOOPS: Final = (("write-back", 8, 0.25), ("write-back", 64, 0.25), ("cleaning", 8, 3.0))
"""Stage, which part of the rows the cache holds, and how often as many as all rows are written before."""
_LEAST_CACHED: Final = 128
_TIMED_SHARE: Final = 1 / 2
"""Of the rows; with those before not so many that what was superseded exceeds the slack."""


def of_writes(path: Path, dim: int, rows: int, miss_rows: int) -> Iterator[Loop]:
    """Time them on the store at ``path``.

    Args:
        rows: of its table.
        miss_rows: at most so many in a step.
    """
    warm(path / ROWS_FILE)
    draw = drawn(rows)
    for stage, part, rounds in _LOOPS:
        cached = max(_LEAST_CACHED, rows // part)
        count = max(8, min(miss_rows, cached) // 2)
        with opened(path, dim, cached) as subject:
            train = subject.trainer(draw(count))
            while subject.store.stats().ssd.rows_written < rounds * rows:
                train(draw(count))
            steps = max(1, int(rows * _TIMED_SHARE) // count)
            name = f"{stage}, {subject.name}, 1 of {part} cached"
            yield _timed(name, stage, subject, [draw(count) for _ in range(steps)])


def _timed(name: str, stage: str, subject: Subject, batches: list[KeyedJaggedTensor]) -> Loop:
    train, layout, steps = subject.trainer(batches[0]), subject.layout, len(batches)
    before, missed, began = Written.by(subject), subject.store.stats().ddr.misses, time.process_time()
    for batch in batches:
        train(batch)
    ns = 1e9 * (time.process_time() - began) / steps
    amounts, written = Amounts.of(batches), Written.by(subject).since(before, steps)
    missing = Amounts(0, (subject.store.stats().ddr.misses - missed) / steps, 0)
    work = amounts.hits(layout) | missing.bringing(layout) | amounts.training(layout) | written.work(layout)
    return Loop(name, stage, ns, work)
