"""The contract of tierstore/io/base.py, on a device and in memory; and the file's own promises: reopen, recover."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.stateful import rule

from tests.conformance.cold_tier import ColdTierConformance, ColdTierMachine, add_tables
from tests.io.support import open_tier
from tierstore._jit import JIT_ENABLED
from tierstore.io import MemoryColdTier
from tierstore.io.base import ColdTier


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


class MemoryMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        return MemoryColdTier()


class LmdbMachine(ColdTierMachine):
    def make(self) -> ColdTier:
        self.folder = Path(tempfile.mkdtemp())
        return open_tier(self.folder)

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


_settings = hypothesis.settings(max_examples=15 if JIT_ENABLED else 4, stateful_step_count=15)
TestMemoryMachine = pytest.mark.kernel(MemoryMachine.TestCase)
TestMemoryMachine.settings = _settings
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = _settings
