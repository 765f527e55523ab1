"""The file of a trace, and the bounded memory of a recording: all lookups of the rows that its rate leaves."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recordings import Batch, check, hashed, random_batch, random_trace
from tierstore.cli import main
from tierstore.trace import TableTrace, Trace, read_trace, write_trace
from tierstore.trace.recorded import ALL, Recorded, is_sampled, last_hash


def same(one: Trace, other: Trace) -> bool:
    return str(one) == str(other) and all(
        np.array_equal(a, b) for name in one.tables for a, b in zip(one.tables[name], other.tables[name], strict=True)
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path, trace = tmp_path / "trace.npz", random_trace({"a": 100, "b/c.ids": 50}, seed=1)
    some: list[dict[str, Any]] = [{}, {"sampling_rate": 0.5, "all_lookups": (1 << 50, 1 << 40), "all_batches": 1 << 40}]
    for more in some:
        given = replace(trace, **more)
        write_trace(given, path, force=bool(more))
        assert same(read_trace(path), given)
        with np.load(path) as file:
            known = {"a.ids", "a.offsets", "b/c.ids.ids", "b/c.ids.offsets", "batch_samples"}
            assert set(file.files) == known | set(more)
    with pytest.raises(FileExistsError, match="--force"):
        write_trace(trace, path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.npz"]


def test_batches_of_a_trace(tmp_path: Path) -> None:
    for starts, samples, bounds in (
        (None, 3, [0, 2, 3]),  # batches of two samples
        (np.array([0, 1, 3]), 3, [0, 1, 3]),  # entries are samples
        (np.array([0, 4, 4, 9]), 9, [0, 1, 2, 3]),  # entries are batches
        (np.array([0, 1, 2, 3]), 3, [0, 1, 2, 3]),  # both
    ):
        trace = Trace(tables={"a": table([7, 8, 9, 7], [0, 1, 1, 4])}, batch_samples=2, batch_starts=starts)
        write_trace(trace, tmp_path / "trace.npz", force=True)
        found = read_trace(tmp_path / "trace.npz")
        assert same(found, trace)
        assert (found.num_entries, found.num_samples, found.batch_bounds.tolist()) == (3, samples, bounds)


def table(ids: list[int], offsets: list[int]) -> TableTrace:
    return TableTrace(np.array(ids, np.int64), np.array(offsets, np.int64))


ONE = {"a": table([7], [0, 1, 1, 1])}
TWO = {"b": table([7, 8], [0, 1, 2]), "a": table([3], [0, 0, 1])}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tables": {}}, "no table"),
        ({"tables": {"a": table([1, 2], [0, 1])}}, "offsets of table 'a' must ascend from 0 to the number of its ids"),
        ({"tables": {"a": table([1, 2], [0, 2, 1, 2])}}, "must ascend"),
        ({"tables": {"a": table([-1], [0, 1])}}, "ids of table 'a' are no rows"),
        ({"tables": {"a": table([1], [0, 1]), "b": table([1], [0, 0, 1])}}, "'a' has 1 samples, table 'b' has 2"),
        ({"tables": {"a": TableTrace(np.zeros(1, np.int32), np.array([0, 1]))}}, "int64, 1-d wanted"),
        ({"tables": ONE, "batch_starts": np.array([0, 2, 1])}, "must ascend from 0"),
        ({"tables": ONE, "batch_starts": np.array([0, 5])}, "of 5 samples in 1 batches; there are 3 entries"),
        ({"tables": ONE, "batch_starts": np.array([0.0, 3.0])}, "batch_starts are float64, 1-d; int64, 1-d wanted"),
        ({"tables": TWO, "all_lookups": (1,)}, "all_lookups are of 1 tables; there are 2"),
        ({"tables": TWO, "all_lookups": (2, 0)}, "all_lookups has 0 of table 'a', of which 1 are listed"),
        ({"tables": TWO, "all_batches": 1}, "all_batches is 1; 2 are listed"),
    ],
)
def test_traces_that_cannot_be(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Trace(batch_samples=1, sampling_rate=0.5, **fields)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file.npz"
    write_trace(random_trace({"a": 100}, seed=1), path)
    whole = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)
    for content in (b"no zip", b"", whole[:-30], whole[:100] + b"\xff" + whole[101:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"file\.npz is no trace: .*tierstore trace record RUN\.toml"):
            read_trace(path)
    for name in arrays:
        np.savez(path, **{key: value for key, value in arrays.items() if key != name})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="alone"):
            read_trace(path)
    wrong: list[tuple[str, np.ndarray, str]] = [
        ("batch_samples", np.array([1, 2]), "batch_samples must be one int64"),
        ("all_batches", np.array([9]), "all_batches must be one int64"),
        ("all_lookups", np.array(9), "all_lookups are int64, 0-d; int64, 1-d wanted"),
        ("sampling_rate", np.array(1), "sampling_rate must be one float64"),
        ("rows_of_tomorrow", np.array(9), "has 'rows_of_tomorrow', which this version of tierstore does not know"),
    ]
    for name, array, reason in wrong:
        np.savez(path, **(arrays | {name: array}))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"file\.npz is no trace: .*{reason}"):
            read_trace(path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="a single array"):
        read_trace(tmp_path / "one.npy")
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nosuch.npz")


def test_a_row_is_sampled_by_its_hash() -> None:
    generator = np.random.default_rng(0)
    keys = generator.integers(0, 1 << 22, 3000) << 40 | generator.integers(0, 1 << 40, 3000)
    for rate in (1.0, 0.5, 0.3, 0.01, 2.0**-20):
        assert is_sampled(keys, rate).tolist() == [hashed(key) < rate * 2**64 for key in keys.tolist()]
    assert is_sampled(keys, 1.0).all()
    assert last_hash(1.0) == ALL
    for rate in (0, 1.5, float("nan"), 2.0**-65):
        with pytest.raises(ValueError, match="above 0, and at most 1"):
            last_hash(rate)


def test_a_run_is_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.random.default_rng(0).integers(0, 50, (25, 26))
    lines = ("\t".join(["0", *["1"] * 13, *(f"{each:08x}" if each > 9 else "" for each in row)]) for row in values)
    (tmp_path / "data.tsv").write_text("\n".join(lines) + "\n")
    run = '[data]\nhashing = "mod"\n[embedding]\nnum_embeddings = 50\n[train]\nbatch_size = 8\n'
    (tmp_path / "run.toml").write_text(run)
    arguments = ["trace", str(tmp_path / "run.toml"), str(tmp_path / "t.npz"), "--data", str(tmp_path / "data.tsv")]
    assert main([*arguments, "--rows", "20"]) == 0
    assert f"{(values[:20] > 9).sum()} lookups of 26 tables in 20 samples" in capsys.readouterr().out
    trace = read_trace(tmp_path / "t.npz")
    assert trace.batch_samples == 8
    for column, found in enumerate(trace.tables.values()):
        own = values[:20, column]
        assert found.ids.tolist() == own[own > 9].tolist()
        assert np.diff(found.offsets).tolist() == (own > 9).astype(int).tolist()
    assert main([*arguments, "--force"]) == 0
    assert read_trace(tmp_path / "t.npz").num_samples == 25
    assert main([*arguments, "--force", "--rows", "0"]) == 2


INDEXES = {"a": 0, "b": 1, "c": 2}
ROWS = {"a": 2000, "b": 60, "c": 3}


def add(recorded: Recorded, batch: Batch, last: np.uint64 | None = None) -> None:
    """As a recorder does: what is sampled at the rate of now, or at one of before."""
    keys = [INDEXES[table] << 40 | row for table, ids, _ in batch.features for row in ids]
    samples = [s for _, _, lengths in batch.features for s, length in enumerate(lengths) for _ in range(length)]
    last = recorded.last if last is None else last
    found = np.array(keys, np.int64)
    kept = np.ones(len(found), np.bool_) if last == ALL else is_sampled(found, (int(last) + 1) / 2**64)
    counts = np.bincount(found >> 40, minlength=len(recorded.tables))
    recorded.add(found[kept], np.array(samples, np.int64)[kept], batch.samples, last, counts)


@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.lists(st.integers(1, 40), max_size=30),
    rate=st.sampled_from([1.0, 0.7, 0.1, 0.001]),
    max_bytes=st.sampled_from([100, 500, 2000, 10_000, 60_000]),
)
def test_a_recording_is_a_filter_of_lookups(seed: int, sizes: list[int], rate: float, max_bytes: int) -> None:
    generator = np.random.default_rng(seed)
    recorded = Recorded(list(INDEXES), rate=rate, max_bytes=max_bytes)
    log: list[Batch] = []
    for size in sizes:
        log.append(random_batch(generator, ROWS, size))
        before = recorded.rate
        add(recorded, log[-1])
        assert recorded.size_bytes <= max_bytes
        assert before / recorded.rate in {2.0**k for k in range(64)}
        assert recorded.last == last_hash(recorded.rate)
    trace = recorded.trace()
    assert trace.sampling_rate == recorded.rate
    check(trace, log, INDEXES)


def test_the_rate_is_halved_only_when_it_must_be() -> None:
    recorded = Recorded(list(INDEXES), rate=1.0, max_bytes=1 << 16)
    generator = np.random.default_rng(0)
    while recorded.rate == 1:
        held = recorded.size_bytes
        batch = random_batch(generator, ROWS, 50)
        add(recorded, batch)
    # 12 bytes for each id, 8 for each sample in the offsets of each table, and in the batches' starts.
    took = 12 * sum(len(feature.ids) for feature in batch.features) + 8 * 4 * batch.samples
    assert held <= 1 << 16 < held + took
    assert recorded.rate == 0.5


def test_what_was_sampled_before_the_rate_was_halved_is_sampled_again() -> None:
    """Two threads: one samples, the other's batch halves the rate, the first adds."""
    generator = np.random.default_rng(1)
    recorded = Recorded(list(INDEXES), rate=1.0, max_bytes=3000)
    log = [random_batch(generator, ROWS, size) for size in (40, 2, 2)]
    add(recorded, log[0])
    rate = recorded.rate
    for batch in log[1:]:
        add(recorded, batch, last=ALL)
    assert recorded.rate == rate < 1  # there was room
    check(recorded.trace(), log, INDEXES)


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_halving_takes_no_more_memory_than_there_may_be(rate: float) -> None:
    generator, max_bytes = np.random.default_rng(4), 1 << 20
    recorded = Recorded(["a"], rate=rate, max_bytes=max_bytes)
    while recorded.rate == rate:
        keys = generator.integers(0, 1 << 20, 2000)
        keys, counts = keys[is_sampled(keys, rate)], np.array([2000])
        tracemalloc.start()
        recorded.add(keys, np.zeros(len(keys), np.int32), 1, recorded.last, counts)
        took = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert took <= max_bytes
