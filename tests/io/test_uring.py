"""Reads past the page cache: the bits of the map's, whatever else uses the ring, the file or the process."""

import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from tests.conformance.cold_tier import TABLES, check_rows, commit, keys_of, read_rows, words_of
from tests.conformance.cold_tier import write_rows as write
from tests.io.support import opened
from tierstore.errors import ClosedError, UnreadableError
from tierstore.io import reads, uring
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.mapped import is_resident
from tierstore.kernels.jit import JIT_ENABLED, kernel
from tierstore.plan.measure import page_cache

pytestmark = pytest.mark.kernel

ROUNDS = 30 if JIT_ENABLED else 2


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LmdbColdTier]:
    """Committed: every third row of each table. No memory is left for the file."""
    monkeypatch.setattr(reads, "free_memory_bytes", lambda: 0)
    tier = opened(tmp_path)
    for table, (layout, num_rows) in TABLES.items():
        write(tier, layout, keys_of(table, np.arange(0, num_rows, 3)), 1)
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
    assert tier.counters().pages_direct > ROUNDS
    tier.reader._can_sample, before = False, tier.counters()
    write(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    tier.reader.is_cold = True
    check_rows(tier, layout, keys_of(table, np.arange(num_rows)), 2)
    assert tier.counters().pages_direct - before.pages_direct >= tier.counters().pages_read - before.pages_read > 0


def test_a_file_that_memory_has_room_for_stays_there(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _read_cold(tier) > 10
    share = page_cache.resident_share(tier.path)
    monkeypatch.undo()
    assert 1 << 20 < reads.free_memory_bytes() < psutil.virtual_memory().total
    tier.reader.asked_at = 0.0
    assert _read_cold(tier) == 0
    assert page_cache.resident_share(tier.path) > share


def test_what_the_system_refuses_comes_through_the_map(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uring, "_call", refuse := Mock(side_effect=PermissionError(errno.EPERM, "not permitted")))
    _rings(tier).idle.clear()
    assert [_read_cold(tier), _read_cold(tier), refuse.call_count] == [0, 0, 1]


@kernel
def _ask(address: int, flag: np.ndarray) -> bool:
    return is_resident(address, flag)


def test_a_page_of_the_system_is_asked_about_from_within_and_a_refusal_is_no_answer(tier: LmdbColdTier) -> None:
    """Pages of the system may have 64 KiB, those of LMDB begin within them."""
    file_map, flag = tier._file.map, np.ones(1, np.uint8)
    assert file_map.words[0] >= 0
    assert _ask(file_map.address + 100, flag)
    assert not _ask(1 << 40 | 1 << 12, flag), "nothing is mapped there"


def test_a_read_that_was_cut_short_ends_no_rings_and_three_in_a_row_do(
    tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, rings, short, taken = uring.Ring, _rings(tier), iter([True, False, *[True] * 9]), []

    def make(number: int) -> uring.Ring:
        taken.append(next(short))
        with open(tier.path.with_name("empty"), "wb+") as empty:
            return real(empty.fileno() if taken[-1] else number)

    monkeypatch.setattr(uring, "Ring", make)
    rings.idle.clear()
    assert _read_cold(tier) > 10
    assert taken == [True, False]
    rings.idle.clear()
    assert [_read_cold(tier), _read_cold(tier)] == [0, 0]
    assert taken == [True, False, True, True, True]


def test_a_ring_that_somebody_closed(tier: LmdbColdTier) -> None:
    os.close(descriptor := _rings(tier).idle[0]._descriptor)
    assert os.open(tier.path, os.O_RDONLY) == descriptor
    assert _read_cold(tier) > 10, "by another ring"
    os.close(descriptor)  # it was not the ring's to close


def test_a_ring_that_goes_closes_nobody_elses_descriptors(tier: LmdbColdTier) -> None:
    before = set(os.listdir("/proc/self/fd"))
    _rings(tier).idle.append(uring.Ring(tier._file.map.locks.descriptor))
    own = set(map(int, set(os.listdir("/proc/self/fd")) - before))
    os.closerange(min(own), max(own) + 1)
    others = [os.open(tier.path, os.O_RDONLY) for _ in range(8)]
    assert own & set(others)
    _rings(tier).idle.pop()
    for number in others:
        os.close(number)


def test_a_ring_of_another_file_is_not_used(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    _rings(tier).idle.clear()
    monkeypatch.setattr(type(_rings(tier)._file), "is_held", lambda _: False)
    with pytest.raises(ClosedError, match=r"os\.closerange"):
        _rings(tier).take()


def test_what_the_device_refuses(tier: LmdbColdTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a bad sector (EIO): the ring reads the first pages of this process's memory, where nothing is."""
    guard = tier._file.map.rows.guard
    before = guard.met
    memory = os.open("/proc/self/mem", os.O_RDONLY)  # closed when it is registered
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda *_: memory)
        _rings(tier).idle.append(uring.Ring(-1))
    with pytest.raises(UnreadableError, match=r"rows\.lmdb: .*row \d+ of table 0"):
        _read_cold(tier)
    assert guard.met == before, "a signal"
    _rings(tier).idle.pop()
    assert _read_cold(tier) > 10


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
