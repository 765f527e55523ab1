"""What columns may hold, in each format, against one value at a time in plain Python."""

import contextlib
import csv
import gzip
import io
import math
import shutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.train.readers import (
    CriteoReader,
    CsvReader,
    DataError,
    FeatureHasher,
    Schema,
    open_reader,
)
from tierstore.train.readers import csv as csv_reader
from tierstore.train.readers.categories import CategoryRule, read_texts

from .rows import IDS, SCHEMA, bags, category_of, values_of, write_npy

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.kernel

TEXTS = ["ab", "AB", "0ab", "F", "02134", "2134", "0", "00", "-1", "1.0", "\u00e9", "x" * 300, " 7", "9" * 18]
TEXTS += [str(2**63 - 1), str(2**63), "9" * 19, "9" * 20, "-0", "-01", "-", "-5.0", str(-(2**63)), str(-(2**63) - 1)]


def expected(column, *, floats=False):
    """The bags of one column: of lists, or of values."""
    lists = [value if isinstance(value, list) else [value] for value in column]
    found = [[category_of(value, floats=floats) for value in each] for each in lists]
    return [[[category for category in each if category is not None]] for each in found]


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


def test_ids_are_any_int64_and_the_same_in_every_format(tmp_path):
    ids, schema = [5, -(2**63), -17, 2**63 - 1, 0], Schema(label="y", dense=("a",), sparse=("c",), rule=IDS)
    pq.write_table(table_of(pa.array([*ids, None])), tmp_path / "ids.parquet")
    pq.write_table(table_of([*map(str, ids), None]), tmp_path / "texts.parquet")
    (tmp_path / "x.csv").write_text("y,a,c\n" + "".join(f"1,2,{text}\n" for text in [*ids, ""]))
    for name, values in (("label", [1] * 6), ("dense", [[1]] * 6), ("sparse", [[each] for each in [*ids, -1]])):
        np.save(tmp_path / f"{name}.npy", np.array(values))
    for path in (tmp_path / "ids.parquet", tmp_path / "texts.parquet", tmp_path / "x.csv", tmp_path):
        (batch,) = open_reader(path, schema=schema).batches(FeatureHasher([9], mode="none"), batch_size=9)
        assert batch.sparse.values().tolist() == ids, path
        assert batch.sparse.lengths().tolist() == [1, 1, 1, 1, 1, 0], path
    pq.write_table(table_of(pa.array([-1, -5.0])), tmp_path / "floats.parquet")
    (chunk,) = open_reader(tmp_path / "floats.parquet", schema=schema).read_chunks(0, None, 9)
    assert bags(chunk.categories) == [[[-1]], [[-5]]]


def table_of(column, labels=None):
    return pa.table({"y": labels or [1] * len(column), "a": [0.5] * len(column), "c": column})


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
def test_columns_of_parquet(tmp_path, kind):
    column = KINDS[kind]
    pq.write_table(table_of(column), tmp_path / "x.parquet", row_group_size=3)
    reader = open_reader(tmp_path / "x.parquet", schema=SCHEMA)
    wanted = expected(column.to_pylist() if kind != "bytes" else KINDS["strings"].to_pylist())
    for start in range(len(column)):
        (chunk,) = reader.read_chunks(start, None, 100)
        assert bags(chunk.categories) == wanted[start:]
    assert [len(bag) for (bag,) in bags(chunk.categories)] == np.diff(chunk.categories.offsets).tolist()[0]


FIELDS = st.sampled_from(
    [*TEXTS, "", "17", "123.0", "a,b", 'a"b', '"', "two\nlines", "A\r\nB", "\r,", '""', ",", "|", "\t;", "x" * 40]
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
    assert found == expected([two for _, two in rows], floats=True)[start:]
    is_odd = [i % 2 == 1 for part in (rows[:cut], rows[cut:]) for i in range(len(part))][start:]
    assert [bool(label) for chunk in chunks for label in chunk.labels] == is_odd
    assert [bool(np.isnan(value)) for chunk in chunks for value in chunk.dense[:, 0]] == is_odd


@pytest.mark.parametrize("block_bytes", [1 << 22, 50])
@pytest.mark.parametrize(
    ("strays", "message"),
    [
        ({7}, "row 7: the quoted field '\"odd.* is not closed"),
        ({7, 12}, "row 7: the quoted field '\"odd.* goes on behind its closing quote"),
        ({29}, "row 29: "),
        (set(), None),
    ],
    ids=str,
)
def test_a_stray_quote_is_an_error_with_its_row(tmp_path, monkeypatch, strays, message, block_bytes):
    monkeypatch.setattr(csv_reader, "_BLOCK_BYTES", block_bytes)
    texts = ['"odd' if row in strays else f"q{row}" for row in range(30)]
    path = tmp_path / "x.tsv"
    path.write_text("y\ta\tc\n\n" + "".join(f"1\t2\t{text}\n" for text in texts))
    reader = open_reader(path, schema=SCHEMA, quoting=False)
    assert [bag for chunk in reader.read_chunks(0, None, 7) for bag in bags(chunk.categories)] == expected(texts)
    for limit in (1 << 24, 60):
        monkeypatch.setattr(csv_reader, "_MAX_ROW_BYTES", limit)
        with pytest.raises(DataError, match=message) if message else contextlib.nullcontext():
            list(open_reader(path, schema=SCHEMA).read_chunks(0, None, 7))


def test_a_row_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_reader, "_BLOCK_BYTES", 50)
    monkeypatch.setattr(csv_reader, "_MAX_ROW_BYTES", 200)
    (tmp_path / "x.csv").write_text("y,a,c\n1,2,3\n1,2," + "x" * 300)
    with pytest.raises(DataError, match="row 1: longer than 200 bytes"):
        list(open_reader(tmp_path / "x.csv", schema=SCHEMA).read_chunks(0, None, 7))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_ids_as_far_as_they_are_exact(tmp_path, dtype):
    bits = {np.float16: 11, np.float32: 24, np.float64: 53}[dtype]
    largest = 2**bits - 1
    for last, is_good in ((largest, True), (largest + 1, False)):
        values = np.array([0, 1, last], dtype)
        pq.write_table(table_of(pa.array(values)), tmp_path / "x.parquet")
        for reader in (open_reader(tmp_path / "x.parquet", schema=SCHEMA), write_npy(tmp_path, values)):
            with contextlib.nullcontext() if is_good else pytest.raises(DataError, match=rf"row 2.*2\*\*{bits}"):
                (chunk,) = reader.read_chunks(0, None, 9)
                assert values_of(chunk.categories).tolist() == [0, 1, last]


BROKEN_CSV = [
    ("y,a,c\n1,2,3\n\n1,2\n", r"x\.csv, row 1: 2 fields, and the header has 3: '1,2'"),
    ("y,a,c\n1,z,3\n", r"x\.csv, row 0, column a: 'z' is no number; leave the field empty where it is missing"),
    ("y,q,a,c\n1,a,2,3\n1,b,NA,3\n", r"x\.csv, row 1, column a: 'NA'"),
    ("y,a\n1,2\n", r"x\.csv lacks the columns c; it has a, y"),
    ("y,a,c,c\n1,2,3,4\n", r"x\.csv has more than one column of the name c"),
    ("", r"x\.csv is not a CSV file with a header"),
]


def test_broken_csv_is_named(tmp_path):
    for text, message in BROKEN_CSV:
        (tmp_path / "x.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            list(open_reader(tmp_path / "x.csv", schema=SCHEMA).read_chunks(0, None, 9))
    whole = gzip.compress(b"y,a,c\n" + b"".join(b"1,2,%d\n" % i for i in range(9000)))
    (tmp_path / "x.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"x\.csv\.gz is not a CSV file"):
        list(open_reader(tmp_path / "x.csv.gz", schema=SCHEMA).read_chunks(0, None, 999))


def test_formats_are_told_by_their_names(tmp_path):
    (tmp_path / "x.tsv").write_text("y\ta\tc\n1\t2\t3\n")
    assert isinstance(open_reader(tmp_path / "x.tsv", schema=SCHEMA), CsvReader)
    assert isinstance(open_reader(tmp_path / "x.tsv"), CriteoReader)
    pq.write_table(table_of(pa.array([1])), tmp_path / "x.pq")
    assert open_reader(tmp_path / "x.pq", schema=SCHEMA).num_rows == 1
    (tmp_path / "x.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"x\.jsonl by its name; set data\.format"):
        open_reader(tmp_path / "x.jsonl", schema=SCHEMA)
    for dense, sparse, message in ((("a",), ("a",), r"more than once .*\['a'\]"), ((), (), "no sparse columns")):
        with pytest.raises(ValueError, match=message):
            Schema(label="y", dense=dense, sparse=sparse)


def test_labels(tmp_path):
    for labels in (
        [1, 0, 1],
        [1, -1, 1],
        [True, False, True],
        [1.0, -1.0, 1.0],
        ["1", "0", "1"],
        ["True", "false", "TRUE"],
    ):
        pq.write_table(table_of([1, 2, 3], labels), tmp_path / "x.parquet")
        (batch,) = open_reader(tmp_path / "x.parquet", schema=SCHEMA).batches(FeatureHasher([9]), batch_size=9)
        assert batch.labels.tolist() == [1, 0, 1], labels
    pq.write_table(table_of([1] * 6, [1, 0, 1, 1, 1, -1]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet, row 4 or after it: labels are 0 in some rows and -1 in others"):
        list(open_reader(tmp_path / "x.parquet", schema=SCHEMA).batches(FeatureHasher([9]), batch_size=2))


def test_without_dense_columns(tmp_path):
    schema = Schema(label="y", dense=(), sparse=("c",))
    pq.write_table(table_of([1, 2, 3]), tmp_path / "x.parquet")
    np.save(tmp_path / "label.npy", np.ones(3))
    np.save(tmp_path / "sparse.npy", np.array([[1], [2], [3]]))
    (tmp_path / "x.csv").write_text("y,c\n1,1\n1,2\n1,3\n")
    for path in (tmp_path, tmp_path / "x.parquet", tmp_path / "x.csv"):
        (chunk,) = open_reader(path, schema=schema).read_chunks(0, None, 9)
        assert chunk.dense.shape == (3, 0)
        assert bags(chunk.categories) == [[[1]], [[2]], [[3]]]
