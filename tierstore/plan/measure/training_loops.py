"""Loops of training steps over small stores: what having rows appended and moved costs, and what a batch costs beside
its ids.

Each step misses its rows, and puts as many newer ones out. What writes them may be another thread, so the whole
process's time counts, with what it takes to have the device keep what was written:

- at first, when no room is to be won back, with a cache whose budget allows of large transactions and with one of small
  ones, so that a transaction's cost can be told from its rows' (*write-back*);
- when every row was rewritten so often that cleaning moves as many as it ever does (*cleaning*).

Over batches of many tables:

- one id for each of many tables, against one table (*tables*, *tables in training*);
- steps with batches that are brought in ahead, some of whose rows have to come from disk and put out newer ones: what
  that takes beyond those rows, on the thread that computes (*hand-over*) and on all others (*ahead*). Threads that take
  turns find the processor's caches full of each other's data, which is in it.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from ...io.prefetch import prefetch
from ...nn import KeyedJaggedTensor
from .fit import Amounts, Loop, Written
from .page_cache import warm
from .subject import ROWS_FILE, Subject, drawn, fill, jagged, median_ns, opened

__all__ = ["of_batches", "of_writes"]

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


_TABLES: Final = 32
_DIM: Final = 64
_BATCHES: Final = 8
_IDS: Final = 64
"""For each table, of batches that are brought in ahead."""
_STEPS: Final = 60
_WARM_STEPS: Final = 120
_CACHED_SHARE: Final = 0.2
_USED_SHARE: Final = 0.25
"""Of the rows, those that the cache holds, and those that are looked up."""
_DEPTH: Final = 2


def of_batches(path: Path, rows: int, passes: int) -> Iterator[Loop]:
    """Time them on a store that is made at ``path``.

    Args:
        rows: of all tables together.
        passes: over the batches.
    """
    each = max(256, rows // _TABLES)
    fill(path, _DIM, each, tables=_TABLES)
    with opened(path, _DIM, 2 * each * _TABLES) as subject:
        batches = [jagged(np.full(_TABLES, row), 1, tables=_TABLES) for row in range(_BATCHES)]
        yield from _tables(subject, batches, passes)
    with opened(path, _DIM, int(each * _TABLES * _CACHED_SHARE)) as subject:
        yield from _ahead(subject, int(each * _USED_SHARE))


def _tables(subject: Subject, batches: list[KeyedJaggedTensor], passes: int) -> Iterator[Loop]:
    lookup_ns = median_ns(subject.forward, batches, passes)
    step_ns = median_ns(subject.trainer(batches[0]), batches, passes)
    amounts, layout = Amounts(_TABLES, _TABLES, _TABLES), subject.layout
    yield Loop("lookup, one id a table", "tables", lookup_ns, {**amounts.lookup(layout), **_more("table_us")})
    beyond_ns = max(step_ns - lookup_ns, 1.0)
    work = {**amounts.training(layout), **_more("step_table_us")}
    yield Loop("training beyond lookup, one id a table", "tables in training", beyond_ns, work)


def _more(*costs: str) -> dict[str, float]:
    """Of the tables but the first."""
    return dict.fromkeys(costs, 1000.0 * (_TABLES - 1))


class _Times(NamedTuple):
    """Nanoseconds of a step: of the thread that computes, and of all others."""

    own: float
    others: float


def _ahead(subject: Subject, rows: int) -> Iterator[Loop]:
    generator = np.random.default_rng(2)
    ids = [generator.integers(0, rows, _TABLES * _IDS) for _ in range(_WARM_STEPS + _STEPS)]
    batches = [jagged(each, 1, tables=_TABLES) for each in ids]
    _pass(subject, batches[:_WARM_STEPS])
    before, written = subject.store.stats(), Written.by(subject)
    times = _pass(subject, batches[_WARM_STEPS:])
    after, written = subject.store.stats(), Written.by(subject).since(written, _STEPS)
    layout = subject.layout
    distinct = (after.ddr.unique - before.ddr.unique) / _STEPS
    missing = Amounts(0, (after.ssd.lookups - before.ssd.lookups) / _STEPS, 0)
    amounts = Amounts(_TABLES * _IDS, distinct, _TABLES * _IDS)
    computing = {**amounts.lookup(layout), **amounts.training(layout), **_more("table_us", "step_table_us")}
    yield Loop("steps whose batches are brought in ahead", "hand-over", times.own, {"hand_over_us": 1000, **computing})
    bringing = {"admit_ns": amounts.ids, "admit_row_ns": distinct, **missing.bringing(layout)}
    work = {"ahead_us": 1000, **bringing, **written.work(layout)}
    yield Loop("bringing them in ahead", "ahead", times.others, work)


def _pass(subject: Subject, batches: list[KeyedJaggedTensor]) -> _Times:
    train = subject.trainer(batches[0])
    whole, own = time.process_time(), time.thread_time()
    with contextlib.closing(prefetch(batches, subject.module, depth=_DEPTH)) as ahead:
        for batch in ahead:
            train(batch)
    own = time.thread_time() - own
    others = time.process_time() - whole - own
    return _Times(max(1e9 * own / len(batches), 1.0), max(1e9 * others / len(batches), 1.0))
