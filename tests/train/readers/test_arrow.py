"""The Parquet and CSV readers, against the rows that files were made of and one value at a time in plain Python."""

import contextlib
import csv
import gzip
import io
import math
import os
import shutil
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.ids.texts import CategoryRule, read_texts
from tierstore.train.readers import (
    CriteoReader,
    CsvReader,
    DataError,
    FeatureHasher,
    ParquetReader,
    Schema,
    open_reader,
)
from tierstore.train.readers import csv as csv_reader

from .rows import IDS, SCHEMA, TEXTS, bags, category_of, check_reader, expected_bags, some_rows, values_of, write_npy

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.kernel


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.parquet"


def write(path, column, **columns):
    rows = {"y": [1] * len(column), "a": [0.5] * len(column), "c": column} | columns
    pq.write_table(pa.table(rows), path, row_group_size=3)
    return ParquetReader(path, schema=SCHEMA)


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_rows_from_any_row_on(path, kind):
    rows = some_rows(23)
    columns = {"label": pa.array([row[0] for row in rows], pa.int32()), "other": ["x"] * len(rows)}
    for i in range(13):
        columns[f"I{i + 1}"] = pa.array([row[1][i] for row in rows], pa.int64() if i % 2 else pa.float64())
    for i in range(26):
        columns[f"C{i + 1}"] = pa.array([row[2][i] for row in rows]).cast(kind)
    pq.write_table(pa.table(columns), path, row_group_size=5)
    for start, stop in ((0, None), (0, 22), (4, 4), (5, 22), (14, None), (22, 23), (23, None)):
        check_reader(open_reader(path), rows, start_row=start, stop_row=stop)


KINDS = {
    "strings": pa.array([*TEXTS, None, ""]),
    "large": pa.array([*TEXTS, None, ""], pa.large_string()),
    "bytes": pa.array([*TEXTS, None, ""], pa.binary()),
    "dictionary": pa.array([*TEXTS, None, "ab"]).dictionary_encode(),
    "integers": pa.array([0, 5, None, 2**63 - 1]),
    "small": pa.array([0, 5, None, 255], pa.uint8()),
    "floats": pa.array([0.0, 5.0, None, math.nan, 2.0**53 - 1]),
    "bool": pa.array([True, None, False]),
    "nothing": pa.array([None, None]),
    "lists": pa.array([[3, 1], [], None, [2, None, 2]]),
    "all there": pa.array([[3, 1], [4], [5, 5, 5]], pa.large_list(pa.int32())),
    "fixed": pa.array([[3, 1], [2, None]], pa.list_(pa.int64(), 2)),
    "words": pa.array([["ab", "7"], None, ["", None, "F"]]),
    "words of a dictionary": pa.array([["ab", "7"], ["ab"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "float lists": pa.array([[1.0, math.nan], [2.0]]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_categories_of_each_kind(path, kind):
    column = KINDS[kind]
    reader = write(path, column)
    wanted = expected_bags(column.to_pylist() if kind != "bytes" else KINDS["strings"].to_pylist())
    for start in range(len(column)):
        (chunk,) = reader.read_chunks(start, None, 100)
        assert bags(chunk.categories) == wanted[start:]


def test_labels(path):
    for labels in ([1, -1, 1], [True, False, True], [1.0, -1.0, 1.0], ["1", "0", "1"], ["True", "false", "TRUE"]):
        (batch,) = write(path, [1, 2, 3], y=labels).batches(FeatureHasher([9]), batch_size=9)
        assert batch.labels.tolist() == [1, 0, 1], labels
    with pytest.raises(DataError, match=r"x\.parquet, row 4 or after it: labels are 0 in some rows and -1 in others"):
        list(write(path, [1] * 6, y=[1, 0, 1, 1, 1, -1]).batches(FeatureHasher([9]), batch_size=2))


def test_ids_are_any_int64_and_the_same_in_every_format(tmp_path):
    ids, schema = [5, -(2**63), -17, 2**63 - 1, 0], Schema(label="y", dense=(), sparse=("c",), rule=IDS)
    write(tmp_path / "ids.parquet", pa.array([*ids, None]))
    write(tmp_path / "texts.parquet", [*map(str, ids), None])
    (tmp_path / "x.csv").write_text("y,a,c\n" + "".join(f"1,2,{text}\n" for text in [*ids, ""]))
    for name, values in (("label", [1] * 6), ("sparse", [[each] for each in [*ids, -1]])):
        np.save(tmp_path / f"{name}.npy", np.array(values))
    for path in (tmp_path / "ids.parquet", tmp_path / "texts.parquet", tmp_path / "x.csv", tmp_path):
        (batch,) = open_reader(path, schema=schema).batches(FeatureHasher([9], mode="none"), batch_size=9)
        assert batch.sparse.values().tolist() == ids, path
        assert batch.sparse.lengths().tolist() == [1, 1, 1, 1, 1, 0], path
        assert batch.dense.shape == (6, 0)
    write(tmp_path / "floats.parquet", pa.array([-1, -5.0]))
    (chunk,) = open_reader(tmp_path / "floats.parquet", schema=schema).read_chunks(0, None, 9)
    assert bags(chunk.categories) == [[[-1]], [[-5]]]


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 11), (np.float32, 24), (np.float64, 53)])
def test_floats_are_ids_as_far_as_they_are_exact(path, dtype, bits):
    for last, is_good in ((2**bits - 1, True), (2**bits, False)):
        values = np.array([0, 1, last], dtype)
        for reader in (write(path, values), write_npy(path.parent, values)):
            with contextlib.nullcontext() if is_good else pytest.raises(DataError, match=rf"row 2.*2\*\*{bits}"):
                (chunk,) = reader.read_chunks(0, None, 9)
                assert values_of(chunk.categories).tolist() == [0, 1, last]


def test_formats_are_told_by_their_names(tmp_path, path):
    (tmp_path / "x.tsv").write_text("y\ta\tc\n1\t2\t3\n")
    assert isinstance(open_reader(tmp_path / "x.tsv", schema=SCHEMA), CsvReader)
    assert isinstance(open_reader(tmp_path / "x.tsv"), CriteoReader)
    write(path, [1])
    assert open_reader(path.rename(tmp_path / "x.pq"), schema=SCHEMA).num_rows == 1
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"x\.jsonl by its name; set data\.format"):
        open_reader(tmp_path / "x.jsonl", schema=SCHEMA)
    for dense, sparse, message in ((("a",), ("a",), r"more than once .*\['a'\]"), ((), (), "no sparse columns")):
        with pytest.raises(ValueError, match=message):
            Schema(label="y", dense=dense, sparse=sparse)


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
def test_wrong_values_are_named(path, name, values, message):
    with pytest.raises(DataError, match=message) as raised:
        list(write(path, [1, 2], **{name: pa.array(values)}).read_chunks(0, None, 10))
    assert len(str(raised.value)) < 1000


def test_text_that_is_not_text_is_hashed_all_the_same(path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    (chunk,) = write(path, broken).read_chunks(0, None, 10)
    assert len(set(values_of(chunk.categories))) == 2


def test_wrong_files_are_named(tmp_path, path):
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
    reader = write(path, [1] * 17 + [-5] + [1] * 2)
    for start in (0, 7, 13):
        with pytest.raises(DataError, match="row 17, column c: -5"):  # from the start of the file
            list(reader.read_chunks(start, None, 4))
    path.unlink()
    os.mkfifo(path)
    for asked in (tmp_path, path):
        with pytest.raises(DataError, match=r"x\.parquet is no plain file"):
            ParquetReader(asked)


def test_without_pyarrow_the_error_says_how_to_install_it(path, monkeypatch):
    write(path, [1])
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install 'PATH_OF_THE_CHECKOUT\[parquet\]'"):
        ParquetReader(path)


@given(
    st.lists(st.one_of(st.text(max_size=80), st.integers(-(10**19), 10**19).map(str), st.sampled_from(TEXTS))),
    st.booleans(), st.builds(CategoryRule, are_ids=st.booleans(), seed=st.integers(0, 2**63 - 1)),
)  # fmt: skip
def test_texts_are_integers_or_hashed_in_full(texts, floats, rule):
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts if text.isprintable()]
    letters = np.frombuffer(b"".join(encoded), np.uint8)
    offsets = np.cumsum([0, *map(len, encoded)])
    found = read_texts(letters, offsets, rule, floats=floats).tolist()
    wanted = [category_of(text, floats=floats, rule=rule) for text in texts if text.isprintable()]
    assert found == [-1 if category is None else category for category in wanted]


FIELDS = st.sampled_from(
    [*TEXTS, "", "17", "123.0", "a,b", 'a"b', '"', "two\nlines", "A\r\nB", '\r"', '""', ",", "|", "\t;", "x" * 40]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(FIELDS, FIELDS), max_size=8), st.sampled_from(["\n", "\r\n"]), st.integers(1, 60), st.booleans(),
    st.sampled_from(",\t;|"), st.booleans(), st.data(),
)  # fmt: skip
def test_any_fields_whatever_the_blocks(tmp_path, rows, newline, block_bytes, last_newline, delimiter, packed, data):
    """pyarrow lost the second half of a line end in quotes between two blocks. The oracle is Python's own csv."""
    folder = tmp_path / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    cut, start = (data.draw(st.integers(0, len(rows))) for _ in range(2))
    for name, part in (("a", rows[:cut]), ("b", rows[cut:])):  # files of a folder follow each other
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator=newline, delimiter=delimiter)
        fields = [[one, two, i % 2, "" if i % 2 else "1e-3"] for i, (one, two) in enumerate(part)]
        other = "o\nther" if delimiter == "," else "other"  # others are told by the first line
        writer.writerows([[other, "c", "y", "a"], *fields])
        content = text.getvalue() if last_newline else text.getvalue().removesuffix(newline)
        opened = gzip.open if packed else open
        with opened(folder / f"{name}.csv{'.gz' if packed else ''}", "wb") as file:
            file.write(content.encode())
    with mock.patch.object(csv_reader, "_BLOCK_BYTES", block_bytes if delimiter == "," else 60):
        chunks = list(open_reader(folder, schema=SCHEMA).read_chunks(start, None, 99))
    found = [bag for chunk in chunks for bag in bags(chunk.categories)]
    assert found == expected_bags([two for _, two in rows], floats=True)[start:]
    is_odd = [i % 2 == 1 for part in (rows[:cut], rows[cut:]) for i in range(len(part))][start:]
    assert [bool(label) for chunk in chunks for label in chunk.labels] == is_odd
    assert [bool(np.isnan(value)) for chunk in chunks for value in chunk.dense[:, 0]] == is_odd


def test_a_stray_quote_is_an_error_with_its_row_and_a_row_has_an_end(tmp_path, monkeypatch):
    path = tmp_path / "x.tsv"
    for strays, message in (
        ({7}, "row 7: the quoted field '\"odd.* is not closed"),
        ({7, 12}, "row 7: the quoted field '\"odd.* goes on behind its closing quote"),
        ({29}, "row 29: "),
        (set(), None),
    ):
        texts = ['"odd' if row in strays else f"q{row}" for row in range(30)]
        path.write_text("y\ta\tc\n\n" + "".join(f"1\t2\t{text}\n" for text in texts))
        for block_bytes, limit in ((1 << 22, 1 << 24), (1 << 22, 60), (50, 1 << 24), (50, 60)):
            monkeypatch.setattr(csv_reader, "_BLOCK_BYTES", block_bytes)
            monkeypatch.setattr(csv_reader, "_MAX_ROW_BYTES", 1 << 24)
            unquoted = open_reader(path, schema=SCHEMA, quoting=False).read_chunks(0, None, 7)
            assert [bag for chunk in unquoted for bag in bags(chunk.categories)] == expected_bags(texts)
            monkeypatch.setattr(csv_reader, "_MAX_ROW_BYTES", limit)
            with pytest.raises(DataError, match=message) if message else contextlib.nullcontext():
                list(open_reader(path, schema=SCHEMA).read_chunks(0, None, 7))
    path.write_text("y\ta\tc\n1\t2\t3\n1\t2\t" + "x" * 300)
    with pytest.raises(DataError, match="row 1: longer than 60 bytes"):
        list(open_reader(path, schema=SCHEMA).read_chunks(0, None, 7))


BROKEN = [
    ("y,a,c\n1,2,3\n\n1,2\n", r"x\.csv, row 1: 2 fields, and the header has 3: '1,2'"),
    ("y,a,c\n1,z,3\n", r"x\.csv, row 0, column a: 'z' is no number; leave the field empty where it is missing"),
    ("y,q,a,c\n1,a,2,3\n1,b,NA,3\n", r"x\.csv, row 1, column a: 'NA'"),
    ("y,a\n1,2\n", r"x\.csv lacks the columns c; it has a, y"),
    ("y,a,c,c\n1,2,3,4\n", r"x\.csv has more than one column of the name c"),
    ("", r"x\.csv is not a CSV file with a header"),
]


def test_broken_csv_is_named(tmp_path):
    for text, message in BROKEN:
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            list(open_reader(tmp_path / "x.csv", schema=SCHEMA).read_chunks(0, None, 9))
    whole = gzip.compress(b"y,a,c\n" + b"".join(b"1,2,%d\n" % i for i in range(9000)))
    (tmp_path / "x.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x\.csv\.gz is not a CSV file"):
        list(open_reader(tmp_path / "x.csv.gz", schema=SCHEMA).read_chunks(0, None, 999))
