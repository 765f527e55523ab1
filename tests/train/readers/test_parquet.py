"""The Parquet reader against the rows its files were made of."""

import os
import sys

import numpy as np
import pytest

from tierstore.train.readers import DataError, ParquetReader, open_reader

from .rows import SCHEMA, check_reader, some_rows, values_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.kernel


def table_of(rows, kind):
    columns = {"label": pa.array([row[0] for row in rows], pa.int32()), "other": pa.array(["x"] * len(rows))}
    for i in range(13):
        columns[f"I{i + 1}"] = pa.array([row[1][i] for row in rows], pa.int64() if i % 2 else pa.float64())
    for i in range(26):
        values = [row[2][i] for row in rows]
        texts = [None if x is None else str(x) for x in values]
        columns[f"C{i + 1}"] = pa.array(values, pa.int64()) if kind == "integer" else pa.array(texts, pa.string())
    return pa.table(columns)


@pytest.mark.parametrize("kind", ["integer", "string"])
def test_rows_from_any_row_on(tmp_path, kind):
    rows = some_rows(23)
    path = tmp_path / "day.parquet"
    pq.write_table(table_of(rows, kind), path, row_group_size=5)
    reader = open_reader(path)
    assert isinstance(reader, ParquetReader)
    for start, stop in ((0, None), (0, 22), (4, 4), (5, 22), (14, None), (22, 23), (23, None)):
        check_reader(reader, rows, start_row=start, stop_row=stop)


def write_column(tmp_path, array, name):
    columns = {"y": pa.array([0, 1]), "a": pa.array([1.0, 2.0]), "c": pa.array([1, 2]), name: array}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    return ParquetReader(tmp_path / "x.parquet", schema=SCHEMA)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("y", [0, 3], r"row 1, column y: 3"),
        ("c", [1, -1], r"row 1, column c: -1"),
        ("a", ["7", "y"], r"row 1, column a: 'y' is not a number; null stands for missing"),
        ("a", [1e300, 1.0], r"row 0, column a: 1e\+300 is not finite as float32"),
        ("c", [[1, 2], [3, -4]], r"row 1, column c: -4"),
        ("a", [{"x" * 10**5: 1}, {}], r"column a of type struct<x{193} holds no numbers"),
        ("c", np.array([1, 2**63], np.uint64), r"row 1, column c: 9223372036854775808 is not below 2\*\*63; cast"),
        ("y", ["x" * 10**6, "1"], r"row 0, column y: 'x{80}'\.\.\. is not 0 or 1"),
        ("y", ["\x1b[2J", "1"], r"row 0, column y: '\\x1b\[2J' is not"),
        ("c", [1.5, 2.0], r"row 0, column c: 1\.5"),
        ("c", [1.0, 2.0**53], "row 1, column c: 9007199254740992.0"),
        ("c", [[[1]], [[2]]], r"column c of type list.* cast it to a list of numbers"),
    ],
)
def test_wrong_values_are_named(tmp_path, name, values, message):
    reader = write_column(tmp_path, pa.array(values), name)
    with pytest.raises(DataError, match=message) as raised:
        list(reader.read_chunks(0, None, 10))
    assert len(str(raised.value)) < 1000


def test_text_that_is_not_text_is_hashed_all_the_same(tmp_path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    (chunk,) = write_column(tmp_path, broken, "c").read_chunks(0, None, 10)
    assert len(set(values_of(chunk.categories))) == 2


def test_wrong_files_are_named(tmp_path):
    path = tmp_path / "x.parquet"
    with pytest.raises(DataError, match=r"holds no \*\.parquet or \*\.pq file"):
        ParquetReader(tmp_path)
    path.write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x\.parquet is not a Parquet file"):
        ParquetReader(path)
    pq.write_table(pa.table({f"x{i}": [1] for i in range(2000)}), path)
    with pytest.raises(DataError, match=r"lacks the columns label, I1, .* and 1960 more") as raised:
        ParquetReader(path)
    assert len(str(raised.value)) < 1000
    pq.write_table(pa.Table.from_arrays([pa.array([0, 1])] * 4, ["y", "a", "c", "c"]), path)
    with pytest.raises(DataError, match=r"x\.parquet has more than one column of the name c"):
        ParquetReader(path, schema=SCHEMA)
    columns = {"y": pa.array([0] * 20), "a": pa.array([1.0] * 20), "c": pa.array([1] * 17 + [-5] + [1] * 2)}
    pq.write_table(pa.table(columns), path, row_group_size=6)
    for start in (0, 7, 13):
        with pytest.raises(DataError, match="row 17, column c: -5"):  # from the start of the file
            list(ParquetReader(path, schema=SCHEMA).read_chunks(start, None, 4))
    path.unlink()
    os.mkfifo(path)
    for asked in (tmp_path, path):
        with pytest.raises(DataError, match=r"x\.parquet is no plain file"):
            ParquetReader(asked)


def test_without_pyarrow_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'PATH_OF_THE_CHECKOUT\[parquet\]'"):
        ParquetReader(tmp_path / "x.parquet")
