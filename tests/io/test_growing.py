"""A row file that outgrows its maps: this process's, LMDB's, and those of readers that were there before."""

import threading
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import WIDE, check_rows, keys_of, read_rows, words_of, write_rows
from tests.io.support import open_tier
from tierstore.errors import TierstoreError
from tierstore.io import mapped, writer
from tierstore.io.lmdb import LmdbColdTier

PART = 250
PARTS = 16
CHANGING, STILL = keys_of(0, np.arange(PART)), keys_of(0, np.arange(PART, 2 * PART))
SMALL, SPARE = 1 << 18, 1 << 17


def _opened(stack: ExitStack, path: Path, **changes: object) -> LmdbColdTier:
    tier = stack.enter_context(closing(open_tier(path, **changes)))
    tier.add_table(0, WIDE, PARTS * PART)
    return tier


def _map_lengths(path: Path) -> list[int]:
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(path / "rows.lmdb")]
    return [int(stop, 16) - int(start, 16) for start, stop in spans]


def _check_some_generation(tier: LmdbColdTier, keys: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> None:
    words, present = read_rows(tier, WIDE, keys)
    generations = words - words_of(keys, 0, words.shape[1])
    assert present.all()
    assert (generations == generations[:, :1]).all()
    assert (generations % np.uint64(1 << 50) == 0).all()


def test_a_file_that_outgrows_its_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_LEAST_BYTES", SMALL)
    monkeypatch.setattr(writer, "_SPARE_BYTES", SPARE)
    stop, failed = threading.Event(), list[BaseException]()

    def read(tier: LmdbColdTier) -> None:
        try:
            while not stop.wait(1e-3):
                _check_some_generation(tier, CHANGING)
        except BaseException as error:
            failed.append(error)

    with ExitStack() as stack:
        tier = _opened(stack, tmp_path)
        write_rows(tier, WIDE, np.concatenate([CHANGING, STILL]), 1)
        tier.commit(b"", 1)
        keeps, follows = (_opened(stack, tmp_path, readonly=True) for _ in range(2))
        check_rows(keeps, WIDE, CHANGING, 1)
        first_length = keeps._file.map.length_bytes
        reading = threading.Thread(target=read, args=(tier,))
        reading.start()
        stack.callback(reading.join)
        stack.callback(stop.set)
        for version in range(2, PARTS):
            keys = keys_of(0, np.arange(version * PART, (version + 1) * PART))
            write_rows(tier, WIDE, keys, 1)
            write_rows(tier, WIDE, CHANGING, version)
            tier.commit(b"", version)
            if version % 5 == 0:
                found = follows.find_newer()
                assert found is not None
                found.show()
                check_rows(follows, WIDE, CHANGING, version)
                check_rows(follows, WIDE, keys, 1)
            check_rows(tier, WIDE, CHANGING, version)
            check_rows(keeps, WIDE, np.concatenate([CHANGING, STILL]), 1)
        stop.set()
        reading.join()
        assert not failed, failed
        for each in (tier, follows):
            assert each._file.snapshot.file_map.length_bytes >= 4 * first_length
        tier.verify()
        size = (tmp_path / "rows.lmdb").stat().st_size
        # Two maps of the writer, each as long again as its predecessors, LMDB's, and two of each reader.
        assert sum(_map_lengths(tmp_path)) <= (2 * 2 + 1 + 2 * 2 * 2) * 2 * 2 * size


def test_a_process_maps_what_files_have_and_not_what_disks_hold(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for number in range(4):
            (tmp_path / str(number)).mkdir()
            _opened(stack, tmp_path / str(number))
        assert _map_lengths(tmp_path / "0") == [1 << 30] * 3


def test_no_address_space_for_a_longer_map(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_LEAST_BYTES", SMALL)
    monkeypatch.setattr(writer, "_SPARE_BYTES", SPARE)
    with ExitStack() as stack:
        tier = _opened(stack, tmp_path)
        write_rows(tier, WIDE, CHANGING, 1)
        tier.commit(b"", 1)
        with monkeypatch.context() as patch:
            patch.setattr(mapped, "map_length", lambda _: 1 << 60)
            with pytest.raises(TierstoreError, match=r"rows\.lmdb: .*memory|address space"):
                tier.commit(bytes(1 << 20), 2)
        assert tier.version == 1
        tier.commit(bytes(1 << 20), 2)
        check_rows(tier, WIDE, CHANGING, 1)
        assert tier._writer is not None
        again = tier._writer._map_again
        with monkeypatch.context() as patch:
            patch.setattr(tier._writer, "_mapped_bytes", 0)
            patch.setattr(tier._writer, "_map_again", lambda _: again(1 << 60))
            with pytest.raises(TierstoreError, match=r"rows\.lmdb"):
                write_rows(tier, WIDE, CHANGING, 2)
        with pytest.raises(TierstoreError, match="close it and open it again"):
            write_rows(tier, WIDE, CHANGING, 2)
    with ExitStack() as stack:
        check_rows(_opened(stack, tmp_path), WIDE, CHANGING, 1)
