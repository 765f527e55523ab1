"""Tiers of rows on a device and in memory: the contract of tierstore/io/base.py, and the file's own promises.

The log of segments, what cleaning leaves of it, and the map from rows to their places in it.
"""

import shutil
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.conformance.cold_tier import (
    LONG,
    NARROW,
    TABLES,
    WIDE,
    ColdTierConformance,
    ColdTierMachine,
    add_tables,
    check_rows,
    commit,
    keys_of,
    read_rows,
    write_rows,
)
from tests.io.support import flip, open_tier, opened, place_of, plain_lmdb
from tierstore import layout as layout_module
from tierstore.errors import BudgetError, ChecksumError, DiskFullError
from tierstore.io import log, places, row_file, segments, writer
from tierstore.io.base import ColdTier, MemoryColdTier
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.records import MAX_VERSION
from tierstore.io.row_map import RowMap
from tierstore.io.segments import KEYS, read_indexes, stored_segments
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import PAGE_HEADER_WORDS, RowLayout


class TestMemory(ColdTierConformance):
    def make(self, tmp_path: Any) -> ColdTier:
        return MemoryColdTier()


class TestLmdb(ColdTierConformance):
    def make(self, tmp_path: Any) -> ColdTier:
        return open_tier(tmp_path)


class MemoryMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        return MemoryColdTier()


class LmdbMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        self.folder = Path(tempfile.mkdtemp())
        self.follower: LmdbColdTier | None = None
        return self.opened()

    def opened(self, **changes: Any) -> LmdbColdTier:
        return open_tier(self.folder, slack=1.05, **changes)

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.drop_after(max(self.payloads, default=0))
        self.tier = self.opened()
        add_tables(self.tier)
        assert self.tier.versions == tuple(self.payloads)

    @rule(seed=st.integers(0, 7))
    def look_at_every_version(self, seed: int) -> None:
        for version in self.payloads:
            with closing(self.opened(readonly=True, version=version)) as reader:
                add_tables(reader)
                for table in TABLES:
                    self.check_rows(reader, table, self.some_keys(table, seed, 300), version)

    @rule(seed=st.integers(0, 7))
    def follow(self, seed: int) -> None:
        if self.follower is None:
            self.follower = self.opened(readonly=True)
            add_tables(self.follower)
        shown = {key: self.shown(key, self.follower.version) for key in self.rows}
        if (found := self.follower.find_newer()) is not None:
            for table in TABLES:
                keys = self.some_keys(table, seed, 300)
                others = [shown.get(key) != self.shown(key, found.version) for key in keys.tolist()]
                assert (np.isin(keys, found.changed) >= np.array(others)).all(), "a row changed and nobody was told"
            found.show()
        assert self.follower.version == max(self.payloads, default=0)
        for table in TABLES:
            self.check_rows(self.follower, table, self.some_keys(table, seed, 300), self.follower.version)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            if self.follower is not None:
                self.follower.close()
            shutil.rmtree(self.folder)


_settings = hypothesis.settings(max_examples=30 if JIT_ENABLED else 4, stateful_step_count=25)
TestMemoryMachine = pytest.mark.kernel(MemoryMachine.TestCase)
TestMemoryMachine.settings = _settings
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = _settings


def test_a_commit_that_finds_no_room_to_clean_stands(tmp_path, monkeypatch, caplog):
    with closing(opened(tmp_path)) as tier:
        keys = keys_of(0, np.arange(500))
        for version in (1, 2):
            write_rows(tier, WIDE, keys, version)
            with monkeypatch.context() as patch:
                patch.setattr(tier._writer, "_clean", Mock(side_effect=DiskFullError("no room left")))
                assert commit(tier, b"") == version
        assert "no room to clean up" in caplog.text
        with tier.lease() as (snapshot, _):  # what is dead goes before cleaning begins
            assert len(stored_segments(snapshot)) == -(-500 // WIDE.rows_per_segment)
        check_rows(tier, WIDE, keys, 2)


def test_a_commit_ends_though_others_write_on(tmp_path, monkeypatch):
    with closing(opened(tmp_path)) as tier:
        write_rows(tier, WIDE, keys_of(0, np.arange(500)), 1)
        clean = Mock(return_value=True)
        monkeypatch.setattr(tier._writer, "_clean", clean)
        assert commit(tier, b"") == 1
        assert 0 < clean.call_count < 30


def test_close_waits_for_reads(tmp_path):
    tier = opened(tmp_path)
    write_rows(tier, WIDE, keys_of(0, np.arange(1000)), 1)
    with tier.lease():
        closing = threading.Thread(target=tier.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
    closing.join()
    with plain_lmdb(tmp_path) as txn:  # the records of the store, its head, and the log
        assert txn.stat()["entries"] == -(-1000 // WIDE.rows_per_segment) + 3


def test_numbers_of_segments_are_never_given_again(tmp_path):
    """Not after a rollback, nor by a process that goes back to a tree that lacks some: a stale page could pass."""
    seen: set[int] = set()
    for generation in range(6):  # each drops those that the one before left behind
        with closing(opened(tmp_path)) as tier:
            write_rows(tier, WIDE, keys_of(0, np.arange(500)), generation)
            with tier.lease_tree() as snapshot:
                numbers = set(stored_segments(snapshot)["number"].tolist())
            assert numbers.isdisjoint(seen)
            seen |= numbers


@pytest.mark.parametrize("part", ["a row", "its index"])
def test_a_damaged_segment_is_not_cleaned(part, tmp_path, caplog):
    """Its rows stay where they are, and are an error for whoever reads them, not for whoever writes others."""
    tier = opened(tmp_path, slack=1.01)
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


@pytest.mark.parametrize("layout", [WIDE, NARROW, LONG], ids=["wide", "narrow", "long"])
def test_the_file_stays_within_the_bound(tmp_path, monkeypatch, layout):
    """docs/durability.md's, of rows as they are stored: they are rewritten at random, and committed now and then."""
    least = 1 << 20
    monkeypatch.setattr(row_file, "GROWTH_BYTES", least)
    monkeypatch.setattr(places, "SMALL_PAGES", 256)
    generator, slack, bound, most = np.random.default_rng(0), 1.4, 0.0, 0.0
    num_rows = int((16 << 20) / layout.stored_row_bytes)
    a_write = layout.rows_per_segment
    transaction = a_write * layout.stored_row_bytes * (1 + 1 / (slack - 1))
    with closing(open_tier(tmp_path, slack=slack)) as tier:
        tier.set_tables({0: (layout, num_rows)})
        for part in np.array_split(np.arange(num_rows), num_rows // a_write):
            write_rows(tier, layout, keys_of(0, part), 1)
        for version in range(2, 7):
            commit(tier, b"")
            uncommitted = np.zeros(num_rows, np.bool_)
            for _ in range(num_rows // a_write // 3):
                changed = generator.choice(num_rows, a_write, replace=False)
                write_rows(tier, layout, keys_of(0, changed), version)
                uncommitted[changed] = True
                rows_bytes = (num_rows + np.count_nonzero(uncommitted)) * layout.stored_row_bytes
                growth = min(max(least, slack * rows_bytes / 32), 4 * least)
                bound = max(bound, (slack + 0.1) * rows_bytes + 3 * (growth + transaction))
                most = max(most, tier.path.stat().st_size / bound)
        assert 0.8 < most <= 1


def test_few_pages_are_written_beside_segments(tmp_path, monkeypatch):
    """Segments, and all that is counted in their pages, are an eighth: 64 MB hold the tree of 500 MB."""
    counted = ("SEGMENT_PAGES", layout_module), ("GROWTH_BYTES", row_file), ("DELETED_PAGES", log)
    for name, module in (*counted, ("DELETED_PAGES", writer), ("_CLEANED_PAGES", writer)):
        monkeypatch.setattr(module, name, getattr(module, name) // 8)
    monkeypatch.setattr(places, "SMALL_PAGES", 0)
    layout, num_rows, generator, at = RowLayout(dim=480), 16_000, np.random.default_rng(0), list[tuple[float, int]]()
    parts = np.split(np.arange(num_rows), 250)
    with closing(open_tier(tmp_path)) as tier:
        tier.set_tables({0: (layout, num_rows)})
        for version in range(10):
            for part in parts if version else ():
                write_rows(tier, layout, keys_of(0, part), version)
            if version:
                commit(tier, b"")
                parts = [generator.choice(num_rows, 64, replace=False) for _ in range(60)]
            with tier.lease_tree() as snapshot:
                counters, written = tier.counters(), int(Path("/proc/self/io").read_text().split()[3])
                beside = written - counters.bytes_written - counters.bytes_moved
                at.append((beside / PAGE, snapshot.txn_id))
    pages, transactions = np.diff(at, axis=0).T
    assert pages[0] <= 6 * transactions[0]
    assert np.mean((pages / transactions)[-4:]) <= 12


PAGE = 4096
_NUM_ROWS = 2000
_SHAPES = {0: WIDE, 1: NARROW, 2: WIDE}


class _Content(NamedTuple):
    segments: dict[int, tuple[int, dict[int, int]]]
    places: dict[int, tuple[int, int]]


def _content(rows: RowMap) -> _Content:
    segments = {}
    for each in rows.segments.values():
        arrays = each.arrays
        assert each.rows == int((arrays.live + arrays.held)[each.in_use].sum())
        for slot in np.setdiff1d(each.in_use, each.dead).tolist():
            under = {version: int(held[slot]) for version, held in each.held_under.items() if held[slot:][:1].any()}
            segments[int(arrays.numbers[slot])] = (int(arrays.live[slot]), under)
            assert arrays.held[slot] == sum(under.values())
            assert arrays.live[slot] + arrays.held[slot] > 0
    return _Content(segments, _places(rows))


def _places(rows: RowMap) -> dict[int, tuple[int, int]]:
    found = {}
    for table, layout in rows.layouts.items():
        each, base = rows.segments[layout], int(rows.tables.bases[table])
        for row in np.concatenate([np.empty(0, np.int64), *rows.stored_rows(table)]).tolist():
            slot, index = divmod(int(rows.places[base + row]), 1 << each.geo.place_bits)
            found[int(keys_of(table, [row])[0])] = (int(each.arrays.numbers[slot]), index)
    return found


def _by_definition(tier: LmdbColdTier) -> _Content:
    """What a map of the newest rows is to say: of each row the newest copy is live, and others are held under the last
    kept version before the next copy, if they are as old."""
    snapshot = tier._file.snapshot
    copies: dict[int, list[tuple[int, int, int, int]]] = {}
    for each in read_indexes(snapshot, stored_segments(snapshot)):
        start = int(each["first_page"]) * PAGE // 8 + PAGE_HEADER_WORDS + KEYS
        for index, key in enumerate(snapshot.file_map.words[start : start + int(each["rows"])].tolist()):
            place = int(each["newest"]), int(each["number"]), int(each["oldest"]), index
            copies.setdefault(key, []).append(place)
    live, held, places = Counter[int](), defaultdict[int, Counter[int]](Counter), {}
    for key, own in copies.items():
        own.sort()
        _, number, _, index = own[-1]
        places[key], live[number] = (number, index), live[number] + 1
        for (_, number, oldest, _), (epoch, *_) in pairwise(own):
            version = max((kept for kept in tier.versions if kept < epoch), default=-1)
            if version >= oldest:
                held[number][version] += 1
    return _Content({number: (live[number], dict(held[number])) for number in live.keys() | held.keys()}, places)


def _opened(path: Path, **changes: Any) -> LmdbColdTier:
    tier = open_tier(path, slack=1.05, **changes)
    tier.set_tables({table: (layout, _NUM_ROWS) for table, layout in _SHAPES.items()})
    return tier


@pytest.fixture(params=["narrow", "wide"])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """In bytes; wide if a row's number takes 29 bits of a place: 4 bytes then name seven segments of a layout."""
    if request.param == "wide":
        monkeypatch.setattr(places, "geometry", lambda *given: segments.geometry(*given)._replace(place_bits=29))
    monkeypatch.setattr(segments, "_PART_SEGMENTS", 7)
    return 8 if request.param == "wide" else 4


@pytest.mark.parametrize(("keep", "late"), [(1, False), (3, True)])
def test_a_map_is_what_its_definition_says(tmp_path, width, keep, late):
    """Made in the order of the file, of rows moved by cleaning, rolled back, and written late for a version under way.

    The writer's own may lead to another copy of a row, as cleaning has moved it, and hold more rows that were written
    late.
    """
    generator = np.random.default_rng(keep)

    def write(tier: LmdbColdTier, epoch: int) -> None:
        table = int(generator.integers(3))
        rows = generator.choice(_NUM_ROWS, int(generator.integers(1, 700)), replace=False)
        write_rows(tier, _SHAPES[table], keys_of(table, rows), epoch, epoch=epoch)

    with closing(_opened(tmp_path)) as tier:
        for turn in range(16):
            version = tier.last_version + 1
            for epoch in (version, version + 1, version) if late else (version, version):
                write(tier, epoch)
            tier.commit(b"", version, keep=keep)
            if turn % 5 == 4:
                tier.rollback(tier.versions[0])
            rows, made, snapshot = tier._file.make_map(), RowMap(tier._file.tables), tier._file.snapshot
            made.enter(snapshot, stored_segments(snapshot), MAX_VERSION, tier.versions)
            again = _content(made)
            assert again == _by_definition(tier)
            assert again.places.keys() == _places(rows).keys()
        assert tier.counters().rows_moved > 0
        assert rows.places.itemsize == width
        assert _places(rows.copied()) == _places(rows.with_tables(rows.shapes | {3: (WIDE, 10)})) == _places(rows)
        if late:
            tier.rollback(tier.version)
        again = _by_definition(tier)
    with closing(_opened(tmp_path)) as tier:
        assert _content(tier._file.make_map()) == again


@pytest.mark.parametrize("num_rows", [2**34, 2**40])
def test_a_table_of_any_size_takes_memory_for_what_it_has(tmp_path, num_rows):
    keys = keys_of(0, [num_rows - 9, num_rows - 2, num_rows - 1])
    with closing(open_tier(tmp_path)) as tier:
        tier.set_tables({0: (WIDE, num_rows)})
        write_rows(tier, WIDE, keys, 1)
        tier.set_tables({0: (WIDE, num_rows), 1: (WIDE, 10)})
        commit(tier, b"")
        check_rows(tier, WIDE, keys, 1)
        assert tier.verify().rows == 3
        assert tier.map_bytes >= 4 * num_rows
        with tier.lease() as (_, rows):
            copied = rows.copied()
            assert np.concatenate(list(copied.stored_rows(0))).tolist() == keys.tolist()
            assert copied.differing(rows).tolist() == []


def _private_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def test_scattered_rows_of_a_huge_table_take_little_memory(tmp_path):
    """A page of 4 KiB for each of 3,000 rows, 12 MiB a map, and what writing takes; by huge pages it is 2.7 GiB."""
    keys, before = keys_of(0, np.unique(np.random.default_rng(0).integers(10**9, size=3000))), _private_mib()
    for readonly in (False, True):
        with closing(open_tier(tmp_path, readonly=readonly)) as tier:
            tier.set_tables({0: (WIDE, 10**9)})
            if not readonly:
                write_rows(tier, WIDE, keys, 1)
                tier.set_tables({0: (WIDE, 10**9), 1: (WIDE, 10**9)})
                commit(tier, b"")
            check_rows(tier, WIDE, keys, 1)
            assert _private_mib() - before < 100


def test_memory_that_the_system_refuses_is_told(monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(places, "zeros", refuse)
    with pytest.raises(BudgetError, match=r"refuses 64\.0 GiB .* map of 17,179,869,184 rows .*overcommit_memory is 2"):
        places.new_places(2**34)
