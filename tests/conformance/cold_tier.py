"""What every cold tier must do, whatever it is made of. A subclass names its tier.

A row's words are a function of its key and a generation number, so that what is read tells what was written.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from numpy.typing import NDArray

from tierstore.errors import ClosedError
from tierstore.io.base import ColdTier
from tierstore.layout import KEY_ROW_BITS, RowLayout

Int64s = NDArray[np.int64]

WIDE = RowLayout(dim=64, dtype="float32", state_dim=1)
NARROW = RowLayout(dim=3, dtype="float16", state_dim=0)
LONG = RowLayout(dim=3000, dtype="bfloat16", state_dim=3000)  # rows longer than a page
TABLES = {0: (WIDE, 1000), 1: (NARROW, 5000), 2: (WIDE, 77), 5: (LONG, 40)}


def keys_of(table: int, rows: "Int64s | list[int]") -> Int64s:
    return (np.int64(table) << KEY_ROW_BITS) + np.asarray(rows, np.int64)


def words_of(keys: Int64s, generation: int, num_words: int) -> NDArray[np.uint64]:
    """uint64 [len(keys), num_words], the contents of rows."""
    start = keys.astype(np.uint64) * np.uint64(1000003) + np.uint64(generation) * np.uint64(1 << 50)
    return start[:, None] + np.arange(1, num_words + 1, dtype=np.uint64)


def commit(tier: ColdTier, payload: bytes, *, keep: int = 1) -> int:
    version = tier.last_version + 1
    tier.commit(payload, version, keep=keep)
    return version


def write_rows(tier: ColdTier, layout: RowLayout, keys: Int64s, generation: int, *, epoch: int | None = None) -> None:
    """For the next version, through slots in reverse, in arenas with room to spare."""
    keys = np.ascontiguousarray(keys)
    words = words_of(keys, generation, layout.weight_words + layout.state_words)
    slots = np.arange(len(keys), dtype=np.int32)[::-1].copy() + 3
    weights = np.full((len(keys) + 5, layout.weight_words), 7, np.uint64)
    state = np.full((len(keys) + 5, layout.state_words), 7, np.uint64)
    weights[slots] = words[:, : layout.weight_words]
    state[slots] = words[:, layout.weight_words :]
    tier.write(keys, slots, weights, state, epoch=tier.last_version + 1 if epoch is None else epoch)


def read_rows(tier: ColdTier, layout: RowLayout, keys: Int64s) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """uint64 [len(keys), words]; the slots of absent rows are checked to be untouched, and zero here."""
    keys = np.ascontiguousarray(keys)
    slots = np.random.default_rng(len(keys)).permutation(len(keys) + 4)[: len(keys)].astype(np.int32)
    weights = np.full((len(keys) + 4, layout.weight_words), 99, np.uint64)
    state = np.full((len(keys) + 4, layout.state_words), 99, np.uint64)
    present = np.random.default_rng(1).random(len(keys)) < 0.5
    tier.read(keys, slots, weights, state, present)
    words = np.concatenate([weights, state], axis=1)
    others = np.ones(len(words), np.bool_)
    others[slots[present]] = False
    assert (words[others] == 99).all(), "a slot changed that no present row belongs to"
    out = words[slots]
    out[~present] = 0
    return out, present


def check_rows(tier: ColdTier, layout: RowLayout, keys: Int64s, generation: int) -> None:
    words, present = read_rows(tier, layout, keys)
    assert present.all()
    np.testing.assert_array_equal(words, words_of(keys, generation, words.shape[1]))


def add_tables(tier: ColdTier) -> None:
    tier.set_tables(TABLES)


class ColdTierConformance:
    """Subclass as ``TestX``, with ``make``."""

    def make(self, tmp_path: Any) -> ColdTier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Any) -> Iterator[ColdTier]:
        tier = self.make(tmp_path)
        add_tables(tier)
        yield tier
        tier.close()

    def test_rows_of_zeros_and_long_payloads_are_there(self, tier: ColdTier) -> None:
        assert (tier.version, tier.payload) == (0, b"")
        weights, state = np.zeros((1, WIDE.weight_words), np.uint64), np.zeros((1, WIDE.state_words), np.uint64)
        tier.write(keys_of(0, [5]), np.zeros(1, np.int32), weights, state, epoch=1)
        words, present = read_rows(tier, WIDE, keys_of(0, [4, 5, 6]))
        assert present.tolist() == [False, True, False]
        assert not words.any()
        long = np.random.default_rng(0).bytes(2_500_000)
        assert commit(tier, long) == 1
        assert tier.payload == long

    def test_tables_that_are_dropped_larger_or_have_no_rows(self, tier: ColdTier) -> None:
        for table in (0, 2):
            write_rows(tier, WIDE, keys_of(table, np.arange(77)), table)
        commit(tier, b"")
        tables = {0: (WIDE, 2000), 1: TABLES[1], 2: (WIDE, 0)}
        tier.set_tables(tables)
        write_rows(tier, WIDE, keys_of(0, [1999]), 3)
        check_rows(tier, WIDE, keys_of(0, np.arange(77)), 0)
        check_rows(tier, WIDE, keys_of(0, [1999]), 3)
        for layout, keys in ((WIDE, keys_of(2, [0])), (LONG, keys_of(5, [0]))):
            with pytest.raises(ValueError, match=r"keys"):
                read_rows(tier, layout, keys)
        tier.set_tables(tables | {5: (WIDE, 10)})
        write_rows(tier, WIDE, keys_of(5, [9]), 2)
        check_rows(tier, WIDE, keys_of(5, [9]), 2)
        assert tier.verify().rows == 79

    def test_counters(self, tier: ColdTier) -> None:
        write_rows(tier, WIDE, keys_of(0, np.arange(100)), 1)
        read_rows(tier, WIDE, keys_of(0, np.arange(50, 150)))
        counters = tier.counters()
        assert (counters.rows_written, counters.rows_read, counters.rows_absent) == (100, 100, 50)
        assert counters.bytes_written >= 100 * WIDE.row_bytes
        assert counters.read_seconds > 0
        assert counters.write_seconds > 0

    def test_what_no_tier_takes(self, tier: ColdTier) -> None:
        for table, row in ((0, 1000), (3, 0), (77, 0), (1 << 21, 0)):
            for keys in (keys_of(table, [row]), np.append(keys_of(0, [1]), keys_of(table, [row]))):
                for call in (
                    lambda keys=keys: write_rows(tier, WIDE, keys, 1),
                    lambda keys=keys: read_rows(tier, WIDE, keys),
                ):
                    with pytest.raises(ValueError, match=r"keys"):
                        call()
        assert not read_rows(tier, WIDE, keys_of(0, [1]))[1].any()
        other_pages = RowLayout(dim=64, dtype="float32", state_dim=1, page_bytes=2 * tier.page_bytes)
        for call, named in (
            (lambda: write_rows(tier, WIDE, keys_of(0, [1, 2, 1]), 1), "twice"),
            (lambda: tier.set_tables({-1: (WIDE, 10)}), "index"),
            (lambda: tier.set_tables({9: (WIDE, -1)}), "num_rows"),
            (lambda: tier.set_tables({9: (other_pages, 10)}), "page_bytes"),
        ):
            with pytest.raises(ValueError, match=named):
                call()

    def test_after_close(self, tier: ColdTier) -> None:
        tier.close()
        tier.close()
        one = keys_of(0, [1])
        for call in (
            lambda: write_rows(tier, WIDE, one, 1),
            lambda: read_rows(tier, WIDE, one),
            lambda: commit(tier, b""),
        ):
            with pytest.raises(ClosedError):
                call()


class ColdTierMachine(RuleBasedStateMachine):
    """Any sequence of writes for two versions at a time, commits that succeed or are given up, rollbacks and reads,
    against a dict of each row's generation by epoch. A subclass makes the tier."""

    def make(self) -> ColdTier:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.tier = self.make()
        add_tables(self.tier)
        self.rows: dict[int, dict[int, int]] = {}
        self.payloads: dict[int, bytes] = {}
        self.generation = self.last = 0
        self.open_epoch, self.under_way = 1, 0

    def some_keys(self, table: int, seed: int, count: int) -> Int64s:
        num_rows = TABLES[table][1]
        return keys_of(table, np.random.default_rng(seed).choice(num_rows, min(count, num_rows), replace=False))

    def shown(self, key: int, version: int | None = None) -> int | None:
        epochs = [epoch for epoch in self.rows.get(key, {}) if version is None or epoch <= version]
        return self.rows[key][max(epochs)] if epochs else None

    def drop_after(self, version: int) -> None:
        for key, epochs in self.rows.items():
            self.rows[key] = {epoch: row for epoch, row in epochs.items() if epoch <= version}
        self.open_epoch, self.under_way = self.last + 1, 0

    @rule(table=st.sampled_from(sorted(TABLES)), seed=st.integers(0, 5), count=st.integers(1, 300), late=st.booleans())
    def write(self, table: int, seed: int, count: int, late: bool) -> None:
        self.generation += 1
        epoch = self.under_way if late and self.under_way else self.open_epoch
        keys = self.some_keys(table, seed, count)
        write_rows(self.tier, TABLES[table][0], keys, self.generation, epoch=epoch)
        for key in keys.tolist():
            self.rows.setdefault(key, {})[epoch] = self.generation

    @rule(give_up=st.booleans())
    def begin_version(self, give_up: bool) -> None:
        if not self.under_way:
            self.under_way, self.open_epoch = self.open_epoch, self.open_epoch + 1
        elif give_up:
            self.under_way = 0

    @rule(payload=st.binary(max_size=40), keep=st.integers(1, 3), replaced=st.booleans())
    def commit(self, payload: bytes, keep: int, replaced: bool) -> None:
        if not self.under_way:
            self.under_way, self.open_epoch = self.open_epoch, self.open_epoch + 1
        self.last, self.under_way = self.under_way, 0
        dropped = sorted(self.payloads)[-1:] if replaced else []
        self.tier.commit(payload, self.last, keep=keep, dropped=dropped)
        self.payloads = {version: kept for version, kept in self.payloads.items() if version not in dropped}
        self.payloads[self.last] = payload
        self.payloads = {version: self.payloads[version] for version in sorted(self.payloads)[-keep:]}
        assert self.tier.versions == tuple(self.payloads)

    @rule(back=st.integers(0, 2))
    def roll_back(self, back: int) -> None:
        if back < len(self.payloads) and not self.under_way:
            version = sorted(self.payloads)[-1 - back]
            self.tier.rollback(version)
            self.payloads = {kept: payload for kept, payload in self.payloads.items() if kept <= version}
            self.drop_after(version)

    @rule(table=st.sampled_from(sorted(TABLES)), seed=st.integers(0, 7), count=st.integers(1, 300))
    def read(self, table: int, seed: int, count: int) -> None:
        self.check_rows(self.tier, table, self.some_keys(table, seed, count))

    def check_rows(self, tier: ColdTier, table: int, keys: Int64s, version: int | None = None) -> None:
        words, present = read_rows(tier, TABLES[table][0], keys)
        shown = [self.shown(key, version) for key in keys.tolist()]
        assert present.tolist() == [generation is not None for generation in shown]
        generations = np.array([generation or 0 for generation in shown], np.uint64)[present, None]
        expected = words_of(keys[present], 0, words.shape[1]) + generations * np.uint64(1 << 50)
        np.testing.assert_array_equal(words[present], expected)

    @rule()
    def verify(self) -> None:
        assert self.tier.verify().rows >= sum(bool(epochs) for epochs in self.rows.values())
        current = max(self.payloads, default=0)
        assert (self.tier.version, self.tier.payload) == (current, self.payloads.get(current, b""))

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
