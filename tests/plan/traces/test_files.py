"""Traces in files of three formats: what is written is read, and what is no trace says so."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.packed import random_trace
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan import Accesses, accesses_of, once_a_batch
from tierstore.plan.traces import files, read_accesses, write_accesses
from tierstore.plan.traces.files import trace_of
from tierstore.trace import TableTrace, Trace, write_trace

ROW_BITS = 40
NEVER = -1


def random_accesses(seed: int, *, batches: int = 30, tables: int = 3) -> Accesses:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(0, 9, batches)
    keys = generator.integers(0, tables, lengths.sum()) << ROW_BITS | generator.integers(0, 12, lengths.sum())
    starts = np.append(0, np.cumsum(lengths))
    return Accesses(keys, starts, tuple(f"t{number}" for number in range(tables)))


def same(one: Accesses, other: Accesses) -> bool:
    return (
        np.array_equal(one.keys, other.keys)
        and np.array_equal(one.starts, other.starts)
        and one[2:] == other[2:]
        and one.keys.dtype == other.keys.dtype == np.int64
    )


def write_records(path: Path, rows: list[tuple[int, int, int, int]]) -> None:
    path.write_bytes(b"".join(struct.pack("<IQIq", *row) for row in rows))


# .npz


@pytest.mark.parametrize("seed", range(5))
def test_npz_keeps_everything(tmp_path: Path, seed: int) -> None:
    accesses = random_accesses(seed)._replace(tables=("a", "b/c", "used never"), sampling_rate=0.25)
    accesses = accesses._replace(keys=accesses.keys % (2 << ROW_BITS))
    write_accesses(accesses, tmp_path / "trace.npz")
    assert same(read_accesses(tmp_path / "trace.npz"), accesses)


def test_npz_of_a_trace_is_its_accesses(tmp_path: Path) -> None:
    trace = random_trace({"a": 100, "b": 50}, seed=1)
    write_trace(trace, tmp_path / "trace.npz")
    assert same(read_accesses(tmp_path / "trace.npz"), accesses_of(trace))
    write_accesses(accesses_of(trace), tmp_path / "again.npz")
    assert same(read_accesses(tmp_path / "again.npz"), accesses_of(trace))


def test_npz_keeps_what_was_counted_of_all_rows(tmp_path: Path) -> None:
    accesses = random_accesses(8)._replace(sampling_rate=0.01, unlisted=70, all_lookups=(9000, 8000, 7000))
    for each in (accesses, once_a_batch(accesses), accesses._replace(unlisted=0)):
        write_accesses(each, tmp_path / "trace.npz", force=True)
        assert same(read_accesses(tmp_path / "trace.npz"), each)


def test_npz_keeps_empty_batches(tmp_path: Path) -> None:
    accesses = Accesses(np.array([5, 6, 5]), np.array([0, 0, 2, 2, 3, 3]), ("t",))
    write_accesses(accesses, tmp_path / "trace.npz")
    assert same(read_accesses(tmp_path / "trace.npz"), accesses)


def test_npz_keeps_samples_as_far_as_the_order_shows_them() -> None:
    offsets = np.array([0, 1, 2, 3, 4])
    trace = Trace(
        tables={"a": TableTrace(np.arange(4), offsets), "b": TableTrace(np.arange(4), offsets)}, batch_samples=2
    )
    found = trace_of(accesses_of(trace))
    assert found.batch_samples == 2
    for name, table in trace.tables.items():
        assert np.array_equal(found.tables[name].ids, table.ids)
        assert np.array_equal(found.tables[name].offsets, table.offsets)


def test_npz_of_one_huge_batch_among_many_would_be_empty_samples(tmp_path: Path) -> None:
    keys = np.tile([1 << ROW_BITS, 0], 5000)
    starts = np.append(np.arange(5001), 10_000)
    with pytest.raises(ValueError, match=r"one batch has 2,501 samples, most have far fewer.*Write .npy"):
        write_accesses(Accesses(keys, starts, ("a", "b")), tmp_path / "trace.npz")
    assert not list(tmp_path.iterdir())


def test_npz_of_a_key_without_a_table(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a key is of table 2, and there are 2 tables"):
        write_accesses(Accesses(np.array([2 << ROW_BITS]), np.array([0, 1]), ("a", "b")), tmp_path / "trace.npz")


def test_more_accesses_than_rows_can_be_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_NUMBERED", 3)
    np.save(tmp_path / "keys.npy", np.array([1 << 63] * 4, np.uint64))
    with pytest.raises(ValueError, match=r"keys.npy: 4 accesses; rows of at most 3 can be told apart: split the file"):
        read_accesses(tmp_path / "keys.npy")
    with pytest.raises(ValueError, match="4 accesses"):
        write_accesses(Accesses(np.arange(4), np.arange(5), ("t",)), tmp_path / "trace.oracleGeneral")
    assert [each.name for each in tmp_path.iterdir()] == ["keys.npy"]


# .npy


@pytest.mark.parametrize("dtype", ["<i8", ">i8", "<i4", "<u8", "<u4"])
def test_npy_of_rows_of_one_table(tmp_path: Path, dtype: str) -> None:
    keys = np.array([3, 1, 3, 2_000_000_000], dtype)
    np.save(tmp_path / "keys.npy", keys)
    found = read_accesses(tmp_path / "keys.npy")
    assert same(found, Accesses(keys.astype(np.int64), np.arange(5), ("t0",)))


def test_npy_of_keys_of_several_tables(tmp_path: Path) -> None:
    accesses = random_accesses(1)
    write_accesses(accesses, tmp_path / "keys.npy")
    found = read_accesses(tmp_path / "keys.npy", batch_accesses=4)
    assert same(found, accesses._replace(starts=np.append(np.arange(0, len(accesses.keys), 4), len(accesses.keys))))
    assert np.array_equal(np.load(tmp_path / "keys.npy"), accesses.keys)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64])
def test_npy_of_hashes_is_rows_in_order_of_first_use(tmp_path: Path, dtype: Any) -> None:
    top = (1 << 64) - 1 if dtype is np.uint64 else (1 << 63) - 1
    np.save(tmp_path / "keys.npy", np.array([top, 7, top - 5, 7, top], dtype))
    found = read_accesses(tmp_path / "keys.npy", batch_accesses=3)
    assert same(found, Accesses(np.array([0, 1, 2, 1, 0]), np.array([0, 3, 5]), ("t0",)))


def test_files_longer_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_CHUNK", 7)
    for seed in range(3):
        accesses = random_accesses(seed)
        accesses = accesses._replace(starts=np.arange(len(accesses.keys) + 1))
        for name in ("keys.npy", "keys.oracleGeneral"):
            write_accesses(accesses, tmp_path / name, force=True)
            assert same(read_accesses(tmp_path / name), accesses)
    path = tmp_path / "late.npy"
    np.save(path, np.array([1] * 20 + [-3]))
    with pytest.raises(ValueError, match="number 20 is -3; keys are 0 or more"):
        read_accesses(path)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.array([1.5]), r"it holds float64 \[1\]; keys are one array"),
        (np.zeros((2, 2), np.int64), r"it holds int64 \[2, 2\]"),
        (np.zeros((), np.int64), r"it holds int64 \[\]"),
        (np.array([1, 2], np.int16), "int16"),
        (np.array([True]), "bool"),
        (np.array([object()]), "object"),
        (np.array([1, -1]), "number 1 is -1"),
        (np.empty(0, np.int64), "has no access"),
    ],
)
def test_arrays_that_are_no_keys(tmp_path: Path, array: np.ndarray, reason: str) -> None:
    path = tmp_path / "keys.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=reason) as raised:
        read_accesses(path)
    assert str(path) in str(raised.value)


def test_npy_files_cut_short_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "keys.npy"
    np.save(path, np.arange(100))
    whole = path.read_bytes()
    for cut in (1, 5, 11, 60, 127, 128, 500, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=str(path)):
            read_accesses(path)
    for place in range(0, 128, 3):
        path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
        with contextlib.suppress(ValueError):
            assert len(read_accesses(path).keys) <= 100
    path.write_bytes(whole.replace(b"(100,)", b"(9999999999,)"))
    with pytest.raises(ValueError, match=str(path)):
        read_accesses(path)


# oracleGeneral


def brute_next_uses(keys: list[int]) -> list[int]:
    return [
        next((later + 1 for later in range(place + 1, len(keys)) if keys[later] == key), NEVER)
        for place, key in enumerate(keys)
    ]


@pytest.mark.parametrize("name", ["trace.oracleGeneral", "trace.oracleGeneral.bin", "trace.ORACLEGENERAL"])
def test_oracle_general_is_written_as_libcachesim_reads_it(tmp_path: Path, name: str) -> None:
    accesses = random_accesses(2)
    write_accesses(accesses, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert len(content) == 24 * len(accesses.keys)
    found = list(struct.iter_unpack("<IQIq", content))
    keys = accesses.keys.tolist()
    times = [batch for batch, length in enumerate(np.diff(accesses.starts).tolist()) for _ in range(length)]
    assert found == list(zip(times, keys, [1] * len(keys), brute_next_uses(keys), strict=True))
    again = read_accesses(tmp_path / name)
    assert same(again, accesses._replace(starts=np.arange(len(keys) + 1)))


@pytest.mark.kernel
def test_next_uses() -> None:
    for seed in range(4):
        keys = np.random.default_rng(seed).integers(0, 15, 200 if JIT_ENABLED else 60)
        assert files.next_uses(keys).tolist() == brute_next_uses(keys.tolist())
    assert not len(files.next_uses(np.empty(0, np.int64)))


def test_oracle_general_of_hashed_objects(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral"
    one, other = 0xFEDC_BA98_7654_3210, 3
    write_records(path, [(10, one, 4096, 3), (11, other, 100, -1), (11, one, 4096, (1 << 63) - 1)])
    assert same(read_accesses(path), Accesses(np.array([0, 1, 0]), np.arange(4), ("t0",)))


def test_records_numbered_from_0_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral"
    write_records(path, [(0, 5, 1, 1), (0, 5, 1, -1)])
    assert read_accesses(path).keys.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"x" * 23, "it has 23 bytes, which are no whole records of 24: it is cut short"),
        (b"x" * 49, "it has 49 bytes"),
        (bytes(48), "record 1 says that its object is used next by record 0"),
        (
            struct.pack("<IQIq", 0, 5, 1, 2) + struct.pack("<IQIq", 0, 5, 1, 1),
            "record 2 says that its object is used next by record 1.*saved by numpy as uint64",
        ),
        (struct.pack("<IQIq", 0, 5, 1, -2), "record 1 says"),
        (b"\x28\xb5\x2f\xfd" + bytes(20), r"is compressed with zstd; decompress it first: zstd -d .*trace"),
        (b"\x1f\x8b" + bytes(22), "compressed with gzip.*gunzip"),
    ],
)
def test_files_that_are_no_records(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "trace.oracleGeneral"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as raised:
        read_accesses(path)
    assert str(path) in str(raised.value)


def test_a_compressed_file_is_known_by_its_content_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(ValueError, match=f"compressed with zstd; decompress it first: zstd -d {path}"):
        read_accesses(path)
    with pytest.raises(ValueError, match="compressed with zstd"):
        read_accesses(path, format="oracleGeneral")


# Any format


def test_a_named_format_wins_over_the_suffix(tmp_path: Path) -> None:
    accesses = random_accesses(3)
    write_accesses(accesses, tmp_path / "trace.dat", format="npy")
    assert np.array_equal(read_accesses(tmp_path / "trace.dat", format="npy").keys, accesses.keys)
    with pytest.raises(ValueError, match="its suffix says no format of traces; name one"):
        read_accesses(tmp_path / "trace.dat")
    with pytest.raises(ValueError, match=r"format 'oraclegenral'; did you mean 'oracleGeneral'\?"):
        read_accesses(tmp_path / "trace.dat", format="oraclegenral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="formats are npz, npy, oracleGeneral"):
        write_accesses(accesses, tmp_path / "x", format="csv")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["trace.npz", "trace.npy", "trace.oracleGeneral"])
def test_files_are_whole_or_not_there(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    accesses = random_accesses(4)
    path = tmp_path / name
    write_accesses(accesses, path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="--force"):
        write_accesses(accesses, path)
    write_accesses(random_accesses(5), path, force=True)
    assert path.read_bytes() != before
    with pytest.raises(FileNotFoundError, match="make it first"):
        write_accesses(accesses, tmp_path / "no" / name)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral"
    write_accesses(random_accesses(4), path)
    before = path.read_bytes()
    broken = Accesses(np.zeros(3, np.int64), np.broadcast_to(np.int64(0), ((1 << 32) + 2,)), ("t0",))
    with pytest.raises(ValueError, match="times below"):
        write_accesses(broken, path, force=True)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_only_npz_knows_of_sampling(tmp_path: Path) -> None:
    accesses = random_accesses(6)._replace(sampling_rate=0.01)
    for name in ("trace.npy", "trace.oracleGeneral"):
        with pytest.raises(ValueError, match=r"of a sample, 1 % of the rows, which .* files cannot say; write .npz"):
            write_accesses(accesses, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_batches_are_the_files_where_it_has_them(tmp_path: Path) -> None:
    write_accesses(random_accesses(7), tmp_path / "trace.npz")
    with pytest.raises(ValueError, match="has batches of its own; leave batch_accesses out"):
        read_accesses(tmp_path / "trace.npz", batch_accesses=5)
    np.save(tmp_path / "keys.npy", np.arange(4))
    with pytest.raises(ValueError, match="batch_accesses=0"):
        read_accesses(tmp_path / "keys.npy", batch_accesses=0)


def test_no_file_a_folder_and_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such trace; a run or a server with --record writes one"):
        read_accesses(tmp_path / "trace.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ValueError, match="is a folder"):
        read_accesses(tmp_path / "folder.npz")
    (tmp_path / "text.npz").write_text("no trace")
    with pytest.raises(ValueError, match=r"text.npz is no trace: it is not one of numpy's files\. tierstore trace"):
        read_accesses(tmp_path / "text.npz")
    empty = Trace(tables={"a": TableTrace(np.empty(0, np.int64), np.zeros(3, np.int64))}, batch_samples=1)
    write_trace(empty, tmp_path / "empty.npz")
    with pytest.raises(ValueError, match=r"empty.npz has no access"):
        read_accesses(tmp_path / "empty.npz")
