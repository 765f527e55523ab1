"""A transaction writes few pages beside its segments, whatever the store went through."""

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import commit, keys_of, write_rows
from tests.io.support import open_tier
from tierstore import layout as layouts
from tierstore.io import anchor, log, places
from tierstore.io.lmdb import LmdbColdTier
from tierstore.layout import RowLayout

_SCALE = 8  # Segments, and all that is counted in their pages, are so many times smaller: 64 MB hold the tree of 500 MB
_NUM_ROWS = 16_000
_ROWS_A_WRITE = 64
_COUNTS = Path("/proc/self/io")


def _written_bytes() -> int:
    """By this process, to any file."""
    return int(next(line.split()[1] for line in _COUNTS.read_text().splitlines() if line.startswith("wchar")))


class _Counter:
    """Counts pages that are written beside segments."""

    def __init__(self, tier: LmdbColdTier) -> None:
        self._tier = tier
        self._last = self._now()

    def _now(self) -> tuple[int, int]:
        with self._tier.lease_tree() as snapshot:
            counters = self._tier.counters()
            return _written_bytes() - counters.bytes_written - counters.bytes_moved, snapshot.txn_id

    def pages_a_transaction(self) -> float:
        """Since the last call."""
        (before, first), self._last = self._last, self._now()
        return (self._last[0] - before) / 4096 / (self._last[1] - first)


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> RowLayout:
    """Two rows a segment."""
    for module, name in (
        (layouts, "SEGMENT_PAGES"),
        (anchor, "GROWTH_BYTES"),
        (log, "_DELETED_PAGES"),
        (log, "_CLEANED_PAGES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // _SCALE)
    monkeypatch.setattr(places, "SMALL_PAGES", 0)
    layout = RowLayout(dim=480)
    assert layout.rows_per_segment == 2
    return layout


@pytest.mark.skipif(not _COUNTS.exists(), reason="the kernel does not count what a process writes")
def test_few_pages_are_written_beside_segments(tmp_path: Path, layout: RowLayout) -> None:
    """While the table is filled, and while rows are rewritten at random: each transaction deletes 32 segments, of as
    many leaves of LMDB's tree."""
    generator, rates = np.random.default_rng(0), []
    tier = open_tier(tmp_path)
    try:
        tier.add_table(0, layout, _NUM_ROWS)
        counter = _Counter(tier)
        for keys in np.split(keys_of(0, np.arange(_NUM_ROWS)), _NUM_ROWS // _ROWS_A_WRITE):
            write_rows(tier, layout, keys, 1)
        commit(tier, b"")
        assert counter.pages_a_transaction() <= 6
        for version in range(2, 10):
            for _ in range(60):
                keys = keys_of(0, generator.choice(_NUM_ROWS, _ROWS_A_WRITE, replace=False))
                write_rows(tier, layout, keys, version)
            commit(tier, b"")
            rates.append(counter.pages_a_transaction())
        assert np.mean(rates[-4:]) <= 12, rates
    finally:
        tier.close()
