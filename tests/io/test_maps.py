"""Maps of the row file: that it outgrows, and whose pages cannot be read.

A page that cannot be read is an error for those who wanted it; nobody dies of it, and nobody reads zeros in its place.
One is refused here by mapping nothing of an empty file over it: touching it is what touching a bad sector is (SIGBUS).
Mapped again, it is the file's. tests/faults has devices that really fail.
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.children import run
from tests.conformance.cold_tier import WIDE, check_rows, commit, keys_of, read_rows, words_of, write_rows
from tests.io.support import heal, open_tier, opened, page_of, refuse
from tierstore.errors import ChecksumError, TierstoreError, TruncatedError, UnreadableError
from tierstore.io import mapped, reads, writer
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.mapped import FileMap
from tierstore.io.segments import stored_segments
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")

PAGE = 4096
ROWS = WIDE.rows_per_block
ALL = np.arange(1000)
DAMAGED = TruncatedError, ChecksumError, UnreadableError


@pytest.fixture
def tier(written: Path) -> Iterator[LmdbColdTier]:
    tier = opened(written)
    check_rows(tier, WIDE, keys_of(0, ALL[:1]), 1)  # makes the map
    yield tier
    tier.close()


def commit_some_rows(path: Path) -> None:
    with contextlib.closing(opened(path)) as tier:
        write_rows(tier, WIDE, keys_of(0, ALL[::5]), 2)
        commit(tier, b"two")


def test_zeros_do_not_count_if_the_page_is_the_files_again(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another reader may map the file again between the copy of a row and its checksum."""
    rows = tier._file.map.rows.guard
    refuse(rows, page_of(tier, 0, 7))
    real = reads.gather

    def gather(batch: reads.Batch, *arguments: object) -> None:
        assert rows.begin() == rows.met
        real(batch, *arguments)  # faults, and finds zeros
        rows.begin()
        batch.result[:2] = 0  # all checksums were good

    monkeypatch.setattr(reads, "gather", gather)
    with pytest.raises(UnreadableError, match=f"row {7 * ROWS} of table 0"):
        check_rows(tier, WIDE, keys_of(0, ALL[7 * ROWS : 8 * ROWS]), 1)
    monkeypatch.undo()
    check_rows(tier, WIDE, keys_of(0, ALL), 1)


def test_a_file_that_is_cut_short_while_it_is_read(tier: LmdbColdTier) -> None:
    content = tier.path.read_bytes()
    pages = np.array([page_of(tier, 0, int(block)) for block in ALL // ROWS])
    cut, errors, done = int(np.median(pages)), list[BaseException](), threading.Event()

    def read(rows: NDArray[np.int64], *expected: type[BaseException]) -> None:
        while not done.is_set():
            try:
                check_rows(tier, WIDE, keys_of(0, rows), 1)
            except expected as error:
                errors.append(error)

    with ThreadPoolExecutor(4) as threads, tier.path.open("r+b") as file:
        try:
            reads = [threads.submit(read, ALL, *DAMAGED) for _ in range(3)]
            reads.append(threads.submit(read, ALL[pages < cut]))
            for _ in range(300):
                file.truncate(cut * PAGE)
                file.seek(cut * PAGE)
                file.write(content[cut * PAGE :])
                file.flush()
        finally:
            done.set()
        for each in reads:
            each.result()
    assert errors
    assert all("rows.lmdb" in str(error) and "tierstore repair" in str(error) for error in errors)
    check_rows(tier, WIDE, keys_of(0, ALL), 1)


def test_a_cut_behind_the_look_at_the_length(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tier.path.read_bytes()
    length = len(content)
    monkeypatch.setattr(FileMap, "file_bytes", lambda self: length)
    os.truncate(tier.path, 4 * PAGE)
    with pytest.raises(TruncatedError, match=r"rows\.lmdb: row 0 of table 0 lies beyond the end of the file.*repair"):
        check_rows(tier, WIDE, keys_of(0, ALL), 1)
    with pytest.raises(
        TruncatedError, match=r"rows\.lmdb: bytes .* missing: the file was cut short to 16384 bytes.*repair"
    ):
        tier.verify()
    expected = r"rows\.lmdb: bytes 16384 to \d+ are missing.*repair"
    with pytest.raises(TruncatedError, match=expected), tier._writer._transaction():
        raise AssertionError("a transaction was begun in what is left of the file")
    tier.path.write_bytes(content)
    check_rows(tier, WIDE, keys_of(0, ALL), 1)
    tier.verify()
    monkeypatch.undo()
    write_rows(tier, WIDE, keys_of(0, ALL), 2)


def test_a_bad_page_that_others_meet_stops_no_commit(tier: LmdbColdTier) -> None:
    page, is_over = page_of(tier, 0, 7), threading.Event()

    def meet() -> None:
        while not is_over.is_set():
            tier._file.map.rows.guard.begin()
            refuse(tier._file.map.rows.guard, page)
            assert not tier._file.map.rows.words[page * PAGE // 8]

    thread = threading.Thread(target=meet)
    thread.start()
    try:
        for version in range(2, 30):
            write_rows(tier, WIDE, keys_of(0, ALL[:1]), version)
            tier.commit(b"", version)
    finally:
        is_over.set()
        thread.join()


def test_pages_of_the_index(written: Path) -> None:
    reader = opened(written, readonly=True)
    check_rows(reader, WIDE, keys_of(0, ALL), 1)
    commit_some_rows(written)
    pages, locked = reader._file.map.file_bytes() // PAGE, dict(reader._file.map.locks._users)
    refuse(reader._file.map.guard, 2, pages - 2)
    expected = r"rows\.lmdb: the device refuses to read bytes \d+ to \d+\. .*log.*repair"
    with pytest.raises(UnreadableError, match=expected):
        reader.find_newer()
    assert dict(reader._file.map.locks._users) == locked
    check_rows(reader, WIDE, keys_of(0, ALL), 1)
    for _ in range(pages):  # one more page a time is the file's again
        with contextlib.suppress(UnreadableError):
            if found := reader.find_newer():
                found.show()
                break
    check_rows(reader, WIDE, keys_of(0, ALL[::5]), 2)
    reader.close()


def test_a_writer_looks_before_lmdb_does(tier: LmdbColdTier) -> None:
    """What LMDB cannot read ends the process; so what it is about to read is read before, and nothing is written."""
    steps = lambda: write_rows(tier, WIDE, keys_of(0, ALL), 2), lambda: commit(tier, b"two")
    index = tier._file.map.guard
    for step in steps:
        pages = tier._file.map.file_bytes() // PAGE
        with tier.lease_tree() as tree:
            stored = stored_segments(tree)
        ends = stored[["first_page", "pages"]].tolist()
        for page in set(range(2, pages)).difference(*(range(first, first + count) for first, count in ends)):
            refuse(index, page)
        tier.reader.is_cold = True
        with pytest.raises(UnreadableError, match=r"rows\.lmdb: the device refuses to read bytes .*repair"):
            step()
        assert not tier._file.is_closed
        heal(index, pages)
        step()
    check_rows(tier, WIDE, keys_of(0, ALL), 2)
    tier.verify()


FOREIGN = """
    import contextlib, faulthandler, json, mmap, tempfile
    from tests.io.test_maps import ALL, WIDE, check_rows, keys_of, opened

    empty = os.memfd_create("empty")
    os.ftruncate(empty, 4096)
    strange = np.frombuffer(mmap.mmap(empty, 4096, prot=mmap.PROT_READ), np.uint8)
    os.ftruncate(empty, 0)

    def touch_what_is_nobodys():
        strange[7] + 1

    takes = {
        "handler": faulthandler.enable,
        "open": lambda: globals().update(tier=opened(Path(sys.argv[1]))),
        "read": lambda: check_rows(tier, WIDE, keys_of(0, ALL), 1),
        "fault": touch_what_is_nobodys,
        "kill": lambda: os.kill(os.getpid(), 7),
    }
    with contextlib.closing(opened(Path(sys.argv[1]), readonly=True)) as tier:
        takes["read"]()  # loads the kernels, once for all children
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    for steps in sys.argv[2:]:
        said = tempfile.TemporaryFile()
        if not (child := os.fork()):
            os.dup2(said.fileno(), 2)
            for step in steps.split():
                takes[step]()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said.read().decode()]))
"""


def test_a_fault_of_somebody_else_ends_the_process_as_ever(written: Path) -> None:
    starts = "open", "open handler read", "handler open handler read"
    runs = [f"{start} {end}" for start in starts for end in ("fault", "kill")]
    for steps, line in zip(runs, run(FOREIGN, written, *runs, timeout=300).splitlines(), strict=True):
        code, said = json.loads(line)
        assert code == -signal.SIGBUS, (steps, said)
        assert said.count("Fatal Python error: Bus error") == ("handler" in steps), (steps, said)
        assert ("touch_what_is_nobodys" in said) == ("handler" in steps and "fault" in steps), (steps, said)


def test_a_handler_that_was_put_over_ours(tier: LmdbColdTier) -> None:
    """As ``faulthandler.enable()`` and a test runner's own do: the next read puts ours over it."""
    was_enabled = faulthandler.is_enabled()
    faulthandler.disable()
    faulthandler.enable()
    try:
        refuse(tier._file.map.rows.guard, page_of(tier, 0, 7))
        with pytest.raises(UnreadableError):
            check_rows(tier, WIDE, keys_of(0, ALL), 1)
    finally:
        if not was_enabled:
            faulthandler.disable()
    check_rows(tier, WIDE, keys_of(0, ALL), 1)


PART = 250
PARTS = 16
CHANGING, STILL = keys_of(0, np.arange(PART)), keys_of(0, np.arange(PART, 2 * PART))
SMALL, SPARE = 1 << 18, 1 << 17


def _opened(stack: ExitStack, path: Path, **changes: object) -> LmdbColdTier:
    tier = stack.enter_context(closing(open_tier(path, **changes)))
    tier.set_tables({0: (WIDE, PARTS * PART)})
    return tier


def test_a_file_that_outgrows_its_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_LEAST_BYTES", SMALL)
    monkeypatch.setattr(writer, "_SPARE_BYTES", SPARE)
    stop = threading.Event()

    def read(tier: LmdbColdTier) -> None:
        while not stop.wait(1e-3):
            words, present = read_rows(tier, WIDE, CHANGING)
            generations = words - words_of(CHANGING, 0, words.shape[1])
            assert present.all()
            assert (generations == generations[:, :1]).all()
            assert (generations % np.uint64(1 << 50) == 0).all()

    with ExitStack() as stack:
        tier = _opened(stack, tmp_path)
        write_rows(tier, WIDE, np.concatenate([CHANGING, STILL]), 1)
        tier.commit(b"", 1)
        keeps, follows = (_opened(stack, tmp_path, readonly=True) for _ in range(2))
        check_rows(keeps, WIDE, CHANGING, 1)
        first_length = keeps._file.map.length_bytes
        reading = stack.enter_context(ThreadPoolExecutor(1)).submit(read, tier)
        stack.callback(stop.set)
        for version in range(2, PARTS):
            keys = keys_of(0, np.arange(version * PART, (version + 1) * PART))
            write_rows(tier, WIDE, keys, 1)
            write_rows(tier, WIDE, CHANGING, version)
            tier.commit(b"", version)
            if version % 5 == 0:
                follows.find_newer().show()
                check_rows(follows, WIDE, CHANGING, version)
                check_rows(follows, WIDE, keys, 1)
            check_rows(tier, WIDE, CHANGING, version)
            check_rows(keeps, WIDE, np.concatenate([CHANGING, STILL]), 1)
        stop.set()
        reading.result()
        for each in (tier, follows):
            assert each._file.snapshot.file_map.length_bytes >= 4 * first_length
        tier.verify()
        path = tmp_path / "rows.lmdb"
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ends = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[-1] == str(path)]
        # Two maps of the writer, each as long again as its predecessors, LMDB's, and two of each reader.
        mapped_bytes = sum(stop - start for start, stop in ends)
        assert mapped_bytes <= (2 * 2 + 1 + 2 * 2 * 2) * 2 * 2 * path.stat().st_size


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
    with ExitStack() as stack:
        check_rows(_opened(stack, tmp_path), WIDE, CHANGING, 1)
