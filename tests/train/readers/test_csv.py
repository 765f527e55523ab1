"""Texts as categories, and the CSV reader, against one value at a time in plain Python."""

import contextlib
import csv
import gzip
import io
import shutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.train.readers import DataError, open_reader
from tierstore.train.readers import csv as csv_reader
from tierstore.train.readers.categories import CategoryRule, read_texts

from .rows import SCHEMA, TEXTS, bags, category_of, expected_bags

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.kernel


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
