"""What a recording must hold, from a log of lookups that is kept apart."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.train.readers.test_hashing import splitmix64
from tierstore.trace import TableTrace, Trace

Entry = dict[str, list[int]]  # rows by table, in order; no table without rows


def hashed(key: int) -> int:
    return splitmix64(key + 0x9E3779B97F4A7C15)


class Feature(NamedTuple):
    table: str
    ids: list[int]
    lengths: list[int]


class Batch(NamedTuple):
    samples: int
    features: list[Feature]

    def by_sample(self) -> list[Entry]:
        found: list[Entry] = [{} for _ in range(self.samples)]
        for table, ids, lengths in self.features:
            rest = iter(ids)
            for sample, length in zip(found, lengths, strict=True):
                if length:
                    sample.setdefault(table, []).extend(next(rest) for _ in range(length))
            assert not list(rest)
        return found

    def whole(self, indexes: Mapping[str, int], rate: float) -> Entry:
        """The sampled rows, feature by feature."""
        found: Entry = {}
        for table, ids, _ in self.features:
            kept = [row for row in ids if hashed(indexes[table] << 40 | row) < rate * 2**64]
            if kept:
                found.setdefault(table, []).extend(kept)
        return found


def random_batch(generator: np.random.Generator, tables: Mapping[str, int], samples: int) -> Batch:
    """A bag of up to three rows of each table (name to rows) a sample."""
    features = []
    for table, rows in tables.items():
        lengths = generator.integers(0, 4, samples)
        features.append(Feature(table, generator.integers(0, rows, lengths.sum()).tolist(), lengths.tolist()))
    return Batch(samples, features)


def entries_of(trace: Trace) -> list[Entry]:
    return [
        {
            name: table.ids[table.offsets[entry] : table.offsets[entry + 1]].tolist()
            for name, table in trace.tables.items()
            if table.offsets[entry] < table.offsets[entry + 1]
        }
        for entry in range(trace.num_entries)
    ]


def check(trace: Trace, log: Sequence[Batch], indexes: Mapping[str, int]) -> None:
    """That the trace holds just what the log says, at its sampling rate. Below a rate of 1 a batch is one entry, and it
    counts to the next that has a sampled row if it has none; lookups of all rows and all batches are counted."""
    assert list(trace.tables) == list(indexes)
    sizes = [batch.samples for batch in log]
    if trace.sampling_rate == 1:
        assert entries_of(trace) == [sample for batch in log for sample in batch.by_sample()]
        assert np.diff(trace.batch_starts).tolist() == sizes
        assert (trace.all_lookups, trace.all_batches) == (None, None)
    else:
        whole = [batch.whole(indexes, trace.sampling_rate) for batch in log]
        assert entries_of(trace) == [entry for entry in whole if entry]
        ends = [sum(sizes[: place + 1]) for place, entry in enumerate(whole) if entry]
        assert trace.batch_starts.tolist() == [0, *ends[:-1], *([sum(sizes)] if ends else [])]
        counts = dict.fromkeys(indexes, 0)
        for batch in log:
            for table, ids, _ in batch.features:
                counts[table] += len(ids)
        assert trace.all_lookups == tuple(counts.values())
        assert trace.all_batches == len(log)
    if log:
        assert trace.batch_samples == round(sum(sizes) / len(sizes))


def random_trace(rows: Mapping[str, int], seed: int, samples: int = 60) -> Trace:
    """Bags of up to five rows of tables of these sizes, every other row preferred, so that some rows stay away."""
    generator = np.random.default_rng(seed)
    tables = {}
    for name, num_rows in rows.items():
        lengths = generator.integers(0, 6, samples)
        ids: NDArray[np.int64] = (generator.random(lengths.sum()) ** 3 * num_rows).astype(np.int64) // 2 * 2
        tables[name] = TableTrace(ids, np.concatenate([[0], np.cumsum(lengths)]))
    return Trace(tables=tables, batch_samples=16)
