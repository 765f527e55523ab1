"""What only the tier on a file promises: reopening, recovery, locks, a full disk, bounded memory."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import lmdb
import numpy as np
import psutil
import pytest

from tests.conformance.cold_tier import (
    NARROW,
    WIDE,
    add_tables,
    check_rows,
    commit,
    keys_of,
    read_rows,
    write_rows,
)
from tests.io.support import STORE_ID, flip, open_tier, place_of, plain_lmdb
from tierstore.errors import (
    ChecksumError,
    DiskFullError,
    ReadOnlyError,
    StoreLockedError,
    StoreNotFoundError,
)
from tierstore.io.files import translate
from tierstore.io.indexes import stored_segments
from tierstore.io.lmdb import LmdbColdTier
from tierstore.rows import RowLayout

ROOT = Path(__file__).resolve().parents[2]


def _tier(path: Path, **changes: object) -> LmdbColdTier:
    tier = open_tier(path, **changes)
    add_tables(tier)
    return tier


_RECORDS = 3
"""The store, its head, and the log."""


def _segments(rows: int) -> int:
    """That so many rows of ``WIDE`` take when they are written in one call."""
    return -(-rows // WIDE.rows_per_segment)


def _num_entries(path: Path) -> int:
    with plain_lmdb(path) as txn:
        return int(txn.stat()["entries"])


def _run(code: str, *arguments: object, **settings: object) -> "subprocess.Popen[str]":
    """Python code in a process of its own; it finds STORE_ID, Path and the conformance helpers."""
    start = "from pathlib import Path\nimport sys\nimport numpy as np\nfrom tests.conformance.cold_tier import *\n"
    start += "from tests.io.support import STORE_ID, open_tier\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **settings,  # type: ignore[call-overload]
    )


def test_what_was_not_committed_is_gone_after_reopening(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    keys = keys_of(0, np.arange(500))
    write_rows(tier, WIDE, keys, 1)
    commit(tier, b"one")
    write_rows(tier, WIDE, keys[::2], 2)
    write_rows(tier, NARROW, keys_of(1, np.arange(100)), 2)
    check_rows(tier, WIDE, keys[::2], 2)
    tier.close()
    assert _num_entries(tmp_path) > _segments(500) + _RECORDS + 2

    reader = _tier(tmp_path, readonly=True)
    check_rows(reader, WIDE, keys, 1)
    assert not read_rows(reader, NARROW, keys_of(1, np.arange(100)))[1].any()
    assert reader.verify().rows == 500
    reader.close()

    tier = _tier(tmp_path)
    check_rows(tier, WIDE, keys, 1)
    assert not read_rows(tier, NARROW, keys_of(1, np.arange(100)))[1].any()
    assert (tier.version, tier.payload) == (1, b"one")
    assert tier.verify().rows == 500
    write_rows(tier, WIDE, keys[::3], 3)
    assert commit(tier, b"two") == 2
    tier.close()

    tier = _tier(tmp_path)
    check_rows(tier, WIDE, keys[::3], 3)
    assert tier.verify().rows == 500
    tier.close()


def test_commit_leaves_one_version_and_one_payload(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    keys = keys_of(0, np.arange(1000))
    for generation in range(1, 5):
        write_rows(tier, WIDE, keys[generation::3], generation)
        write_rows(tier, WIDE, keys, generation)
        commit(tier, bytes(generation * 700_000))
    commit(tier, b"x")
    tier.close()
    assert _num_entries(tmp_path) == _segments(1000) + _RECORDS + 2  # the commit, one chunk of payload


def test_killed_at_any_moment_it_reopens_at_the_last_commit(tmp_path: Path) -> None:
    process = _run(
        """
        tier = open_tier(Path(sys.argv[1]))
        add_tables(tier)
        for generation in range(1, 10**6):
            for part in range(4):
                write_rows(tier, WIDE, keys_of(0, np.arange(part, 1000, 4)), generation)
            commit(tier, b"%d" % generation)
            print(generation, flush=True)
        """,
        tmp_path,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 7:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    rest = [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    tier = _tier(tmp_path)
    assert tier.version >= max([7, *rest])
    assert tier.payload == b"%d" % tier.version
    check_rows(tier, WIDE, keys_of(0, np.arange(1000)), tier.version)
    assert tier.verify().rows == 1000
    tier.close()


def test_a_commit_of_nothing_is_a_version(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    assert [commit(tier, b""), commit(tier, b"a")] == [1, 2]
    tier.close()
    tier = _tier(tmp_path)
    assert (tier.version, tier.payload, tier.verify().segments) == (2, b"a", 0)
    tier.close()


def test_a_table_of_a_billion_rows_opens_empty_and_small(tmp_path: Path) -> None:
    layout = RowLayout(dim=64, state_dim=1)
    before = psutil.Process().memory_info().rss
    tier = open_tier(tmp_path)
    tier.add_table(0, layout, 10**9)
    key = keys_of(0, [10**9 - 1])
    assert not read_rows(tier, layout, key)[1].any()
    write_rows(tier, layout, key, 1)
    commit(tier, b"")
    tier.close()
    tier = open_tier(tmp_path)
    tier.add_table(0, layout, 10**9)
    check_rows(tier, layout, key, 1)
    assert tier.map_bytes >= 4 * 10**9
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert tier.path.stat().st_size < 1 << 20
    tier.close()


def test_a_layout_of_another_page_size(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert tier.page_bytes == 4096
    with pytest.raises(ValueError, match="page_bytes"):
        tier.add_table(0, RowLayout(dim=64, page_bytes=2 * tier.page_bytes), 10)
    tier.close()


def test_a_reader_moves_to_the_newest_commit(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    write_rows(tier, WIDE, keys_of(0, [1]), 1)
    commit(tier, b"one")
    reader = _run(
        """
        tier = open_tier(Path(sys.argv[1]), readonly=True)
        add_tables(tier)
        for line in sys.stdin:
            generation, version = map(int, line.split())
            if found := tier.find_newer():
                found.show()
            assert tier.version == version, (tier.version, version)
            check_rows(tier, WIDE, keys_of(0, [1]), generation)
            print("ok", flush=True)
        """,
        tmp_path,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None

    def expect(generation: int, version: int) -> None:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(f"{generation} {version}\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "ok\n"

    expect(1, 1)
    for generation in range(2, 30):
        write_rows(tier, WIDE, keys_of(0, np.arange(1000)), generation)
        expect(generation - 1, generation - 1)
        commit(tier, b"")
        expect(generation, generation)
    reader.stdin.close()
    assert reader.wait() == 0
    reader.stdout.close()
    tier.close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    with pytest.raises(StoreLockedError, match=rf"this process \({os.getpid()}\) .* close it there first"):
        open_tier(tmp_path)
    other = _run(
        """
        from tierstore.errors import StoreLockedError
        try:
            open_tier(Path(sys.argv[1]))
        except StoreLockedError as error:
            print(error)
        """,
        tmp_path,
    )
    said, _ = other.communicate()
    assert f"process {os.getpid()} " in said
    write_rows(tier, WIDE, keys_of(0, [1]), 1)
    tier.close()
    open_tier(tmp_path).close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"rows\.lmdb"):
        open_tier(tmp_path, readonly=True)
    with pytest.raises(StoreNotFoundError, match=r"rows\.lmdb"):
        open_tier(tmp_path, create=False)
    open_tier(tmp_path).close()
    reader = _tier(tmp_path, readonly=True)
    with pytest.raises(ReadOnlyError, match="mode"):
        write_rows(reader, WIDE, keys_of(0, [1]), 1)
    with pytest.raises(ReadOnlyError, match="mode"):
        commit(reader, b"")
    reader.close()


def test_a_creation_cut_short_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "rows.lmdb.new").write_bytes(b"")
    (tmp_path / "rows.lmdb.new-lock").write_bytes(b"")
    tier = _tier(tmp_path)
    commit(tier, b"a")
    tier.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rows.anchor",
        "rows.lmdb",
        "rows.lmdb-lock",
        "writer.lock",
    ]


def test_a_commit_that_finds_no_room_to_clean_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(open_tier(tmp_path)) as tier:
        add_tables(tier)
        keys = keys_of(0, np.arange(500))
        for version in (1, 2):
            write_rows(tier, WIDE, keys, version)
            with monkeypatch.context() as patch:
                patch.setattr(tier._writer._log, "clean", _no_room)
                assert commit(tier, b"") == version
        assert "no room to clean up" in caplog.text
        with tier.lease() as (snapshot, _):
            assert len(stored_segments(snapshot)) == _segments(500), "what is dead goes before cleaning begins"
        check_rows(tier, WIDE, keys, 2)


def _no_room(*_: object) -> None:
    raise DiskFullError("no room left")


def test_a_commit_ends_though_others_write_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn of cleaning finds more to do, as rows are written in between."""
    with contextlib.closing(open_tier(tmp_path)) as tier:
        add_tables(tier)
        write_rows(tier, WIDE, keys_of(0, np.arange(500)), 1)
        calls: list[None] = []
        monkeypatch.setattr(tier._writer, "_clean", lambda: not calls.append(None))
        assert commit(tier, b"") == 1
        assert len(calls) < 30


def test_a_full_disk(tmp_path: Path) -> None:
    """Writes fail with their own error and store nothing; reads go on; with room again so do writes."""
    process = _run(
        """
        import resource
        from tierstore.errors import DiskFullError
        folder = Path(sys.argv[1])
        tier = open_tier(folder)
        add_tables(tier)
        old, new = keys_of(0, np.arange(500)), keys_of(1, np.arange(5000))
        write_rows(tier, WIDE, old, 1)
        commit(tier, b"one")
        limit = (folder / "rows.lmdb").stat().st_size
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for room in (0, 4096, 10_000, 50_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit + room, hard))
            try:
                write_rows(tier, NARROW, new, 2)
                raise SystemExit(f"{room} bytes of room were enough")
            except DiskFullError as error:
                assert "rows.lmdb" in str(error) and "intact" in str(error), error
            try:
                commit(tier, bytes(10_000_000))
                raise SystemExit("the payload found room")
            except DiskFullError:
                pass
            check_rows(tier, WIDE, old, 1)
            assert not read_rows(tier, NARROW, new)[1].any()
            assert (tier.version, tier.payload) == (1, b"one")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        write_rows(tier, NARROW, new, 3)
        assert commit(tier, b"two") == 2
        check_rows(tier, NARROW, new, 3)
        tier.verify()
        tier.close()
        print("done")
        """,
        tmp_path,
    )
    said, _ = process.communicate()
    assert said == "done\n"
    tier = _tier(tmp_path)
    check_rows(tier, NARROW, keys_of(1, np.arange(5000)), 3)
    tier.close()


def test_errors_of_lmdb_have_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.lmdb"
    assert isinstance(translate(lmdb.DiskError("x", errno.ENOSPC), path), DiskFullError)
    assert isinstance(translate(lmdb.MapFullError("x"), path), DiskFullError)
    assert "corrupt" in str(translate(lmdb.CorruptedError("corrupt"), path))


def test_close_waits_for_reads(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    keys = keys_of(0, np.arange(1000))
    write_rows(tier, WIDE, keys, 1)
    with tier.lease():
        closing = threading.Thread(target=tier.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join()
    with plain_lmdb(tmp_path) as txn:
        assert txn.stat()["entries"] == _segments(1000) + _RECORDS


def test_a_lease_keeps_its_snapshot(tmp_path: Path) -> None:
    """Pages an old lease can see are not reused: a walk of the old tree still finds all of its segments."""
    tier = _tier(tmp_path)
    keys = keys_of(0, np.arange(1000))
    write_rows(tier, WIDE, keys, 1)
    commit(tier, b"")
    with tier.lease() as (snapshot, _):
        before = snapshot.walk()["page"].tolist()
        images = [bytes(snapshot.file_map.words[page * 512 : page * 512 + 512]) for page in before if page]
        for generation in range(2, 8):
            write_rows(tier, WIDE, keys, generation)
            commit(tier, b"")
        assert snapshot.walk()["page"].tolist() == before
        after = [bytes(snapshot.file_map.words[page * 512 : page * 512 + 512]) for page in before if page]
        assert images == after
    check_rows(tier, WIDE, keys, 7)
    tier.close()


def test_store_ids_have_16_bytes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="store_id"):
        LmdbColdTier(tmp_path, store_id=STORE_ID[:-1], readonly=False)
    with pytest.raises(ValueError, match="slack"):
        LmdbColdTier(tmp_path, store_id=STORE_ID, readonly=False, slack=1.0)


def _numbers(tier: LmdbColdTier) -> set[int]:
    """Of the segments in the tree."""
    with tier.lease_tree() as snapshot:
        return set(stored_segments(snapshot)["number"].tolist())


def test_rows_lie_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    tier = _tier(tmp_path)
    keys = keys_of(0, np.random.default_rng(0).permutation(1000))
    write_rows(tier, WIDE, keys, 1)
    with tier.lease() as (snapshot, rows):
        slots = rows.segments[WIDE].in_use
        found, _ = rows.live_rows(snapshot, WIDE, slots[np.argsort(rows.segments[WIDE].arrays.numbers[slots])])
    np.testing.assert_array_equal(found, keys)
    tier.close()


def test_numbers_of_segments_are_never_given_again(tmp_path: Path) -> None:
    """Not after a rollback, nor by a process that goes back to a tree that lacks some: a stale page could pass."""
    seen: set[int] = set()
    for generation in range(1, 4):
        tier = _tier(tmp_path)
        write_rows(tier, WIDE, keys_of(0, np.arange(500)), generation)
        seen |= _numbers(tier)
        tier.close()
        tier = _tier(tmp_path)  # drops them
        write_rows(tier, WIDE, keys_of(0, np.arange(500)), generation)
        assert not seen & _numbers(tier)
        tier.close()


def _fill_and_churn(tier: LmdbColdTier, steps: int, commits: int = 0) -> None:
    generator = np.random.default_rng(0)
    write_rows(tier, NARROW, keys_of(1, np.arange(5000)), 1)
    for step in range(steps):
        write_rows(tier, NARROW, keys_of(1, generator.choice(5000, 1500, replace=False)), 2 + step)
        if commits and step % (steps // commits) == 0:
            commit(tier, b"")


def test_cleaning_keeps_within_the_slack(tmp_path: Path) -> None:
    """As far as no version needs the rows, and but for what was written since a turn was planned."""
    for slack in (1.1, 1.4, 2.0):
        folder = tmp_path / str(slack)
        folder.mkdir()
        tier = _tier(folder, slack=slack)
        _fill_and_churn(tier, 200)
        with tier.lease() as (_, rows):
            segments = rows.segments[NARROW]
            needed = 5000 / NARROW.rows_per_segment * NARROW.segment_pages(NARROW.rows_per_segment)
            dead = int(segments.arrays.pages[segments.dead].sum())  # deleted with the next write
            assert segments.pages - dead <= slack * needed + NARROW.segment_pages(1500)
        counters = tier.counters()
        assert counters.rows_moved > 0
        assert counters.bytes_moved > 0
        tier.close()


def test_rows_that_are_cleaned_keep_together(tmp_path: Path) -> None:
    """Rows of one segment that live on are neighbours after it is gone."""
    tier = _tier(tmp_path, slack=1.01)
    write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
    for generation in range(2, 12):
        write_rows(tier, WIDE, keys_of(0, np.arange(0, 1000, 2)), generation)
    with tier.lease() as (snapshot, rows):
        segments = rows.segments[WIDE]
        own = [rows.live_rows(snapshot, WIDE, np.array([slot]))[0] for slot in segments.in_use]
    odd = [keys for keys in own if len(keys) and (keys % 2 == 1).all()]
    assert sum(map(len, odd)) == 500
    assert all((np.diff(keys) == 2).mean() > 0.9 for keys in odd)
    tier.close()


@pytest.mark.parametrize("part", ["a row", "its index"])
def test_a_damaged_segment_is_not_cleaned(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its rows stay where they are, and are an error for whoever reads them, not for whoever writes others."""
    tier = _tier(tmp_path, slack=1.01)
    write_rows(tier, WIDE, keys_of(0, np.arange(200)), 1)
    commit(tier, b"")
    place = place_of(tier, 0, 1)
    flip(tmp_path, place.row if part == "a row" else place.segment_page * 4096 + 16 + 8 * 50)
    for generation in range(2, 9):
        write_rows(tier, WIDE, keys_of(0, np.arange(0, 200, 2)), generation)
        commit(tier, b"")
    assert "is damaged, and stays as it is" in caplog.text
    check_rows(tier, WIDE, keys_of(0, np.arange(0, 200, 2)), 8)
    check_rows(tier, WIDE, keys_of(0, np.arange(3, 200, 2)), 1)
    if part == "a row":
        with pytest.raises(ChecksumError, match="row 1 of table 0"):
            read_rows(tier, WIDE, keys_of(0, [1]))
    tier.close()


def test_the_file_levels_off(tmp_path: Path) -> None:
    """Over 200 commits that rewrite all rows: what two versions take, and what an anchor keeps."""
    tier = _tier(tmp_path)
    keys, sizes = keys_of(1, np.arange(5000)), []
    for generation in range(1, 201):
        write_rows(tier, NARROW, keys, generation)
        commit(tier, b"")
        sizes.append(tier.path.stat().st_size)
    assert sizes[-1] == sizes[20]
    check_rows(tier, NARROW, keys, 200)
    tier.close()
