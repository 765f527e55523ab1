"""Direct reads and writes: the right bytes, and failures that are told."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.plan.measure import READ_BYTES, DirectReader, DirectWriter, direct_reader

pytestmark = pytest.mark.kernel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """32 pages at random on a file system with direct reads."""
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(32 * READ_BYTES))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("the file system has no direct reads")
    return path


@pytest.mark.parametrize("block_bytes", [READ_BYTES, 4 * READ_BYTES])
def test_reads_bring_what_the_file_holds(path: Path, block_bytes: int) -> None:
    content = path.read_bytes()
    with direct_reader(path, 3, block_bytes=block_bytes) as reader:
        offsets = reader.random_offsets(np.random.default_rng(1), 20)
        assert (offsets % block_bytes == 0).all()
        assert offsets.max() <= len(content) - block_bytes
        reader.read(offsets)
        # Contiguous parts of the offsets: each thread's buffer holds the last of its part.
        last = [part[-1] for part in np.array_split(offsets, 3)]
        assert bytes(reader.buffer) == b"".join(content[at : at + block_bytes] for at in last)
        with pytest.raises(OSError, match="1 of 2 direct reads failed"):
            reader.read(np.array([0, len(content)]))


def test_writes_change_the_chosen_blocks_alone(path: Path) -> None:
    before = path.read_bytes()
    writer = DirectWriter(path, 2, block_bytes=2 * READ_BYTES)
    offsets = np.array([0, 8, 10]) * READ_BYTES
    writer.write(offsets)
    writer.sync()
    writer.close()
    after = path.read_bytes()
    chosen = {page for offset in offsets // READ_BYTES for page in (offset, offset + 1)}
    pages = [after[at : at + READ_BYTES] for at in range(0, len(after), READ_BYTES)]
    for number, page in enumerate(pages):
        assert (page == before[number * READ_BYTES :][:READ_BYTES]) == (number not in chosen)
        if number in chosen:
            assert int.from_bytes(page[:8], "little") == number * READ_BYTES
    assert len({pages[number] for number in chosen}) == len(chosen), "no two pages are alike"


def test_a_failed_write_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DirectWriter, "_mode", os.O_RDONLY)
    writer = DirectWriter(path, 1)
    with pytest.raises(OSError, match="2 of 2 direct writes failed"):
        writer.write(np.array([0, READ_BYTES]))
    writer.close()


def test_a_file_system_without_direct_reads_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=r"cannot be read directly \(Invalid argument\); use --dir on another"):
        DirectReader(path, 1)
