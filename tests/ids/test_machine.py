"""Tables with dynamic ids under any order of training, eviction, commits, rollbacks and opens, beside a dict of ids and
a table in memory that gives no row twice."""

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import tierstore
from tests.drawn import drawn
from tests.hbm.stores import few_slots
from tests.ids.model import Model
from tierstore.errors import DiskFullError, IdError
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency, Probability

INIT = tierstore.init.Uniform(-0.5, 0.5, seed=7)
OPTIMIZER = tierstore.optim.Adagrad(lr=0.5)
IDS = st.integers(0, 100).map(lambda n: (n * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63)
"""Any of a hundred, all over int64."""
BATCHES = st.lists(IDS, min_size=5, max_size=60)
ADMISSIONS = st.none() | drawn(Frequency, Probability)
EVICTIONS = drawn(LRU, LFU) | st.builds(TTL, st.integers(1, 20))


class DynamicIdsMachine(RuleBasedStateMachine):
    @initialize(
        rules=drawn(DynamicIds), capacity=st.integers(1, 40),
        ddr=st.sampled_from(["2MiB", "480KiB"]), policy=st.sampled_from(["auto", "lru", "lfu"]),
        hbm=st.sampled_from([0, 4, 20, 40]), is_deferred=st.booleans(),
    )  # fmt: skip
    def begin(self, rules: DynamicIds, capacity: int, ddr: str, policy: str, hbm: int, is_deferred: bool) -> None:
        """``hbm``: slots in device memory, which may be all that rows need; 0: there is no such tier."""
        self.few_slots = contextlib.ExitStack()
        if 0 < hbm < capacity:
            self.few_slots.enter_context(few_slots(hbm))
        self.directory = Path(tempfile.mkdtemp())
        self.settings: Any = {"ddr": ddr, "policy": policy, "hbm": "1MiB" if hbm else 0, "device": "cpu"}
        self.is_deferred = is_deferred
        config = tierstore.TableConfig(
            name="item", num_embeddings=capacity, embedding_dim=33, init=INIT, optimizer=OPTIMIZER, ids=rules
        )
        self.model = Model(rules, capacity)
        self.open(config)
        self.oracle_store = tierstore.open(cold="memory", ddr="4MiB", keep=100)
        self.oracle = self.oracle_store.create_table(
            tierstore.TableConfig(name="item", num_embeddings=20_000, embedding_dim=33, optimizer=OPTIMIZER)
        )
        self.committed: dict[int, tuple[Model, int]] = {}

    def open(self, config: tierstore.TableConfig) -> None:
        self.store = tierstore.open(self.directory, **self.settings, keep=3)
        self.store.set_time(60 * self.model.minute - 60)
        self.take(self.store.create_table(config))

    def take(self, table: tierstore.Table) -> None:
        if table is not getattr(self, "table", None):  # nothing changes a table into what it is
            self.table, self.num_evicted = table, 0
        self.bag, self.rows = tierstore.TieredEmbeddingBag(self.table), tierstore.TieredEmbedding(self.table)
        self.optimizer: Any = self.store.optimizer() if self.is_deferred else None

    @rule(
        batches=st.lists(BATCHES, min_size=1, max_size=3), depth=st.integers(0, 2), seed=st.integers(0, 2**16),
        per_bag=st.integers(0, 7),
    )  # fmt: skip
    def train(self, batches: list[list[int]], depth: int, seed: int, per_bag: int) -> None:
        """Without bags if there are 0 ids in each."""
        given = [torch.tensor(ids) for ids in batches]
        generator = torch.Generator().manual_seed(seed)
        module: Any = self.bag if per_bag else self.rows
        starts = [torch.arange(0, len(ids), per_bag or 1) for ids in batches]
        arguments = list(zip(given, starts, strict=True)) if per_bag else [(each,) for each in given]
        ahead = tierstore.prefetch(arguments, module, depth=depth, features=lambda batch: batch)
        for ids, begins, arguments_now in zip(batches, starts, ahead, strict=True):
            numbers, known = self.admitted(ids)
            if self.is_refused(known):
                with pytest.raises(IdError):
                    module(*arguments_now)
                continue
            out = module(*arguments_now)
            expected = tierstore.TieredEmbeddingBag(self.oracle)(numbers, torch.tensor([0, *known]).cumsum(0)[begins])
            is_exact = self.model.rules.unseen != "init"  # whose first values are added behind the rows
            assert torch.equal(out, expected) if is_exact else torch.allclose(out, expected, atol=1e-4)
            gradient = torch.randn(out.shape, generator=generator)
            out.backward(gradient)
            expected.backward(gradient)
            if self.optimizer is not None:
                self.optimizer.step()
                self.optimizer.zero_grad()

    train_again = train  # most of what happens to a table

    def is_refused(self, known: list[bool]) -> bool:
        return self.model.rules.unseen == "error" and not all(known)

    def admitted(self, ids: list[int]) -> tuple[torch.Tensor, list[bool]]:
        """Have model and oracle admit a batch: the oracle's rows of its ids, and which ids have one, or count as if.
        ``unseen="init"``: others get rows in the oracle for this batch."""
        had = {key: row.number for key, row in self.model.rows.items()}
        if given := self.model.train(ids):
            self.oracle.write(torch.tensor([self.model.rows[key].number for key in given]), first_values(given))
        numbers = {key: row.number for key, row in self.model.rows.items()}
        self.num_evicted += sum(numbers.get(key) != number for key, number in had.items())
        if self.model.rules.unseen == "init" and (others := [*{*ids} - numbers.keys()]):
            numbers |= dict(zip(others, range(self.model.next_number, 2**31), strict=False))
            self.model.next_number += len(others)
            self.oracle.write(torch.tensor([numbers[key] for key in others]), first_values(others))
        known = [key in numbers for key in ids]
        return torch.tensor([numbers[key] for key in ids if key in numbers], dtype=torch.long), known

    @rule(minutes=st.integers(1, 9))
    def wait(self, minutes: int) -> None:
        self.model.minute += minutes
        self.store.set_time(60 * self.model.minute - 30)

    @rule(ids=BATCHES)
    def admit(self, ids: list[int]) -> None:
        self.admitted(ids)
        known = [key in self.model.rows for key in ids]
        if self.is_refused(known):
            with pytest.raises(IdError):
                self.table.admit(torch.tensor(ids))
        else:
            assert self.table.admit(torch.tensor(ids)) == sum(known)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), seed=st.integers(0, 2**16))
    def write(self, data: Any, seed: int) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.model.rows)), min_size=1))
        values = torch.randn(len(ids), 33, generator=torch.Generator().manual_seed(seed))
        self.table.write(torch.tensor(ids), values)
        self.oracle.write(torch.tensor([self.model.rows[key].number for key in ids]), values)

    @rule(ids=BATCHES)
    def read(self, ids: list[int]) -> None:
        known = [key in self.model.rows for key in ids]
        if self.is_refused(known):
            with pytest.raises(IdError):
                self.table.read(torch.tensor(ids))
            return
        rows, others = self.table.read(torch.tensor(ids)), [key for key in ids if key not in self.model.rows]
        first = first_values(others) if self.model.rules.unseen == "init" else torch.zeros(len(others), 33)
        assert torch.equal(rows[~torch.tensor(known)], first)
        numbers = [self.model.rows[key].number for key in ids if key in self.model.rows]
        assert torch.equal(rows[torch.tensor(known)], self.oracle.read(torch.tensor(numbers, dtype=torch.long)))
        state = self.table.read_state(torch.tensor(ids))[torch.tensor(known)]
        assert torch.equal(state, self.oracle.read_state(torch.tensor(numbers, dtype=torch.long)))

    @rule(ids=BATCHES)
    def evict(self, ids: list[int]) -> None:
        had = {key for key in ids if key in self.model.rows}
        assert self.table.evict(torch.tensor(ids)) == len(had)
        self.model.evict(had)
        self.num_evicted += len(had)

    @rule(reopens=st.booleans())
    def commit(self, reopens: bool) -> None:
        version = self.store.commit()
        self.committed[version] = self.model.copy(), self.oracle_store.commit()
        if reopens:
            self.reopen()
            self.check()

    @rule(calls=st.integers(0, 3), is_repeated=st.booleans())
    def commit_on_a_full_disk(self, calls: int, is_repeated: bool) -> None:
        """After so many writes; then perhaps once more, with room."""
        cold: Any = self.store._cold
        write, left = cold.write, iter(range(calls))

        def fails(*arguments: Any, **options: Any) -> None:
            if next(left, None) is None:
                raise DiskFullError("no space left")
            write(*arguments, **options)

        cold.write = fails
        try:
            self.commit(False)
        except DiskFullError:
            pass
        finally:
            del cold.write
        if is_repeated:
            self.commit(True)

    @precondition(lambda self: not self.is_deferred)
    @rule(more=st.integers(1, 30))
    def grow(self, more: int) -> None:
        self.commit(False)
        self.take(self.store.change_table("item", num_embeddings=self.model.capacity + more))
        for model in (self.model, *(model for model, _ in self.committed.values())):
            model.capacity += more

    @precondition(lambda self: not self.is_deferred)
    @rule(asked=drawn(DynamicIds), more=st.integers(0, 30))
    def change_rules(self, asked: DynamicIds, more: int) -> None:
        """As far as what is stored means the same by them."""
        self.commit(False)
        before, after = self.model.rules, asked
        if isinstance(before.admission, Frequency) != isinstance(asked.admission, Frequency):
            after = replace(after, admission=before.admission)
        elif isinstance(asked.admission, Frequency):
            candidates = before.num_candidates(self.model.capacity) + more
            after = replace(after, admission=Frequency(asked.admission.times, candidates))
        if asked.eviction.scores != before.eviction.scores:
            after = replace(after, eviction=before.eviction)
        if after != asked and asked.num_candidates(self.model.capacity) < before.num_candidates(self.model.capacity):
            with pytest.raises(ValueError, match="cannot follow"):
                self.store.change_table("item", ids=asked)
        self.take(self.store.change_table("item", ids=after))
        for model in (self.model, *(model for model, _ in self.committed.values())):
            model.rules = after

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        version = data.draw(st.sampled_from(self.store.versions))
        self.store.rollback(version)
        self.go_to(version)

    @precondition(lambda self: self.committed)
    @rule()
    def reopen(self) -> None:
        """Without what was not committed, as after a kill."""
        self.store.close()
        self.open(self.table.config)
        self.go_to(self.store.version)

    def go_to(self, version: int) -> None:
        model, of_oracle = self.committed[version]
        self.oracle_store.rollback(of_oracle)
        number, minute = self.model.next_number, self.model.minute
        self.model = model.copy()
        self.model.next_number, self.model.minute = number, minute
        for later in [each for each in self.committed if each > version]:
            del self.committed[later]

    @rule()
    def check(self) -> None:
        known = self.table.ids
        known.check_integrity()
        self.table.pool.tier.check_integrity()
        ids = [int(key) for part in self.table.written() for key in part]
        assert sorted(ids) == sorted(self.model.rows)
        assert known.scores_of(np.array(ids, np.int64)).tolist() == [self.model.rows[key].score for key in ids]
        stats, of_store = self.table.id_stats(), self.store.stats()
        assert of_store.ids == stats
        assert f"ids: rows {stats.rows:,}, candidates" in str(of_store)
        assert of_store.to_dict()["ids.evicted"] == stats.evicted
        assert (stats.rows, stats.candidates) == (len(self.model.rows), len(self.model.candidates))
        assert stats.evicted == self.num_evicted

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.oracle_store.close()
            shutil.rmtree(self.directory)
            self.few_slots.close()


def first_values(ids: list[int], dim: int = 33) -> torch.Tensor:
    """By a table that was never written."""
    with tierstore.open(cold="memory", ddr="2MiB") as store:
        config = tierstore.TableConfig(name="x", num_embeddings=1, embedding_dim=dim, init=INIT, ids=DynamicIds())
        return store.create_table(config).first_values(torch.tensor(ids, dtype=torch.long))


TestDynamicIds = DynamicIdsMachine.TestCase
TestDynamicIds.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_hundreds_of_programs() -> None:
    many = settings(max_examples=300, stateful_step_count=40, deadline=None, derandomize=False, database=None)
    run_state_machine_as_test(DynamicIdsMachine, settings=many)
