"""However a store is rewritten, a commit leaves its segments no larger than the slack allows."""

from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import LONG, NARROW, WIDE, check_rows, commit, keys_of, write_rows
from tests.io.support import open_tier
from tierstore.io import anchor, places
from tierstore.layout import RowLayout


@pytest.mark.parametrize(("slack", "writes"), [(1.1, 1), (1.4, 3)])
@pytest.mark.parametrize("num_rows", [1, 40, 6000])
def test_a_commit_leaves_no_more_than_the_slack(tmp_path: Path, slack: float, num_rows: int, writes: int) -> None:
    """Half of the rows are rewritten for each version, so that every segment loses some, in few transactions or one."""
    tier = open_tier(tmp_path, slack=slack)
    tier.add_table(0, WIDE, num_rows)
    generator = np.random.default_rng(0)
    generations = np.zeros(num_rows, np.int64)
    try:
        for version in range(1, 9):
            rows = generator.permutation(num_rows)[: num_rows if version == 1 else -(-num_rows // 2)]
            for part in np.array_split(rows, writes):
                if len(part):
                    write_rows(tier, WIDE, keys_of(0, part), version)
            generations[rows] = version
            commit(tier, b"")
            with tier.lease() as (_, found):
                segments = found.segments[WIDE]
                per_segment = WIDE.segment_pages(WIDE.rows_per_segment)
                needed = num_rows * per_segment / WIDE.rows_per_segment
                assert segments.pages <= slack * needed + per_segment, f"version {version}"
        for version in np.unique(generations).tolist():
            check_rows(tier, WIDE, keys_of(0, np.flatnonzero(generations == version)), version)
    finally:
        tier.close()


def test_a_few_rows_of_a_version_do_not_keep_others_from_being_cleaned(tmp_path: Path) -> None:
    """The emptiest segment has all that could be moved for a kept version, and would be no smaller elsewhere."""
    size, generator = WIDE.rows_per_segment, np.random.default_rng(0)
    pages = WIDE.segment_pages(size)
    tier = open_tier(tmp_path, slack=1.4)
    tier.add_table(0, WIDE, 20 * size + 1)
    try:
        for rows in (1 + np.arange(20 * size), np.arange(1)):
            write_rows(tier, WIDE, keys_of(0, rows), 1)
        commit(tier, b"")
        for number in range(60):
            write_rows(tier, WIDE, keys_of(0, 1 + generator.permutation(20 * size)[:size]), 2)
            with tier.lease() as (_, found):
                segments = found.segments[WIDE]
                stored = segments.pages - segments.arrays.pages[segments.dead].sum()
                assert stored <= (1.4 * segments.rows / size + 2) * pages, f"write {number}"
    finally:
        tier.close()


@pytest.mark.parametrize("layout", [WIDE, NARROW, LONG], ids=["wide", "narrow", "long"])
def test_the_file_stays_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: RowLayout) -> None:
    """docs/durability.md's, of rows as they are stored: they are rewritten at random, and committed now and then."""
    least = 1 << 20
    monkeypatch.setattr(anchor, "GROWTH_BYTES", least)
    monkeypatch.setattr(places, "SMALL_PAGES", 256)
    generator, slack, bound, most = np.random.default_rng(0), 1.4, 0.0, 0.0
    num_rows = int((16 << 20) / layout.stored_row_bytes)
    a_write = layout.rows_per_segment
    transaction = a_write * layout.stored_row_bytes * (1 + 1 / (slack - 1))
    tier = open_tier(tmp_path, slack=slack)
    try:
        tier.add_table(0, layout, num_rows)
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
    finally:
        tier.close()
