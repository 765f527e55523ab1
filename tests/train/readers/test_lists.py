"""Lists cut to their last values, and the times beside them, against the Python lists that files were made of."""

import numpy as np
import pytest

from tierstore.ids.texts import CategoryRule
from tierstore.train.readers import DataError, FeatureHasher, Schema, open_reader

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
LISTS = [[3, 1, 4, 1, 5], [], [9], [2, 6, 5, 3], [5, 8], [9, 7, 9], [3]]
TIMES = [[row * 10**10 + at - 5 for at in range(len(values))] for row, values in enumerate(LISTS)]
COUNT = len(LISTS)
KINDS = {"parquet": pa.int64(), "timestamps": pa.timestamp("ms"), "texts": pa.string()}


def write(path, kind, times=TIMES):
    if "npy" not in kind:
        time = pa.array(times, pa.list_(pa.int64())).cast(pa.list_(KINDS[kind]))
        columns = {"y": [1] * COUNT, "one": list(range(COUNT)), "seen": LISTS, "when": time}
        pq.write_table(pa.table(columns), path / "x.parquet", row_group_size=3)
        return
    np.save(path / "label.npy", np.ones(COUNT))
    np.save(path / "one.npy", np.arange(COUNT))
    for name, values in (("seen", LISTS), ("when", times)):
        ends = np.cumsum([0, *map(len, values)])
        np.save(path / f"{name}.npy", np.array([each for own in values for each in own]))
        np.save(path / f"{name}.offsets.npy", ends[:-1] if kind == "npy without ends" else ends)


def opened(path, longest=0):
    columns = {"dense": (), "sparse": ("one", "seen"), "times": (("seen", "when"),)}
    return open_reader(path, schema=Schema(label="y", rule=CategoryRule(longest=longest), **columns))


@pytest.mark.parametrize("longest", [0, 1, 3, 9])
@pytest.mark.parametrize("kind", ["parquet", "timestamps", "npy", "npy without ends"])
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
    short = [*TIMES[:3], TIMES[3][1:], *TIMES[4:]]
    for kind, times, message in (
        ("npy", short, "row 3: 4 categories in seen, 3 times in when; each needs one"),
        ("parquet", short, r"x\.parquet, row 3: 4 categories in seen, 3 times in when; each needs one"),
        ("texts", TIMES, "column when of type string holds no times; cast it to integers or"),
    ):
        (tmp_path / kind).mkdir()
        write(tmp_path / kind, kind, times)
        with pytest.raises(DataError, match=message):
            list(opened(tmp_path / kind, 2).batches(FeatureHasher([9, 99]), batch_size=2))
    (tmp_path / "x.csv").write_text("y,one,seen,when\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"data\.time_columns are for Parquet and npy; .* is read as csv"):
        opened(tmp_path / "x.csv")
    with pytest.raises(ValueError, match="'b' has the times of 'c', which is no sparse column"):
        Schema(label="y", dense=(), sparse=("a",), times=(("c", "b"),))
    with pytest.raises(ValueError, match=r"named more than once as label, weight, dense, sparse or time: \['a'\]"):
        Schema(label="y", dense=(), sparse=("a",), times=(("a", "a"),))
