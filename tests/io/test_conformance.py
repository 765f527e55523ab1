"""The contract of tierstore/io/base.py, on a device and in memory; and the file's own promises: reopen, recover."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.conformance.cold_tier import TABLES, ColdTierConformance, ColdTierMachine, add_tables
from tests.io.support import open_tier, widen_places
from tests.tiers import TroubledTier
from tierstore.io.base import ColdTier, MemoryColdTier
from tierstore.io.lmdb import LmdbColdTier
from tierstore.kernels.jit import JIT_ENABLED


class TestMemory(ColdTierConformance):
    def make(self, tmp_path: Any) -> ColdTier:
        return MemoryColdTier()


class TestBehindAWrapper(TestMemory):
    def make(self, tmp_path: Any) -> Any:
        return TroubledTier(MemoryColdTier())


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
            with contextlib.closing(self.opened(readonly=True, version=version)) as reader:
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


class WidePlacesMachine(LmdbMachine):
    def make(self) -> ColdTier:
        self.patch = pytest.MonkeyPatch()
        widen_places(self.patch)
        return super().make()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "patch"):
            self.patch.undo()


_settings = hypothesis.settings(max_examples=30 if JIT_ENABLED else 4, stateful_step_count=25)
TestMemoryMachine = pytest.mark.kernel(MemoryMachine.TestCase)
TestMemoryMachine.settings = _settings
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = _settings
TestWidePlacesMachine = WidePlacesMachine.TestCase
TestWidePlacesMachine.settings = hypothesis.settings(_settings, max_examples=10 if JIT_ENABLED else 2)
