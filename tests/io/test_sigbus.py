"""Pages that cannot be read are errors of those who wanted them; nobody dies of them, and nobody reads their zeros.

A page is refused here by mapping nothing of an empty file over it, in one of the three maps of a tier: touching it is
what touching a bad sector is (SIGBUS). Mapped again, it is the file's. tests/faults has devices that really fail.
"""

import contextlib
import faulthandler
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.children import run
from tests.conformance.cold_tier import WIDE, check_rows, commit, keys_of, write_rows
from tests.io.support import heal, opened, page_of, refuse
from tierstore.errors import ChecksumError, TruncatedError, UnreadableError
from tierstore.io import sigbus, snapshot
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.mapped import FileMap
from tierstore.io.segments import stored_segments
from tierstore.io.sigbus import Guard
from tierstore.kernels.jit import JIT_ENABLED

pytestmark = pytest.mark.skipif(not JIT_ENABLED, reason="without compiled code a refused page ends the process")

PAGE = 4096
ROWS = WIDE.rows_per_block
ALL = np.arange(1000)
DAMAGED = TruncatedError, ChecksumError, UnreadableError
Int64s = NDArray[np.int64]


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


def _rows_guard(tier: LmdbColdTier) -> Guard:
    return tier._file.map.rows.guard


def test_zeros_do_not_count_though_the_page_is_the_files_again(
    tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reader may map the file again between the copy of a row and its checksum."""
    rows = _rows_guard(tier)
    refuse(rows, page_of(tier, 0, 7))
    from tierstore.io import reads

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
    cut = int(np.median(pages))
    before = keys_of(0, ALL[pages < cut])
    errors: list[BaseException] = []
    unexpected: list[BaseException] = []
    done = threading.Event()

    def read(keys: Int64s, expected: tuple[type[BaseException], ...]) -> None:
        try:
            while not done.is_set():
                try:
                    check_rows(tier, WIDE, keys, 1)
                except expected as error:
                    errors.append(error)
        except BaseException as error:
            unexpected.append(error)

    threads = [threading.Thread(target=read, args=(keys_of(0, ALL), DAMAGED)) for _ in range(3)]
    threads.append(threading.Thread(target=read, args=(before, ())))
    for thread in threads:
        thread.start()
    with tier.path.open("r+b") as file:
        for _ in range(300):
            file.truncate(cut * PAGE)
            file.seek(cut * PAGE)
            file.write(content[cut * PAGE :])
            file.flush()
    done.set()
    for thread in threads:
        thread.join()
    assert unexpected == []
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
            _rows_guard(tier).begin()
            refuse(_rows_guard(tier), page)
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


def test_a_look_at_the_newest_version_that_fails_keeps_no_lock(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, newest, calls = opened(written, readonly=True), snapshot._newest, []

    def fails(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise UnreadableError("refused")
        return newest(*arguments)

    commit_some_rows(written)
    before = dict(reader._file.map.locks._users)
    monkeypatch.setattr(snapshot, "_newest", fails)
    with pytest.raises(UnreadableError, match="refused"):
        reader.find_newer()
    assert dict(reader._file.map.locks._users) == before
    reader.close()


FORK = """
    from tests.io.test_sigbus import *
    from tierstore.system.page_cache import _libc

    parents = [FileMap(Path(sys.argv[1]), 1 << 36) for _ in range(2)]
    again = [FileMap(Path(sys.argv[1]), 1 << 36) for _ in range(2)]
    for each in parents:
        each.close()
    taken = [_libc.mmap(None, 1 << 36, 0, 0x4022, -1, 0) for _ in range(2)]
    if not (child := os.fork()):
        for each in [FileMap(Path(sys.argv[1]), 1 << 36) for _ in range(2)]:
            since = each.guard.begin()
            refuse(each.guard, 3)
            assert not each.words[3 * PAGE // 8]
            assert each.guard.refused(since) is not None
        print("noticed", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_a_forked_child_has_no_maps_of_its_parent(written: Path) -> None:
    assert run(FORK, written / "rows.lmdb") == "noticed\n"


def test_pages_of_the_index(written: Path) -> None:
    reader = opened(written, readonly=True)
    check_rows(reader, WIDE, keys_of(0, ALL), 1)
    commit_some_rows(written)
    pages = reader._file.map.file_bytes() // PAGE
    refuse(reader._file.map.guard, 2, pages - 2)
    expected = r"rows\.lmdb: the device refuses to read bytes \d+ to \d+\. .*log.*repair"
    with pytest.raises(UnreadableError, match=expected):
        reader.find_newer()
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
    from tests.io.test_sigbus import ALL, WIDE, check_rows, keys_of, opened

    empty = os.memfd_create("empty")
    os.ftruncate(empty, 4096)
    strange = np.frombuffer(mmap.mmap(empty, 4096, prot=mmap.PROT_READ), np.uint8)
    os.ftruncate(empty, 0)

    def touch_what_is_nobodys():
        strange[7] + 1

    def take(step):
        global tier
        if step == "handler":
            faulthandler.enable()
        elif step == "open":
            tier = opened(Path(sys.argv[1]))
        elif step == "read":
            check_rows(tier, WIDE, keys_of(0, ALL), 1)
        elif step == "fault":
            touch_what_is_nobodys()
        else:
            os.kill(os.getpid(), 7)

    with contextlib.closing(opened(Path(sys.argv[1]), readonly=True)) as tier:
        check_rows(tier, WIDE, keys_of(0, ALL), 1)  # loads the kernels, once for all children
    signal.signal(signal.SIGBUS, signal.SIG_DFL)
    for steps in sys.argv[2:]:
        said = tempfile.TemporaryFile()
        child = os.fork()
        if not child:
            os.dup2(said.fileno(), 2)
            for step in steps.split():
                take(step)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said.read().decode()]))
"""


def test_a_fault_of_somebody_else_ends_the_process_as_ever(written: Path) -> None:
    starts = "open", "handler open", "open handler", "open handler read", "handler open handler read"
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
        refuse(_rows_guard(tier), page_of(tier, 0, 7))
        with pytest.raises(UnreadableError):
            check_rows(tier, WIDE, keys_of(0, ALL), 1)
    finally:
        if not was_enabled:
            faulthandler.disable()
    check_rows(tier, WIDE, keys_of(0, ALL), 1)


def test_a_map_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    for _ in range(3 * sigbus._SLOTS):
        FileMap(path, PAGE).close()
    free = len(sigbus._handler().free)
    maps = [FileMap(path, PAGE) for _ in range(sigbus._SLOTS + 3)]
    assert sigbus._handler().free == []
    for each in maps:
        assert each.guard.refused(each.guard.begin()) is None
        each.close()
    assert len(sigbus._handler().free) == free
