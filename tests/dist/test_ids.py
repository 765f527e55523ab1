"""Dynamic ids over ranks: any number of ranks, one after another, and one process that works off their batches as one,
by a dict of ids and a table in memory that gives no row twice."""

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.ids.model import Model
from tests.ids.test_machine import INIT, first_values
from tierstore import optim
from tierstore.cli import entry as cli
from tierstore.dist import ShardedTieredEmbeddingBag, ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.errors import DiskFullError, TierstoreError
from tierstore.ids import LFU, LRU, TTL, DynamicIds, Frequency

from .ranks import run

DIM, SAMPLES = 12, 3
FEATURES = ["a1", "a2", "plain"]
RULE = optim.Adagrad(lr=0.5)
PLAIN = tierstore.TableConfig(name="plain", num_embeddings=50, embedding_dim=DIM, optimizer=RULE)


class Step(NamedTuple):
    """Of all ranks: what they do ("train", "pair" for two batches in flight, "read", "evict"), by a seed."""

    kind: str
    seed: int


class Stage(NamedTuple):
    """So many ranks, one after another on one folder, make steps; then they commit, or are as if killed."""

    ranks: int
    steps: list[Step]
    commits: bool = True
    depth: int = 0
    is_deferred: bool = False
    ddr: str = "2MiB"


class Case(NamedTuple):
    rules: DynamicIds
    rows: int
    exchange: str
    sharding_type: str
    stages: list[Stage]


def config(case: Case) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name="item", num_embeddings=case.rows, embedding_dim=DIM, feature_names=("a1", "a2"), init=INIT,
        optimizer=RULE, ids=case.rules,
    )  # fmt: skip


def spread(numbers: Any) -> list[int]:
    return [(int(n) * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63 for n in numbers]


def batch(rank: int, ranks: int, seed: int) -> tuple[list[list[int]], list[list[int]], Tensor]:
    """A rank's lengths and ids of each feature, and a gradient; some ranks have none in some steps. Sums of gradients,
    and of what they are divided by the number of ranks, are exact, so their order does not matter."""
    generator = np.random.default_rng([seed, rank])
    most = generator.integers(0, 12)
    lengths = [generator.integers(0, most + 1, SAMPLES).tolist() for _ in FEATURES]
    ids = [spread(generator.integers(0, 100, sum(own))) for own in lengths[:2]]
    ids.append(generator.integers(0, 50, sum(lengths[2])).tolist())
    gradient = ranks / 8 * torch.from_numpy(generator.integers(-20, 21, (SAMPLES, 3 * DIM)).astype(np.float32))
    return lengths, ids, gradient


def jagged(lengths: list[list[int]], ids: list[list[int]]) -> tierstore.KeyedJaggedTensor:
    flat = torch.tensor(list(chain(*ids)), dtype=torch.int64)
    return tierstore.KeyedJaggedTensor(FEATURES, flat, lengths=torch.tensor(list(chain(*lengths))))


def evicted(seed: int) -> list[int]:
    return spread(np.random.default_rng(seed).integers(0, 100, 10))


def seeds(step: Step) -> list[int]:
    return [step.seed, step.seed + 500][: 1 + (step.kind == "pair")]


def work(folder: Path, table: tierstore.TableConfig, how: Any, given: Any) -> list[Tensor]:
    rank, outs, stage = dist.get_rank(), [], Stage(*given)
    with open_sharded(folder, ddr=stage.ddr, threads=1) as store:
        for each in (table, PLAIN):
            if each.name not in store:
                store.create_table(each, **how)
        module = ShardedTieredEmbeddingBagCollection(store)
        optimizer = store.optimizer() if stage.is_deferred else None
        steps = [Step(*each) for each in stage.steps]
        batches = [[jagged(*batch(rank, stage.ranks, seed)[:2]) for seed in seeds(step)] for step in steps]
        for step, given in zip(steps, ahead(batches, module, stage.depth), strict=True):
            if step.kind == "evict":
                store["item"].local.evict(torch.tensor(evicted(step.seed)))
                continue
            with torch.set_grad_enabled(step.kind != "read"):
                found = [module(each).values() for each in given]
            outs += [each.detach().clone() for each in found]
            for out, seed in zip(found, seeds(step), strict=True):
                if step.kind != "read":
                    out.backward(batch(rank, stage.ranks, seed)[2])
                    if optimizer is not None:
                        optimizer.step()
                        optimizer.zero_grad()
        store["item"].local.ids.check_integrity()
        if stage.commits:
            store.commit()
        elif store.version:
            store.rollback(store.version)
    return outs


def ahead(batches: list[Any], module: Any, depth: int) -> Any:
    """Prefetched: all of them have one."""
    return (
        ([each] for each in tierstore.prefetch([own for (own,) in batches], module, depth=depth)) if depth else batches
    )


class Oracle:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Model(case.rules, case.rows)
        self.store = tierstore.open(cold="memory", ddr="4MiB", keep=50)
        whole = tierstore.TableConfig(
            name="item", num_embeddings=20_000, embedding_dim=DIM, feature_names=("a1", "a2"), optimizer=RULE
        )
        self.table = self.store.create_table(whole)
        self.store.create_table(tierstore.TableConfig(name="as ids", num_embeddings=1, embedding_dim=4))
        self.store.create_table(PLAIN)
        self.module = tierstore.TieredEmbeddingBagCollection(self.store, tables=["item", "plain"])
        self.committed = self.model.copy(), self.store.commit()

    def known(self, lengths: list[list[int]], ids: list[list[int]]) -> tierstore.KeyedJaggedTensor:
        """Of ids that have rows, the numbers."""
        kept, numbers = [], []
        for own, of_feature in zip(lengths[:2], ids[:2], strict=True):
            bags = np.split(np.array(of_feature, object), np.cumsum(own)[:-1])
            found = [[self.model.rows[key].number for key in bag if key in self.model.rows] for bag in bags]
            kept.append(list(map(len, found)))
            numbers.append(list(chain(*found)))
        return jagged([*kept, lengths[2]], [*numbers, ids[2]])

    def admit(self, batches: list[Any], in_use: frozenset[int]) -> None:
        ids = [key for feature in range(2) for _, own, _ in batches for key in own[feature]]
        if new := self.model.train(ids, in_use):
            self.table.write(torch.tensor([self.model.rows[key].number for key in new]), first_values(new, DIM))

    def run(self, stage: Stage) -> list[list[Tensor]]:
        outs: list[list[Tensor]] = [[] for _ in range(stage.ranks)]
        for step in stage.steps:
            if step.kind == "evict":
                self.model.evict(set(evicted(step.seed)))
                continue
            passes, in_use = [], frozenset[int]()
            for seed in seeds(step):
                batches = [batch(rank, stage.ranks, seed) for rank in range(stage.ranks)]
                if step.kind != "read":
                    self.admit(batches, in_use)
                    in_use = frozenset(key for _, own, _ in batches for each in own[:2] for key in each)
                with torch.set_grad_enabled(step.kind != "read"):
                    found = [self.module(self.known(*each[:2])).values() for each in batches]
                for of_rank, out in zip(outs, found, strict=True):
                    of_rank.append(out.detach().clone())
                passes.append((found, [gradient / stage.ranks for *_, gradient in batches]))
            for found, gradients in passes:
                if step.kind != "read":
                    optimizer = self.store.optimizer()
                    for out, gradient in zip(found, gradients, strict=True):
                        out.backward(gradient)
                    optimizer.step()
        if stage.commits:
            self.committed = self.model.copy(), self.store.commit()
        else:
            number = self.model.next_number
            self.model = self.committed[0].copy()
            self.model.next_number = number
            self.store.rollback(self.committed[1])
        return outs

    def check(self, folder: Path) -> None:
        with tierstore.open(folder, mode="r", ddr="4MiB") as store:
            table, model = store["item"], self.model
            ids = [int(key) for part in table.written() for key in part]
            assert sorted(ids) == sorted(model.rows)
            numbers = torch.tensor([model.rows[key].number for key in ids], dtype=torch.int64)
            assert torch.equal(table.read(torch.tensor(ids, dtype=torch.int64)), self.table.read(numbers))
            assert torch.equal(table.read_state(torch.tensor(ids, dtype=torch.int64)), self.table.read_state(numbers))
            assert torch.equal(store["plain"].read(torch.arange(50)), self.store["plain"].read(torch.arange(50)))
            known = table.ids
            known.check_integrity()
            rows, candidates = known._known
            used = candidates.used_rows
            assert rows.scores(rows.find(np.array(ids, np.int64))).tolist() == [model.rows[key].score for key in ids]
            counted = dict(zip(candidates.ids[used].tolist(), (candidates.scores(used) & 255).tolist(), strict=True))
            assert counted == {key: min(seen, 255) for key, (seen, _) in model.candidates.items()}
            assert known._step == model.step


STEPS = st.builds(Step, st.sampled_from(["train"] * 6 + ["pair", "read", "evict"]), st.integers(0, 400))
ONLY_TRAIN = st.builds(Step, st.just("train"), st.integers(0, 400))


def stages(ranks: int) -> Any:
    ddr, commits = st.sampled_from(["2MiB", "500KiB"]), st.sampled_from([True, True, False])
    prefetched = st.builds(
        Stage, st.just(ranks), st.lists(ONLY_TRAIN, min_size=3, max_size=8), commits, st.just(2), st.booleans(), ddr
    )
    steps = st.lists(STEPS, min_size=4, max_size=12)
    return prefetched | st.builds(Stage, st.just(ranks), steps, commits, st.just(0), st.booleans(), ddr)


CASES = st.builds(
    Case,
    st.builds(
        DynamicIds,
        admission=st.none() | st.builds(Frequency, st.integers(2, 4), st.none() | st.integers(1, 40)),
        eviction=st.just(LRU()) | st.builds(LFU, st.none() | st.integers(1, 5)) | st.builds(TTL, st.integers(1, 20)),
    ),
    st.integers(1, 120),
    st.sampled_from(["rows", "rows", "pooled"]),
    st.sampled_from(["row_wise", "row_wise", "table_wise"]),
    st.tuples(*map(stages, (2, 2, 3, 1))).map(list),
)


@settings(max_examples=3, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_ranks_give_the_ids_and_bits_of_one_process(case: Case) -> None:
    oracle = Oracle(case)
    with tempfile.TemporaryDirectory() as folder:
        path, how = Path(folder, "store"), {"sharding_type": case.sharding_type, "exchange": case.exchange}
        for stage in case.stages:
            plain = tuple(stage._replace(steps=[tuple(step) for step in stage.steps]))  # type: ignore[misc]
            found = run(work, stage.ranks, Path(folder), path, config(case), how, plain)
            expected = oracle.run(stage)
            for rank in range(stage.ranks):
                for number, (out, wanted) in enumerate(zip(found[rank], expected[rank], strict=True)):
                    atol = 1e-6 * (case.exchange == "pooled")  # sums of owners' sums
                    assert torch.allclose(out, wanted, rtol=0, atol=atol), (rank, number)
            if oracle.committed[1] > 1:
                oracle.check(path)
        if oracle.committed[1] > 1:
            for target in (["--plain"], ["--ranks", "4"]):
                assert cli.main(["reshard", str(path), str(Path(folder, target[0])), *target]) == 0
                oracle.check(Path(folder, target[0]))


def fail() -> tuple[list[str], list[int], Tensor]:
    """What a rank met: an owner without space for a new row, an id without a row, and what parts refuse."""
    rank, met = dist.get_rank(), []
    made = replace(config(Case(DynamicIds(unseen="error"), 40, "rows", "row_wise", [])), feature_names=("item",))
    with open_sharded(cold="memory", ddr="2MiB", threads=1) as store:
        table = store.create_table(made).local
        module = ShardedTieredEmbeddingBag(store, "item")
        known: Any = table.ids
        own = torch.tensor([spread(range(10 * rank, 10 * rank + 10))])

        def full(*_: Any) -> None:
            raise DiskFullError("no space left")

        def met_by(work: Callable[[], object]) -> None:
            with pytest.raises((TierstoreError, ValueError)) as error:
                work()
            met.append(type(error.value).__name__)

        if rank == 1:
            known._insert = full
        met_by(lambda: module(own))
        known.__dict__.pop("_insert", None)
        out = module(own)
        out.sum().backward()
        with torch.no_grad():
            met_by(lambda: module(torch.tensor([spread([77])])))
            again = module(own)
        met_by(lambda: table.admit(own[0]))
        met_by(lambda: tierstore.TieredEmbeddingBag(table)(own))
        for kind in ("column_wise", "data_parallel"):
            refused: Any = {"sharding_type": kind}
            met_by(lambda refused=refused: store.create_table(replace(made, name="other"), **refused))  # type: ignore[misc]
        known.check_integrity()
        gc.collect()  # what failed is in cycles with its traceback
        assert not known.in_use
        return met, known.listed().tolist(), out.detach() - again


def test_what_one_owner_cannot_do_all_ranks_raise_and_may_repeat(tmp_path: Path) -> None:
    found = run(fail, 2, tmp_path)
    assert [each[0][0] for each in found] == ["RankError", "DiskFullError"]
    assert sorted(each[0][1] for each in found) == ["IdError", "RankError"]
    refused = ["TableError", "TableError", "ValueError", "ValueError"]
    assert [each[0][2:] for each in found] == [refused, refused]
    assert sorted(found[0][1] + found[1][1]) == sorted(spread(range(20)))
    assert all((out > 0).all() for *_, out in found), "all ids had rows, and were trained"
