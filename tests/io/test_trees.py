"""LMDB's trees as we read them, against what LMDB itself lists and leaves behind, and with any byte changed.

Rows copied out of the file in every mode, by its map or past the page cache, have the bits that were written."""

import errno
import math
import os
import signal
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lmdb
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from bench.device import resident_share
from tests.conformance.cold_tier import (
    NARROW,
    TABLES,
    WIDE,
    check_rows,
    commit,
    keys_of,
    read_rows,
    words_of,
    write_rows,
)
from tests.io.support import flip, open_tier, opened, place_of
from tierstore.errors import ChecksumError, ClosedError, UnreadableError
from tierstore.io import btree, reads, uring
from tierstore.io.btree import Pages, WalkStatus
from tierstore.io.files import open_environment
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.mapped import FileMap
from tierstore.io.meta import META_READ_BYTES, Meta, sound_metas
from tierstore.io.reads import MAX_GROUP
from tierstore.io.snapshot import Snapshot, check_page_use
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import PAIR_WORDS, RowLayout
from tierstore.plan.measure import page_cache

pytestmark = pytest.mark.kernel

PAGE = 4096
LAST_KEY = b"\xff" * 16


def _environment(path: Path) -> "lmdb.Environment":
    environment = open_environment(path, 1 << 28)
    with environment.begin(write=True) as txn:
        txn.put(LAST_KEY, b"a store is never empty")
    return environment


def _some_key(generator: np.random.Generator) -> bytes:
    first, second = generator.integers(0, [900, 3])
    return struct.pack(">QQ", first, second)


def _some_transaction(environment: "lmdb.Environment", generator: np.random.Generator, changes: int) -> None:
    """Puts and deletes; a key's value always has the same size, as in a store."""
    with environment.begin(write=True) as txn:
        for _ in range(changes):
            key = _some_key(generator)
            if generator.random() < 0.55:
                txn.put(key, bytes((4080, 4080, 8176, 10, 1000, 50_000)[(key[6] * 3 + key[7] + key[15]) % 6]))
            else:
                txn.delete(key)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of many pages, changed many times, with a free list on overflow pages."""
    generator, path = np.random.default_rng(1), tmp_path_factory.mktemp("tree") / "tree.lmdb"
    with closing(_environment(path)) as environment:
        kept = environment.begin()
        # What a transaction frees goes into one record: here so much that it takes overflow pages.
        with environment.begin(write=True) as txn:
            for key in range(1000, 2200):
                txn.put(struct.pack(">QQ", key, 5), bytes(4080))
        with environment.begin(write=True) as txn:
            for key in range(1000, 2200, 2):
                txn.delete(struct.pack(">QQ", key, 5))
        for _ in range(6):
            _some_transaction(environment, generator, 200 if JIT_ENABLED else 100)
        kept.abort()
    return path


@pytest.fixture
def tree(path: Path) -> Iterator[Any]:
    with ExitStack() as stack:
        environment = stack.enter_context(closing(open_environment(path, 1 << 28)))
        file_map = stack.enter_context(closing(FileMap(path, 1 << 28)))
        yield environment, stack.enter_context(closing(Snapshot(path, file_map, PAGE)))


def test_the_walk_lists_what_lmdb_lists(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, snapshot = tree
    found = snapshot.walk()
    with environment.begin() as txn:
        listed = [(*struct.unpack(">QQ", key), len(value)) for key, value in txn.cursor()]
    assert found[["kind", "number", "size"]].tolist() == listed
    assert ((found["page"] == 0) == (found["size"] < 4000)).all()
    big = found["page"][found["page"] > 0]
    assert np.array_equal(snapshot.file_map.words[big * 512], big.astype(np.uint64))
    assert snapshot.meta.main.entries == len(found)
    for capacity in (100_000, 118, 7, 2):
        monkeypatch.setattr(btree, "_CHUNK_ENTRIES", capacity)
        for first in (0, 1, listed[len(listed) // 2][0], 2**64 - 1):
            assert np.array_equal(snapshot.walk(first), found[found["kind"] >= first])


def test_seek_finds_what_is_there(tree: Any) -> None:
    _, snapshot = tree
    listed = {(entry["kind"], entry["number"]): entry for entry in snapshot.walk()}
    targets = [(first, second) for first in range(0, 1000, 3) for second in range(4)] + [(2**64 - 1, 2**64 - 1)]
    found = snapshot.seek(*np.array(targets, np.uint64).T.copy())
    assert [size >= 0 for size in found["size"].tolist()] == [target in listed for target in targets]
    assert all(entry == listed[target] for target, entry in zip(targets, found, strict=True) if target in listed)


def test_whatever_lmdb_leaves_behind_passes(tmp_path: Path) -> None:
    path = tmp_path / "tree.lmdb"
    environment = _environment(path)
    file_map = FileMap(path, 1 << 28)
    generator = np.random.default_rng(5)
    readers: list[lmdb.Transaction[memoryview]] = []
    most = 0
    for turn in range(300 if JIT_ENABLED else 12):
        _some_transaction(environment, generator, int(generator.choice([1, 4, 40, 400])))
        with environment.begin(write=True) as given_up:
            given_up.put(_some_key(generator), bytes(5000))
            given_up.abort()
        if turn % 7 == 0:
            readers.append(environment.begin(buffers=True))
        if turn % 20 == 19:
            readers.pop(int(generator.integers(len(readers)))).abort()
        with closing(Snapshot(path, file_map, PAGE)) as snapshot:
            snapshot.check_free_pages()
            trees = sum(sum(root[1:4]) for root in (snapshot.meta.main, snapshot.meta.free))
            most = max(most, snapshot.meta.last_page - 1 - trees)
    assert most > (1000 if JIT_ENABLED else 10)
    for reader in readers:
        reader.abort()
    environment.close()
    file_map.close()


class Image:
    def __init__(self, path: Path) -> None:
        self.words: NDArray[np.uint64] = np.fromfile(path, np.uint64)
        self.bytes = self.words.view(np.uint8)
        self.meta: Meta = sound_metas(*(self.bytes[at:][:META_READ_BYTES].tobytes() for at in (0, PAGE)))[0]
        self.pages = Pages(self.words.view(np.uint16), PAGE // 2, len(self.bytes) // PAGE, 0)

    def status(self) -> int:
        return check_page_use(self.pages, self.meta)[0]

    def number(self, at: int, num_bytes: int) -> int:
        return int.from_bytes(self.bytes[at : at + num_bytes].tobytes(), "little")

    def nodes(self, page: int) -> list[int]:
        count = (self.number(page * PAGE + 12, 2) - 16) // 2
        return [page * PAGE + self.number(page * PAGE + 16 + 2 * i, 2) for i in range(count)]

    def leaves(self, root: int, depth: int) -> Iterator[int]:
        if depth == 1:
            yield root
        else:
            for node in self.nodes(root):
                yield from self.leaves(self.number(node, 6), depth - 1)

    def free_records(self) -> Iterator[tuple[int, int, int]]:
        """Of each record of the free list: its node, where its list starts, its size."""
        for leaf in self.leaves(self.meta.free.page, self.meta.free.depth):
            for node in self.nodes(leaf):
                is_large = self.number(node + 4, 2) == 1
                start = self.number(node + 16, 8) * PAGE + 16 if is_large else node + 16
                yield node, start, self.number(node, 4)


@pytest.fixture(scope="module")
def sound(path: Path) -> Image:
    image = Image(path)
    assert image.status() == WalkStatus.DONE
    assert any(size > PAGE for _, _, size in image.free_records()), "no list takes overflow pages"
    assert image.meta.main.depth > 1
    return image


def test_every_changed_byte_of_the_free_list_is_seen(sound: Image) -> None:
    places: list[int] = []
    for node, start, _ in sound.free_records():
        places += range(node, node + 16)
        places += range(start, start + 8 * (sound.number(start, 8) + 1))
    for leaf in sound.leaves(sound.meta.free.page, sound.meta.free.depth):
        places += [*range(leaf * PAGE, leaf * PAGE + 8), *range(leaf * PAGE + 12, leaf * PAGE + 18)]
    places = places[:: 1 if JIT_ENABLED else 61]
    unseen = []
    for i, place in enumerate(places):
        before = sound.bytes[place]
        sound.bytes[place] ^= np.uint8(1 << (i % 8))
        if sound.status() == WalkStatus.DONE:
            unseen.append(place)
        sound.bytes[place] = before
    assert len(places) > 100
    assert not unseen
    assert sound.status() == WalkStatus.DONE


def test_what_the_meta_page_says_must_be_so(sound: Image) -> None:
    meta = sound.meta
    wrong = [meta._replace(last_page=meta.last_page - 1), meta._replace(txn_id=meta.txn_id - 1)]
    for tree in ("main", "free"):
        root = getattr(meta, tree)
        wrong += [
            meta._replace(**{tree: root._replace(**{field: value - 1})}) for field, value in root._asdict().items()
        ]
    for sound.meta in wrong:
        assert sound.status() != WalkStatus.DONE, sound.meta
    sound.meta = meta


NUM_ROWS = 8000 if JIT_ENABLED else 700
NUM_READ = 5600 if JIT_ENABLED else 3 * MAX_GROUP + 5


def _tier(path: Path, layout: RowLayout, num_rows: int, every: int = 1) -> LmdbColdTier:
    tier = open_tier(path)
    tier.set_tables({0: (layout, num_rows)})
    write_rows(tier, layout, keys_of(0, np.arange(0, num_rows, every)), 1)
    return tier


def _go(tier: LmdbColdTier, way: str) -> None:
    tier.reader.is_cold, tier.reader.is_large, tier.reader.asked_at = way != "warm", way == "direct", math.inf
    tier.reader._can_sample = way != "direct"


@pytest.mark.parametrize("can_sample", [True, False])
@pytest.mark.parametrize("way", ["warm", "cold", "direct"])
@pytest.mark.parametrize("verify", [True, False])
def test_every_mode_copies_the_same(tmp_path: Path, verify: bool, way: str, can_sample: bool) -> None:
    tier = _tier(tmp_path, NARROW, NUM_ROWS, every=3)
    _go(tier, way)
    tier.reader._verify, tier.reader._can_sample = verify, can_sample
    rows = np.random.default_rng(0).integers(0, NUM_ROWS, NUM_READ)
    slots = np.random.default_rng(1).permutation(NUM_READ).astype(np.int32)
    weights = np.zeros((NUM_READ, NARROW.weight_words), np.uint64)
    present = np.zeros(NUM_READ, np.bool_)
    tier.read(keys_of(0, rows), slots, weights, weights[:, :0].copy(), present)
    np.testing.assert_array_equal(present, rows % 3 == 0)
    expected = keys_of(0, rows).astype(np.uint64) * np.uint64(1000003) + np.uint64((1 << 50) + 1)
    np.testing.assert_array_equal(weights[slots, 0], np.where(present, expected, 0))
    tier.close()


@pytest.mark.parametrize("way", ["warm", "cold", "direct"])
@pytest.mark.parametrize("at", [0, 1, 99])
def test_each_position_is_verified(tmp_path: Path, way: str, at: int) -> None:
    tier = _tier(tmp_path, WIDE, 300)
    rows = np.random.default_rng(2).permutation(300)[:100]
    place = place_of(tier, 0, int(rows[at]))
    _go(tier, way)
    for offset in (place.pair, place.pair + 8, place.row, place.row + 8 * (WIDE.stored_row_words - PAIR_WORDS) - 1):
        flip(tmp_path, offset)
        with pytest.raises(ChecksumError, match=f"row {rows[at]} of table 0"):
            read_rows(tier, WIDE, keys_of(0, rows))
        flip(tmp_path, offset)
    check_rows(tier, WIDE, keys_of(0, rows), 1)
    tier.close()


ROUNDS = 30 if JIT_ENABLED else 2


BOTH_WAYS = pytest.mark.parametrize("tier", [0, 1 << 40], ids=["direct", "cached"], indirect=True)


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[LmdbColdTier]:
    """Committed: every third row of each table. So many bytes of memory are left; none unless a test says so."""
    monkeypatch.setattr(reads, "free_memory_bytes", lambda: getattr(request, "param", 0))
    tier = opened(tmp_path)
    for table, (layout, num_rows) in TABLES.items():
        write_rows(tier, layout, keys_of(table, np.arange(0, num_rows, 3)), 1)
    commit(tier, b"")
    _rings(tier).idle.append(_rings(tier).take() or pytest.skip("no io_uring here, or no direct reads"))
    yield tier
    tier.close()


def _rings(tier: LmdbColdTier) -> uring.Rings:
    return tier._file.map.locks.rings


def _read_cold(tier: LmdbColdTier, table: int = 0) -> int:
    page_cache.drop(tier.path)
    tier.reader.is_cold, before = True, tier.counters().pages_direct
    layout, num_rows = TABLES[table]
    check_rows(tier, layout, keys_of(table, np.arange(0, num_rows, 3)), 1)
    return tier.counters().pages_direct - before


def _traces() -> int:
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return f"{links}{Path('/proc/self/maps').read_text()}".count("io_uring")


@BOTH_WAYS
@pytest.mark.parametrize("table", TABLES)
def test_bits_are_what_was_written(tier: LmdbColdTier, table: int) -> None:
    (layout, num_rows), generator = TABLES[table], np.random.default_rng(table)
    for _ in range(ROUNDS):
        page_cache.drop(tier.path)
        with tier.path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for page in generator.integers(0, tier.path.stat().st_size // 4096, generator.integers(0, 50)):
                os.pread(file.fileno(), 1, int(page) * 4096)
        keys = keys_of(table, generator.integers(0, num_rows, generator.integers(1, 2 * num_rows)))
        tier.reader.is_cold = True
        words, present = read_rows(tier, layout, keys)
        np.testing.assert_array_equal(present, keys % 2**40 % 3 == 0)
        np.testing.assert_array_equal(words, np.where(present[:, None], words_of(keys, 1, words.shape[1]), 0))
    is_direct = tier.reader.is_large
    assert (tier.counters().pages_direct > ROUNDS) == is_direct
    tier.reader._can_sample, before = False, tier.counters()
    write_rows(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    tier.reader.is_cold = True
    check_rows(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    read = tier.counters().pages_read - before.pages_read
    assert tier.counters().pages_direct - before.pages_direct >= (read if is_direct else 0)
    assert read > 0


def test_a_file_that_memory_has_room_for_stays_there(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read_cold(tier) > 10
    share = resident_share(tier.path)
    monkeypatch.undo()
    assert 1 << 20 < reads.free_memory_bytes() < psutil.virtual_memory().total
    tier.reader.asked_at = 0.0
    _rings(tier).idle.clear()
    assert _read_cold(tier) == 0
    assert len(_rings(tier).idle) == 1, "the pages came through the map"
    assert resident_share(tier.path) > share


def test_what_the_system_refuses_comes_through_the_map(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    rings, own = _rings(tier), _rings(tier).idle.pop()
    with monkeypatch.context() as patch:
        patch.setattr(uring, "_call", refuse := Mock(side_effect=PermissionError(errno.EPERM, "not permitted")))
        assert [_read_cold(tier), _read_cold(tier), refuse.call_count] == [0, 0, 2]
    rings.put_back(own, has_failed=False)
    assert _read_cold(tier) > 10, "a file that had a ring keeps it, and asks for more"
    monkeypatch.setattr(uring, "_call", refuse)
    never = uring.Rings(tier._file.map.locks._file)
    assert [never.take(), never.take(), refuse.call_count] == [None, None, 3]


def test_descriptors_of_others_are_not_a_rings_to_read_or_close(tier: LmdbColdTier) -> None:
    os.close(descriptor := _rings(tier).idle[0]._descriptor)
    assert os.open(tier.path, os.O_RDONLY) == descriptor
    assert _read_cold(tier) == 0, "through the map"
    assert _read_cold(tier) > 10, "by another ring"
    before = set(os.listdir("/proc/self/fd"))
    _rings(tier).idle.append(uring.Ring(tier._file.map.locks.descriptor))
    own = set(map(int, set(os.listdir("/proc/self/fd")) - before))
    os.closerange(min(own), max(own) + 1)
    others = [os.open(tier.path, os.O_RDONLY) for _ in range(8)]
    assert own & set(others)
    _rings(tier).idle.pop()
    for number in (descriptor, *others):
        os.close(number)


@BOTH_WAYS
def test_what_the_device_refuses(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bad sector (EIO): the ring reads the first pages of this process's memory, where nothing is."""
    guard = tier._file.map.rows.guard
    before = guard.met
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: os.dup(memory))  # without O_DIRECT
        _rings(tier).idle.append(uring.Ring(memory))
    os.close(memory)
    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*row \d+ of table 0"):
        _read_cold(tier)
    assert guard.met == before, "a signal"
    _rings(tier).idle.pop()
    assert (_read_cold(tier) > 10) == tier.reader.is_large


@BOTH_WAYS
def test_threads_and_signals(tier: LmdbColdTier) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
    try:
        with ThreadPoolExecutor(len(TABLES)) as threads:
            for _ in threads.map(lambda table: _read_cold(tier, table), list(TABLES) * ROUNDS):
                _read_cold(tier)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 1 <= len(_rings(tier).idle) <= len(TABLES) + 1


def test_a_ring_that_fails_is_not_asked_again(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ring reads a file that is too short; another thread's reads succeed in between."""
    empty = os.open(os.devnull, os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: os.dup(empty))
        short = [uring.Ring(empty) for _ in range(5)]
    os.close(empty)
    _rings(tier).idle[:] = short
    assert _read_cold(tier) == 0, "through the map"
    assert len(_rings(tier).idle) == 4


def test_a_forked_child_has_no_rings_and_a_closed_tier_neither(tier: LmdbColdTier) -> None:
    assert _read_cold(tier) > 10
    assert _traces() > 0
    if not (child := os.fork()):
        try:
            _read_cold(tier)
        except ClosedError:
            os._exit(_traces())
        os._exit(100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _read_cold(tier) > 10
    tier.close()
    assert _traces() == 0
