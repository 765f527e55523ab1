"""The contract of tierstore/io/base.py, on a device and in memory; and the file's own promises: reopen, recover."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis.stateful import rule

from tests.conformance.cold_tier import TABLES, ColdTierConformance, ColdTierMachine, add_tables, keys_of
from tests.io.support import open_tier, place_rows
from tierstore._jit import JIT_ENABLED
from tierstore.io import MemoryColdTier
from tierstore.io.base import ColdTier
from tierstore.io.placement import Area, Placement


class TestMemory(ColdTierConformance):
    num_threads_rounds = 10

    def make(self, tmp_path: Any) -> ColdTier:
        return MemoryColdTier()


class TestLmdb(ColdTierConformance):
    def make(self, tmp_path: Any) -> ColdTier:
        return open_tier(tmp_path)


class TestLmdbTinyStaging(ColdTierConformance):
    """One block at a time."""

    num_threads_rounds = 20

    def make(self, tmp_path: Any) -> ColdTier:
        return open_tier(tmp_path, staging_bytes=1)


def mixed_placement() -> Placement:
    """Some rows of every table, in no order, two tables of one layout in one area."""
    generator = np.random.default_rng(0)
    areas = []
    for host, shares in ((0, {0: 400, 2: 50}), (1, {1: 3000}), (5, {5: 40})):
        rows = [keys_of(table, generator.permutation(TABLES[table][1])[:count]) for table, count in shares.items()]
        layout, num_rows = TABLES[host]
        first = layout.num_blocks(num_rows) * layout.rows_per_block
        areas.append(Area(host, first, generator.permutation(np.concatenate(rows))))
    return Placement(areas)


class TestLmdbPlaced(ColdTierConformance):
    """Rows that do not lie at their own places."""

    num_threads_rounds = 20

    def make(self, tmp_path: Any) -> ColdTier:
        place_rows(tmp_path, mixed_placement())
        return open_tier(tmp_path)


class MemoryMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        return MemoryColdTier()


class LmdbMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        self.folder = Path(tempfile.mkdtemp())
        self.prepare_folder()
        return open_tier(self.folder)

    def prepare_folder(self) -> None:
        """Before the file is there."""

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = open_tier(self.folder)
        add_tables(self.tier)
        self.rows = dict(self.committed)
        assert (self.tier.version, self.tier.payload) == (self.versions, self.last_payload)

    @rule()
    def look_with_a_reader(self) -> None:
        self.tier.close()
        self.tier = open_tier(self.folder, readonly=True)
        add_tables(self.tier)
        self.rows = dict(self.committed)
        for table in (0, 1, 2, 5):
            self.read(table=table, seed=1, count=30)
        self.verify()
        self.reopen()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


class PlacedMachine(LmdbMachine):
    def prepare_folder(self) -> None:
        place_rows(self.folder, mixed_placement())


_settings = hypothesis.settings(max_examples=15 if JIT_ENABLED else 4, stateful_step_count=15)
TestMemoryMachine = pytest.mark.kernel(MemoryMachine.TestCase)
TestMemoryMachine.settings = _settings
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = _settings
TestPlacedMachine = PlacedMachine.TestCase
TestPlacedMachine.settings = _settings
