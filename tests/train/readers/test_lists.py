"""Lists cut to their last values, and the times beside them, against the Python lists that files were made of."""

import contextlib

import numpy as np
import pytest

from tierstore.train.readers import DataError, FeatureHasher, Schema, open_reader

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
LISTS = [[3, 1, 4, 1, 5], [], [9], [2, 6, 5, 3], [5, 8], [9, 7, 9], [3]]
TIMES = [[row * 10**10 + at - 5 for at in range(len(values))] for row, values in enumerate(LISTS)]
COUNT = len(LISTS)
KINDS = {"parquet": pa.int64(), "timestamps": pa.timestamp("ms"), "texts": pa.string()}


def write(path, kind):
    if "npy" not in kind:
        time = pa.array(TIMES, pa.list_(pa.int64())).cast(pa.list_(KINDS[kind]))
        columns = {"y": [1] * COUNT, "one": list(range(COUNT)), "seen": LISTS, "when": time}
        pq.write_table(pa.table(columns), path / "x.parquet", row_group_size=3)
        return
    np.save(path / "label.npy", np.ones(COUNT))
    np.save(path / "one.npy", np.arange(COUNT))
    for name, values in (("seen", LISTS), ("when", TIMES)):
        ends = np.cumsum([0, *map(len, values)])
        np.save(path / f"{name}.npy", np.array([each for own in values for each in own]))
        np.save(path / f"{name}.offsets.npy", ends)


def opened(path, longest=0):
    columns = {"dense": (), "sparse": ("one", "seen"), "times": (("seen", "when"),)}
    return open_reader(path, schema=Schema(label="y", longest=longest, **columns))


@pytest.mark.parametrize("longest", [0, 1, 3, 9])
@pytest.mark.parametrize("kind", ["parquet", "timestamps", "npy"])
def test_the_last_values_of_lists_come_with_their_times_from_any_row_on(tmp_path, kind, longest):
    write(tmp_path, kind)
    reader = opened(tmp_path, longest)
    for start, part in ((0, None), (2, None), (4, None), (0, 0), (0, 1)):
        options = {} if part is None else {"part": part, "parts": 2}
        row = start
        for batch in reader.batches(FeatureHasher([9, 99], mode="mod"), batch_size=2, start_row=start, **options):
            first = row + batch.total_rows * (part or 0) // 2
            rows = slice(first, first + len(batch))
            assert batch.sparse["one"].values().tolist() == list(range(rows.start, rows.stop))
            for found, lists in ((batch.sparse["seen"], LISTS), (batch.times["when"], TIMES)):
                assert [each.tolist() for each in found.to_dense()] == [each[-longest:] for each in lists[rows]]
            row += batch.total_rows
        assert row == COUNT


def test_times_that_do_not_fit_are_named(tmp_path):
    write(tmp_path, "texts")
    with pytest.raises(DataError, match="column when of type string holds no times; cast it to integers or"):
        list(opened(tmp_path, 2).batches(FeatureHasher([9, 99]), batch_size=2))
    (tmp_path / "x.parquet").unlink()
    (tmp_path / "x.csv").write_text("y,one,seen,when\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"times of lists are for Parquet and npy; .* is read as csv"):
        opened(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="'b' has the times of 'c', which is no sparse column"):
        Schema(label="y", dense=(), sparse=("a",), times=(("c", "b"),))
    with pytest.raises(ValueError, match=r"named more than once as label, weight, dense, sparse or time: \['a'\]"):
        Schema(label="y", dense=(), sparse=("a",), times=(("a", "a"),))


@pytest.mark.parametrize(
    ("seen", "when", "kept"),
    [
        ([[7, None, 9], [4]], [[1, 2, 3], [8]], [[1, 3], [8]]),
        ([[7, None, 9], None], [[1, None, 3], []], [[1, 3], []]),
        ([["7", "", "x"], []], [[1, None, 3], None], [[1, 3], []]),
        ([[7.0, np.nan], [4.0]], [[1, 2], [8]], [[1], [8]]),
        ([7, None], [1, 2], [[1], []]),
        ([7, 8], [[1], [2]], [[1], [2]]),
        ([[7, None, 9], [4]], [[1, 2, None], [8]], "row 0, column when: None is not a time"),
        ([[7, None, 9], [4]], [[1, 3], [8]], "row 0: 3 values in seen, 2 times in when"),
        ([[7], [4]], pa.array([[1], [2**63]], pa.list_(pa.uint64())), "row 1, column when: 92.* is not a"),
    ],
)  # fmt: skip
def test_a_missing_category_leaves_out_its_time(tmp_path, seen, when, kept):
    pq.write_table(pa.table({"y": [1, 1], "one": [1, 2], "seen": seen, "when": when}), tmp_path / "x.parquet")
    require_times(opened(tmp_path), kept)


@pytest.mark.parametrize(
    ("arrays", "kept"),
    [
        ({"one": [1, 2], "seen": [[7, -1, 9], [4, -1, -1]], "when": [[1, 2, 3], [8, -9, -9]]}, [[1, 3], [8]]),
        ({"sparse": [[1, -1], [2, 5]], "when": [3, 4]}, [[], [4]]),
        ({"one": [1, 2], "seen": [[7, 9], [4, -1]], "when": [1, 3]}, "row 0: 2 values in seen, 1 times in when"),
        ({"one": [1, 2], "seen": [7, 9], "when": np.array([1, 2**63], np.uint64)}, "row 1: 9223372036854775808 is not"),
    ],
)
def test_a_missing_category_of_npy_leaves_out_its_time(tmp_path, arrays, kept):
    for name, array in {"label": [1, 1], **arrays}.items():
        np.save(tmp_path / f"{name}.npy", array)
    require_times(opened(tmp_path), kept)


def require_times(reader, kept):
    with pytest.raises(DataError, match=kept) if isinstance(kept, str) else contextlib.nullcontext():
        (batch,) = reader.batches(FeatureHasher([9, 99]), batch_size=2)
        assert [each.tolist() for each in batch.times["when"].to_dense()] == kept
        assert batch.times["when"].lengths().tolist() == batch.sparse["seen"].lengths().tolist()
