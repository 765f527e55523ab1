"""The npy reader against the rows its arrays were made of."""

import numpy as np
import pytest

from tierstore.train.readers import DataError, NpyReader, Schema, open_reader

from .rows import check_reader, some_rows


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
    for start in range(24):
        for stop in (None, start, 23):
            check_reader(reader, rows, start_row=start, stop_row=stop)


def test_arrays_are_mapped_not_loaded_and_never_changed(folder):
    path, _ = folder
    before = (path / "dense.npy").read_bytes()
    reader = NpyReader(path)
    chunk = next(reader.read_chunks(0, None, 5))
    chunk.dense[:] = 7
    chunk.labels[:] = 7
    assert isinstance(reader._dense, np.memmap)
    assert (path / "dense.npy").read_bytes() == before


def test_other_columns(tmp_path):
    np.save(tmp_path / "label.npy", np.array([0.0, 1.0]))
    np.save(tmp_path / "dense.npy", np.array([[1], [2]]))
    np.save(tmp_path / "sparse.npy", np.array([[1, 2], [3, 4]], np.int32))
    reader = NpyReader(tmp_path, schema=Schema(label="y", dense=("a",), sparse=("b", "c")))
    (chunk,) = reader.read_chunks(0, None, 9)
    assert chunk.categories.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("label.npy", np.zeros(22), "differ in rows"),
        ("label.npy", np.full(23, 2), r"label\.npy, row 0: 2 is not 0 or 1"),
        ("dense.npy", np.zeros((23, 12)), r"dense\.npy holds float64 \[23, 12\]; expected \[rows, 13\]"),
        ("sparse.npy", np.zeros((23, 26)), r"sparse\.npy holds float64"),
    ],
)
def test_wrong_arrays_are_named(folder, name, array, message):
    path, _ = folder
    np.save(path / name, array)
    with pytest.raises(DataError, match=message):
        list(NpyReader(path).read_chunks(0, None, 10))


def test_missing_and_broken_files_are_named(folder):
    path, _ = folder
    whole = (path / "sparse.npy").read_bytes()
    for kept in (0, 20, len(whole) - 1):
        (path / "sparse.npy").write_bytes(whole[:kept])
        with pytest.raises(DataError, match=r"sparse\.npy is not an npy file, or is cut short"):
            NpyReader(path)
    (path / "sparse.npy").unlink()
    with pytest.raises(DataError, match=r"sparse\.npy does not exist"):
        NpyReader(path)
