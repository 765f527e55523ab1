"""The npy reader against the rows its arrays were made of; arrays that it cannot take are named."""

import dataclasses
import os
import tracemalloc

import numpy as np
import pytest

from tierstore.train.readers import CRITEO_SCHEMA, DataError, NpyReader, open_reader

from .rows import bags, check_reader, some_rows, write_npy


@pytest.fixture
def folder(tmp_path):
    rows = some_rows(23)
    np.save(tmp_path / "label.npy", np.array([row[0] for row in rows], np.uint8))
    dense = [[np.nan if x is None else x for x in row[1]] for row in rows]
    np.save(tmp_path / "dense.npy", np.array(dense, np.float32))
    np.save(tmp_path / "sparse.npy", np.array([[-1 if x is None else x for x in row[2]] for row in rows], np.int64))
    return tmp_path, rows


def test_rows_from_any_row_on(folder):
    path, rows = folder
    reader = open_reader(path)
    assert isinstance(reader, NpyReader)
    for start, stop in ((0, None), (0, 22), (7, 7), (7, 22), (22, 23), (23, None)):
        check_reader(reader, rows, start_row=start, stop_row=stop)


def test_categories_of_each_kind(tmp_path):
    bounds = np.array([0, 2, 2, 4], np.int32)
    for values, offsets, wanted in (
        (np.array([4, -1, 0], np.int32), None, [[4], [], [0]]),
        (np.array([4, np.nan, 0]), None, [[4], [], [0]]),
        (np.array([True, False, True]), None, [[1], [0], [1]]),
        (np.array([[4, 1], [-1, 2], [-1, -1]]), None, [[4, 1], [2], []]),
        (np.array([4, 1, 2, 9], np.uint32), bounds, [[4, 1], [], [2, 9]]),
        (np.array([4, np.nan, 2, 9]), bounds, [[4], [], [2, 9]]),
    ):
        reader = write_npy(tmp_path, values, offsets)
        for start in range(3):
            (chunk,) = reader.read_chunks(start, None, 9)
            assert bags(chunk.categories) == [[each] for each in wanted[start:]]


def test_without_dense_columns_an_array_of_that_name_is_what_is_asked_of_it(folder):
    path, rows = folder
    np.save(path / "dense.npy", np.arange(23.0))
    schema = dataclasses.replace(CRITEO_SCHEMA, dense=(), weight="dense")
    (chunk,) = NpyReader(path, schema=schema).read_chunks(0, None, len(rows))
    assert (chunk.dense.shape, chunk.weights.tolist()) == ((23, 0), [*range(23)])


def of_23(last, dtype=None, columns=()):
    """Zeros, and then a value that no model can take."""
    array = np.zeros((23, *columns), dtype)
    array[20:] = last
    return array


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("label", np.zeros(22), "differ in rows"),
        ("label", of_23(2), r"row 20: 2"),
        ("dense", of_23(0, columns=(12,)), r"holds float64 \[23, 12\]"),
        ("dense", of_23(np.inf, np.float32, (13,)), r"row 20, column 0: inf"),
        ("dense", np.zeros((23, 13), [("x" * 200, "f4")]), r"holds \[\(.{197,198} \[23, 13\]"),
        ("sparse", of_23(0, columns=(25,)), r"holds float64 \[23, 25\]"),
        ("sparse", of_23(2**63, np.uint64, (26,)), r"row 20, column 0: 9223372036854775808"),
    ],
)
def test_wrong_arrays_are_named(folder, name, array, message):
    path, _ = folder
    np.save(path / f"{name}.npy", array)
    with pytest.raises(DataError, match=message) as raised:
        list(NpyReader(path).read_chunks(0, None, 10))
    assert f"{name}.npy" in str(raised.value)


def test_wrong_categories_are_named(tmp_path):
    for values, offsets, message in (
        (np.array([1.5, 2, 3]), None, r"c\.npy, row 0: 1\.5"),
        (np.array([1, 2, 1e17]), None, r"c\.npy, row 2: 1e\+17"),
        (np.array(["a", "b", "c"]), None, r"c\.npy holds <U1 \[3\]"),
        (
            np.arange(4),
            [0, 2, 2, 5],
            r"c\.offsets\.npy holds \[4\]; expected \[3 \+ 1\] offsets, with the end, from 0 to 4",
        ),
        (np.arange(4), [0, 2, 3], r"c\.offsets\.npy holds \[3\]; expected \[3 \+ 1\]"),
        (np.arange(4), [0, 9, 3, 4], r"c\.offsets\.npy, row 0: 9 is not from the last to 4"),
        (np.arange(4), [0, 3, 2, 4], r"c\.offsets\.npy, row 1: 2"),
        (np.arange(4), [0, 4], r"differ in rows: .*'c\.npy': 1"),
    ):
        with pytest.raises(DataError, match=message):
            list(write_npy(tmp_path, values, offsets).read_chunks(0, None, 9))


def test_a_long_header_is_refused_before_it_is_read(folder):
    path, _ = folder
    (path / "label.npy").write_bytes(b"\x93NUMPY\x02\x00" + (1 << 29).to_bytes(4, "little"))
    os.truncate(path / "label.npy", (1 << 29) + 12)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"its header would take 536,870,912 bytes"):
            NpyReader(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_missing_and_broken_files_are_named(folder):
    path, _ = folder
    whole = (path / "sparse.npy").read_bytes()
    for kept in (0, 20, len(whole) - 1):
        (path / "sparse.npy").write_bytes(whole[:kept])
        with pytest.raises(DataError, match=r"sparse\.npy is not an npy file, or is cut short"):
            NpyReader(path)
    (path / "sparse.npy").unlink()
    with pytest.raises(DataError, match=r"C1\.npy does not exist; .* sparse\.npy or a file for each sparse column"):
        NpyReader(path)
    os.mkfifo(path / "sparse.npy")
    with pytest.raises(DataError, match=r"sparse\.npy is no plain file"):
        NpyReader(path)
