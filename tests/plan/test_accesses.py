"""Accesses, against loops over lists."""

from dataclasses import replace
from itertools import pairwise

import numpy as np

from tierstore.plan import accesses_of, of_tables, once_a_batch
from tierstore.trace import TableTrace, Trace

BATCH = 4


def random_trace(seed: int, samples: int) -> Trace:
    generator = np.random.default_rng(seed)

    def table() -> TableTrace:
        lengths = generator.integers(0, 4, samples)
        return TableTrace(generator.integers(0, 5, lengths.sum()), np.append(0, np.cumsum(lengths)))

    return Trace(tables={"a": table(), "b": table()}, batch_samples=BATCH, sampling_rate=0.5)


def batches_of(trace: Trace, bounds: list[int] | None = None) -> list[list[int]]:
    """Between these samples; default: batches of the trace's size."""
    bounds = bounds or [*range(0, trace.num_samples, trace.batch_samples), trace.num_samples]
    return [
        [
            index << 40 | int(row)
            for sample in range(first, stop)
            for index, table in enumerate(trace.tables.values())
            for row in table.ids[table.offsets[sample] : table.offsets[sample + 1]]
        ]
        for first, stop in pairwise(bounds)
    ]


def listed(keys: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    return [keys[begin:end].tolist() for begin, end in pairwise(starts)]


def test_accesses_go_sample_by_sample() -> None:
    for samples in (0, 1, 4, 10):
        trace = random_trace(samples, samples)
        found = accesses_of(trace)
        assert listed(found.keys, found.starts) == batches_of(trace)
        assert (found.tables, found.sampling_rate) == (("a", "b"), 0.5)


def test_batches_of_a_recording() -> None:
    """Of different sizes, an entry being a sample or a batch."""
    trace = random_trace(4, 10)
    starts = np.array([0, 3, 3, 8, 10])
    found = accesses_of(replace(trace, batch_starts=starts))
    assert listed(found.keys, found.starts) == batches_of(trace, starts.tolist())
    found = accesses_of(replace(trace, batch_starts=np.arange(11) * 7))
    assert listed(found.keys, found.starts) == batches_of(trace, list(range(11)))


def test_batches_that_a_recording_does_not_list() -> None:
    """As it counted them; one that did not is asked for its samples."""
    trace = replace(random_trace(5, 10), batch_starts=np.arange(11) * 7)
    for size, guessed in ((7, 0), (5, 4)):
        assert accesses_of(replace(trace, batch_samples=size)).unlisted == guessed
        assert accesses_of(replace(trace, batch_samples=size, all_batches=13)).unlisted == 3
    assert accesses_of(replace(random_trace(5, 10), all_batches=13)).all_batches == 13


def test_lookups_of_all_rows_go_with_their_tables() -> None:
    accesses = accesses_of(replace(random_trace(6, 10), all_lookups=(300, 200)))
    assert accesses.all_lookups == (300, 200)
    assert of_tables(accesses, [0]).all_lookups == (300, 0)
    assert of_tables(accesses, [1]).all_lookups == (0, 200)
    assert once_a_batch(accesses).all_lookups is None
    assert of_tables(once_a_batch(accesses), 1).all_lookups is None
