"""The Criteo reader against a plain parser: any rows, compressed or not, from any row on, and broken files."""

import gzip
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierstore.train.readers import CRITEO_SCHEMA, CriteoReader, DataError, criteo, open_reader

from .rows import HASHER, IDS, ROWS, category_of, check_reader, matrix, some_rows, to_text, values_of

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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    ROWS, st.booleans(), st.lists(st.sampled_from(["\n", "\r\n"]), min_size=12, max_size=12), st.booleans(), st.data()
)
def test_any_rows_from_any_row_on(write, rows, compress, newlines, last_newline, data):
    text = "".join(to_text([row], newline) for row, newline in zip(rows, newlines, strict=False))
    path = write(text if last_newline else text.removesuffix("\n").removesuffix("\r"), compress)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.one_of(st.none(), st.integers(start, len(rows))))
    batch_size = data.draw(st.integers(1, 5))
    reader = CriteoReader(path)
    check_reader(reader, rows, start_row=start, stop_row=stop, batch_size=batch_size)
    part = rows[start:stop]
    for chunk in reader.read_chunks(start, stop, 12):
        dense = np.array([[np.nan if x is None else x for x in row[1]] for row in part], np.float32)
        assert np.array_equal(chunk.dense, dense, equal_nan=True)
        assert matrix(chunk.categories).tolist() == [[-1 if x is None else x for x in row[2]] for row in part]
    for chunk in open_reader(path, schema=replace(CRITEO_SCHEMA, rule=IDS)).read_chunks(start, stop, 12):
        as_ids = [[-1 if x is None else category_of(f"{x:08x}", rule=IDS) for x in row[2]] for row in part]
        assert matrix(chunk.categories).tolist() == as_ids
    with pytest.raises(DataError, match=f"ends before row {len(rows) + 1}"):
        list(reader.batches(HASHER, batch_size=batch_size, start_row=start, stop_row=len(rows) + 1))


@pytest.mark.parametrize("buffer_bytes", [700, 1025])
def test_lines_across_the_ends_of_the_buffer(write, monkeypatch, buffer_bytes):
    monkeypatch.setattr(criteo, "BUFFER_BYTES", buffer_bytes)
    rows = some_rows(20)
    reader = CriteoReader(write(to_text(rows)))
    for start in range(0, 21, 2):
        check_reader(reader, rows, start_row=start)
    # A broken line longer than what was read is explained whole, and one without end fills no memory.
    path = write(with_field(0, "7") + "\n" + with_field(2, "7" * 30) + "\n" + GOOD + "\n")
    with pytest.raises(DataError, match=r"line 2, column 3"):
        list(CriteoReader(path).read_chunks(1, None, 1))
    for start in (0, 1):
        with pytest.raises(DataError, match=f"line 1: longer than {buffer_bytes} bytes"):
            list(CriteoReader(write(b"0" * 3000)).batches(HASHER, batch_size=1, start_row=start))


def test_capital_digits_leading_zeros_and_dense_values_as_they_are(write):
    fields = ["1", *["007"] * 13, *["00AbCdEf"] * 26]
    path = write("\t".join(fields))
    (chunk,) = CriteoReader(path).read_chunks(0, None, 1)
    assert (chunk.dense == 7).all()
    assert (values_of(chunk.categories) == 0xABCDEF).all()
    (batch,) = CriteoReader(path).batches(HASHER, batch_size=1, log_dense=False)
    assert (batch.dense == 7).all()


def with_field(column, value):
    fields = GOOD.split("\t")
    fields[column] = value
    return "\t".join(fields)


BROKEN = {
    "": r"line 3: 1 tab",
    GOOD + "\t5": r"line 3: 41 tab",
    GOOD.rsplit("\t", 1)[0]: r"line 3: 39 tab",
    GOOD + "\r" + GOOD: "line 3: 79 tab",
    "\x00" * 100: "line 3: 1 tab",
}
FIELDS = {
    (0, r"column 1 \(label\)"): ["2", "", "\ufeff1"],
    (5, r"column 6 \(I5\)"): ["1.5", "-", "9" * 19, "nan", "1e5"],
    (14, r"column 15 \(C1\)"): ["xyz", "f" * 16, "\x00", "x" * 10**5, "\x1b[2J", "0\r"],
    (39, r"column 40 \(C26\)"): ["g"],
}
BROKEN |= {with_field(at, field): f"line 3, {where}" for (at, where), all_ in FIELDS.items() for field in all_}


def test_a_broken_line_is_named(write):
    for line, message in BROKEN.items():
        for behind in ([GOOD], [] if line else [GOOD]):
            reader = CriteoReader(write("\n".join([GOOD, GOOD, line, *behind]) + "\n"))
            with pytest.raises(DataError, match=message) as raised:
                list(reader.batches(HASHER, batch_size=2))
            assert "\x1b" not in str(raised.value)
            assert len(str(raised.value)) < 1000
            skipped = reader.batches(HASHER, batch_size=2, start_row=3)  # which are not looked at
            assert sum(map(len, skipped)) == len(behind)


def test_a_gzip_file_cut_short_is_named_with_the_last_whole_line(write):
    path = write(to_text(some_rows(1000)), compress=True)
    data = path.read_bytes()
    for kept, line in ((40, "0"), (len(data) * 9 // 10, r"[89]\d\d"), (-1, "1000")):
        path.write_bytes(data[:kept])
        with pytest.raises(DataError, match=rf"day\.tsv, after line {line}: .*copy it again"):
            list(CriteoReader(path).batches(HASHER, batch_size=50))
    path.write_bytes(data + b"more")
    with pytest.raises(DataError, match=r"after line \d+: the gzip data is broken"):
        list(CriteoReader(path).batches(HASHER, batch_size=2))


def test_what_cannot_be_read_is_named(write, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "nosuch"):
        with pytest.raises(DataError, match=f"{path.name} (is no plain file|cannot be read)"):
            list(CriteoReader(path).read_chunks(0, None, 1))
    path = write("")
    assert isinstance(open_reader(path), CriteoReader)
    for wrong in ({"start_row": -1}, {"batch_size": 0}, {"start_row": 5, "stop_row": 4}):
        with pytest.raises(ValueError, match="not a range of rows"):
            CriteoReader(path).batches(HASHER, **{"batch_size": 1, **wrong})
    for wrong, data_format, reason in (
        (tmp_path / "nosuch", "auto", "does not exist"),
        (tmp_path, "criteo", "is a folder"),
        (path, "orc", "data_format='orc'"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_reader(wrong, data_format=data_format)
