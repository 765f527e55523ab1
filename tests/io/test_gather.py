"""The kernels that copy rows out, in every mode, on small tables."""

import math
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cold_tier import NARROW, WIDE, check_rows, keys_of, read_rows, write_rows
from tests.io.support import flip, open_tier, place_of
from tierstore.errors import ChecksumError
from tierstore.io.lmdb import LmdbColdTier
from tierstore.io.reads import MAX_GROUP
from tierstore.kernels.jit import JIT_ENABLED
from tierstore.layout import PAIR_WORDS, RowLayout

pytestmark = pytest.mark.kernel

NUM_ROWS = 8000 if JIT_ENABLED else 700
NUM_READ = 5600 if JIT_ENABLED else 3 * MAX_GROUP + 5


def _tier(path: Path, layout: RowLayout, num_rows: int, every: int = 1) -> LmdbColdTier:
    tier = open_tier(path)
    tier.add_table(0, layout, num_rows)
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
@pytest.mark.parametrize("at", [0, 1, 2, 37, 99])
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
