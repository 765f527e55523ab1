"""Reads past the page cache: the bits of the map's, whatever else uses the ring, the file or the process."""

import errno
import os
import signal
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import (
    TABLES,
    WIDE,
    add_tables,
    check_rows,
    commit,
    keys_of,
    read_rows,
    words_of,
    write_rows,
)
from tests.io.support import open_tier
from tierstore.errors import ClosedError, UnreadableError
from tierstore.io import reads, ring
from tierstore.io.lmdb import LmdbColdTier
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.plan.measure import page_cache

pytestmark = pytest.mark.kernel

ROUNDS = 30 if JIT_ENABLED else 2


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbColdTier]:
    """Committed: every third row of each table. No memory is left for the file."""
    monkeypatch.setattr(reads, "free_memory_bytes", lambda: 0)
    tier = open_tier(tmp_path)
    add_tables(tier)
    for table, (layout, num_rows) in TABLES.items():
        write_rows(tier, layout, keys_of(table, np.arange(0, num_rows, 3)), 1)
    commit(tier, b"")
    with tier._file.map.pins.rings.lent(True) as found:
        if found is None:
            pytest.skip("no io_uring here, or no direct reads")
    yield tier
    tier.close()


def _cool(tier: LmdbColdTier) -> None:
    page_cache.drop(tier.path)
    tier.reader.is_cold = True


def _direct_pages(tier: LmdbColdTier) -> int:
    """That a read of all rows of table 0 does not get through the map; their bits are looked at."""
    _cool(tier)
    before = tier.counters().pages_direct
    check_rows(tier, WIDE, keys_of(0, np.arange(0, 1000, 3)), 1)
    return tier.counters().pages_direct - before


def _rings() -> int:
    """Descriptors and maps of rings in this process."""
    links = [each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return f"{links}{Path('/proc/self/maps').read_text()}".count("io_uring")


@pytest.mark.parametrize("table", TABLES)
def test_bits_are_what_was_written(tier: LmdbColdTier, table: int) -> None:
    """Rows twice, rows that are absent, and pages that are in memory, by chance; at last pages that the device does
    not have yet."""
    layout, num_rows = TABLES[table]
    generator = np.random.default_rng(table)
    for _ in range(ROUNDS):
        _cool(tier)
        with tier.path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for page in generator.integers(0, tier.path.stat().st_size // 4096, generator.integers(0, 50)):
                os.pread(file.fileno(), 1, int(page) * 4096)
        keys = keys_of(table, generator.integers(0, num_rows, generator.integers(1, 2 * num_rows)))
        words, present = read_rows(tier, layout, keys)
        expected = words_of(keys, 1, words.shape[1])
        np.testing.assert_array_equal(words, np.where(present[:, None], expected, 0))
        np.testing.assert_array_equal(present, keys % 2**40 % 3 == 0)
    assert tier.counters().pages_direct > ROUNDS
    tier.reader._can_sample = False
    write_rows(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    tier.reader.is_cold, before = True, tier.counters()
    check_rows(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    assert tier.counters().pages_direct - before.pages_direct >= tier.counters().pages_read - before.pages_read > 0


def test_the_page_cache_is_left_alone_if_it_could_not_hold_the_file(
    tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _direct_pages(tier) > 10
    share = page_cache.resident_share(tier.path)
    monkeypatch.setattr(reads, "free_memory_bytes", lambda: 1 << 40)
    tier.reader.asked_at = 0.0
    assert _direct_pages(tier) == 0
    assert page_cache.resident_share(tier.path) > share


def test_what_the_system_refuses_comes_through_the_map(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*arguments: int) -> int:
        calls.append(arguments)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(ring, "_call", refuse)
    tier._file.map.pins.rings.close()
    tier._file.map.pins.rings = ring.Rings(tier._file.map.pins._file)  # type: ignore[misc]
    assert _direct_pages(tier) == _direct_pages(tier) == 0
    assert len(calls) == 1


def test_a_ring_that_somebody_closed(tier: LmdbColdTier) -> None:
    descriptor = tier._file.map.pins.rings._idle[0]._descriptor
    os.close(descriptor)
    assert os.open(tier.path, os.O_RDONLY) == descriptor
    assert _direct_pages(tier) == 0 or _direct_pages(tier) == 0
    os.close(descriptor)  # it is not the ring's to close


def test_what_the_device_refuses(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bad sector (EIO): the ring reads the first pages of this process's memory, where nothing is."""
    strange = types.SimpleNamespace(**vars(os))
    strange.open = lambda path, flags: os.open("/proc/self/mem", os.O_RDONLY)
    with monkeypatch.context() as patch:
        patch.setattr(ring, "os", strange)
        bad = ring.Ring(-1)
    rings = tier._file.map.pins.rings
    rings._idle.append(bad)
    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*row \d+ of table 0"):
        _direct_pages(tier)
    assert tier._file.map.rows.guard.met == 0  # no signal
    assert rings._idle.pop() is bad
    bad.close()
    assert _direct_pages(tier) > 10


def test_threads_and_signals(tier: LmdbColdTier) -> None:
    """Several threads read at a time, while signals stop them from waiting."""
    errors: list[BaseException] = []
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(1))

    def read(table: int) -> None:
        layout, num_rows = TABLES[table]
        try:
            for _ in range(ROUNDS):
                _cool(tier)
                check_rows(tier, layout, keys_of(table, np.arange(0, num_rows, 3)), 1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(table,)) for table in (0, 1, 5)]
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for thread in threads:
            thread.start()
        read(0)
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert errors == []
    assert seen
    assert 1 <= len(tier._file.map.pins.rings._idle) <= 4


def test_a_forked_child_has_no_rings_and_a_closed_tier_neither(tier: LmdbColdTier) -> None:
    assert _direct_pages(tier) > 10
    assert _rings() > 0
    if not (child := os.fork()):
        try:
            _direct_pages(tier)
        except ClosedError:
            os._exit(_rings())
        os._exit(100)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _direct_pages(tier) > 10
    tier.close()
    assert _rings() == 0
