"""The Criteo reader against a plain parser: any rows, compressed or not, from any row on, and broken files."""

import gzip
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.train.readers import CriteoReader, DataError, criteo, open_reader

from .rows import HASHER, ROWS, check_reader, matrix, some_rows, to_text

pytestmark = pytest.mark.kernel
GOOD = to_text(some_rows(1)).rstrip("\n")


@pytest.fixture
def write(tmp_path):
    def write_file(text, compress=False):
        path = tmp_path / "day.tsv"
        data = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(gzip.compress(data) if compress else data)
        return path

    return write_file


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(ROWS, st.booleans(), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.data())
def test_any_rows_from_any_row_on(write, rows, compress, newline, last_newline, data):
    text = to_text(rows, newline)
    path = write(text if last_newline else text.removesuffix(newline), compress)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.one_of(st.none(), st.integers(start, len(rows))))
    batch_size = data.draw(st.integers(1, 5))
    check_reader(CriteoReader(path), rows, start_row=start, stop_row=stop, batch_size=batch_size)


@pytest.mark.parametrize("buffer_bytes", [700, 1024, 1025])
def test_lines_across_the_ends_of_the_buffer(write, monkeypatch, buffer_bytes):
    monkeypatch.setattr(criteo, "BUFFER_BYTES", buffer_bytes)
    rows = some_rows(30)
    reader = CriteoReader(write(to_text(rows)))
    for start in range(31):
        check_reader(reader, rows, start_row=start)


def test_a_chunk_is_full_and_memory_is_bounded(write):
    rows = some_rows(50)
    chunks = list(CriteoReader(write(to_text(rows))).read_chunks(3, 48, 10))
    assert [len(chunk.labels) for chunk in chunks] == [10, 10, 10, 10, 5]
    assert all(chunk.dense.shape == (len(chunk.labels), 13) for chunk in chunks)


def test_raw_rows_hold_nan_and_minus_one_where_values_are_missing(write):
    rows = some_rows(20)
    (chunk,) = CriteoReader(write(to_text(rows))).read_chunks(0, None, 100)
    dense = np.array([[np.nan if x is None else x for x in row[1]] for row in rows], np.float32)
    assert np.array_equal(chunk.dense, dense, equal_nan=True)
    assert matrix(chunk.categories).tolist() == [[-1 if x is None else x for x in row[2]] for row in rows]


def test_capital_digits_and_leading_zeros(write):
    fields = ["1", *["007"] * 13, *["00AbCdEf"] * 26]
    (chunk,) = CriteoReader(write("\t".join(fields))).read_chunks(0, None, 1)
    assert (chunk.dense == 7).all()
    assert (chunk.categories.values == 0xABCDEF).all()


def with_field(column, value):
    fields = GOOD.split("\t")
    fields[column] = value
    return "\t".join(fields)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"day\.tsv, line 3: 1 tab-separated columns; Criteo's format has 40"),
        ("hello", r"line 3: 1 tab-separated columns"),
        (GOOD + "\t5", r"line 3: 41 tab-separated columns"),
        (GOOD.rsplit("\t", 1)[0], r"line 3: 39 tab-separated columns"),
        (GOOD.replace("\t", ","), r"line 3: 1 tab-separated columns"),
        (with_field(0, "2"), r"line 3, column 1 \(label\): '2' is not 0 or 1"),
        (with_field(0, ""), r"column 1 \(label\): '' is not 0 or 1"),
        (with_field(5, "1.5"), r"column 6 \(I5\): '1\.5' is not an integer"),
        (with_field(5, "-"), r"column 6 \(I5\): '-' is not an integer"),
        (with_field(5, "9" * 19), r"column 6 \(I5\)"),
        (with_field(14, "xyz"), r"column 15 \(C1\): 'xyz' is not a hexadecimal"),
        (with_field(39, "g"), r"column 40 \(C26\): 'g' is not a hexadecimal"),
        (with_field(20, "f" * 16), r"column 21 \(C7\)"),
        (with_field(20, "\x00"), r"column 21 \(C7\)"),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_broken_line_is_named(write, line, message, last):
    path = write("\n".join([GOOD, GOOD, line, *([] if last and line else [GOOD])]) + "\n")
    reader = CriteoReader(path)
    with pytest.raises(DataError, match=message):
        list(reader.batches(HASHER, batch_size=2))
    # Rows that are skipped are not looked at.
    assert sum(len(batch) for batch in reader.batches(HASHER, batch_size=2, start_row=3)) == (0 if last and line else 1)


def test_a_broken_line_longer_than_what_was_read_is_explained_whole(write, monkeypatch):
    monkeypatch.setattr(criteo, "BUFFER_BYTES", 700)
    path = write(with_field(0, "7") + "\n" + with_field(2, "7" * 30) + "\n" + GOOD + "\n")
    with pytest.raises(DataError, match=r"line 2, column 3"):
        list(CriteoReader(path).read_chunks(1, None, 1))


def test_a_file_without_lines_is_refused_without_filling_memory(write, monkeypatch):
    monkeypatch.setattr(criteo, "BUFFER_BYTES", 1024)
    with pytest.raises(DataError, match="line 1: longer than 1024 bytes"):
        list(CriteoReader(write(b"0" * 3000)).batches(HASHER, batch_size=1))
    with pytest.raises(DataError, match="line 1: longer than 1024 bytes"):
        list(CriteoReader(write(b"0" * 3000)).batches(HASHER, batch_size=1, start_row=1))


@pytest.mark.parametrize(("keep", "line"), [(40, 0), (0.9, r"1\d\d\d"), (-1, 2000)])
def test_a_gzip_file_cut_short_is_named_with_the_last_whole_line(write, keep, line):
    path = write(to_text(some_rows(2000)), compress=True)
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(DataError, match=rf"day\.tsv, after line {line}: the file is truncated, .*; copy it anew"):
        list(CriteoReader(path).batches(HASHER, batch_size=8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "\r" + GOOD + "\r", "line 1: 79 tab-separated columns"),
        (GOOD + "\r\r\n", r"line 1, column 40 \(C26\)|line 1: 40"),
        ("\x00" * 100 + "\n", "line 1: 1 tab-separated columns"),
        ("\ufeff" + GOOD + "\n", r"line 1, column 1 \(label\): '\\ufeff1' is not 0 or 1|column 1"),
        (GOOD.replace("\t", "\t\t", 1) + "\n", "line 1: 41 tab-separated columns"),
        (with_field(3, "nan") + "\n", r"column 4 \(I3\): 'nan' is not an integer"),
        (with_field(3, "1e5") + "\n", r"column 4 \(I3\): '1e5' is not an integer"),
        (with_field(20, "x" * 10**5) + "\n", r"column 21 \(C7\): 'x{80}'\.\.\. is not a hexadecimal"),
        (with_field(20, "\x1b[2J") + "\n", r"column 21 \(C7\): '\\x1b\[2J' is not"),
    ],
    ids=str.split("return returns nul bom gap nan float long control"),
)
def test_other_texts_end_in_a_short_error(write, text, message):
    with pytest.raises(DataError, match=rf"day\.tsv, {message}" if message.startswith("line") else message) as raised:
        list(CriteoReader(write(text)).batches(HASHER, batch_size=2))
    assert "\x1b" not in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_mixed_line_ends_are_taken_as_they_come(write):
    rows = some_rows(3)
    text = "".join(to_text([row], end) for row, end in zip(rows, ["\n", "\r\n", "\n"], strict=True))
    check_reader(CriteoReader(write(text)), rows)


def test_an_empty_file_has_no_rows(write):
    assert list(CriteoReader(write("")).batches(HASHER, batch_size=2)) == []
    assert list(CriteoReader(write("", compress=True)).batches(HASHER, batch_size=2)) == []
    with pytest.raises(DataError, match="ends before row 1"):
        list(CriteoReader(write("")).batches(HASHER, batch_size=2, stop_row=1))


def test_what_is_no_plain_file_is_refused_unopened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DataError, match="is no plain file; write the data to one"):
            list(CriteoReader(path).read_chunks(0, None, 1))
    with pytest.raises(DataError, match="nosuch cannot be read: No such file"):
        list(CriteoReader(tmp_path / "nosuch").read_chunks(0, None, 1))


def test_bytes_after_the_gzip_data_are_named(write):
    path = write(to_text(some_rows(5)), compress=True)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"after line \d: the gzip data is broken: Not a gzipped file"):
        list(CriteoReader(path).batches(HASHER, batch_size=2))


def test_a_failing_device_is_named(write, monkeypatch):
    path = write(to_text(some_rows(5)))

    class Failing:
        def readinto1(self, _):
            raise OSError(5, "Input/output error")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(criteo, "_open", lambda _: Failing())
    with pytest.raises(DataError, match=r"day\.tsv, after line 0: cannot be read: Input/output error"):
        list(CriteoReader(path).read_chunks(0, None, 2))


def test_fewer_rows_than_asked_for_is_an_error(write):
    path = write(to_text(some_rows(5)))
    with pytest.raises(DataError, match=r"day\.tsv ends before row 6: asked for rows 2 to 6"):
        list(CriteoReader(path).batches(HASHER, batch_size=2, start_row=2, stop_row=6))
    with pytest.raises(DataError, match="ends before row 9"):
        list(CriteoReader(path).batches(HASHER, batch_size=2, start_row=8, stop_row=9))


@pytest.mark.parametrize("wrong", [{"start_row": -1}, {"batch_size": 0}, {"start_row": 5, "stop_row": 4}])
def test_a_wrong_range_is_an_error_at_the_call(write, wrong):
    with pytest.raises(ValueError, match="not a range of rows"):
        CriteoReader(write("")).batches(HASHER, **{"batch_size": 1, **wrong})


def test_dense_values_can_be_left_as_they_are(write):
    rows = some_rows(3)
    (batch,) = CriteoReader(write(to_text(rows))).batches(HASHER, batch_size=3, log_dense=False)
    assert batch.dense.tolist() == [[0.0 if x is None else float(x) for x in row[1]] for row in rows]


def test_open_reader_tells_the_format(write, tmp_path):
    path = write("")
    assert isinstance(open_reader(path), CriteoReader)
    with pytest.raises(DataError, match="does not exist"):
        open_reader(tmp_path / "nosuch")
    with pytest.raises(DataError, match="is a folder"):
        open_reader(tmp_path, data_format="criteo")
    with pytest.raises(ValueError, match="data_format='orc'"):
        open_reader(path, data_format="orc")
