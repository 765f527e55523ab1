"""Training runs of ``bench.plan``: whole models, deferred optimizers, tables over ranks."""

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.dist.placement import RankCosts
from tierstore.dist.placement.measure import measure_ranks
from tierstore.models import DLRM
from tierstore.optim.configs import RULES
from tierstore.plan.measure import page_cache
from tierstore.plan.workload import DenseWork, dlrm_work
from tierstore.trace import TableTrace, Trace

from .sharded.ranks import run_ranks
from .steps import StepWorkload, fill, jagged, timed
from .workload import CHUNK, ids_of

__all__ = ["Case", "Measured", "PlannedRun"]

_ROWS_FILE: Final = "rows.lmdb"
_DENSE: Final = 13
_CROSSING: Final = {"cross_layers": 2, "cross_rank": 32}


class Case(NamedTuple):
    """A workload; ``batch``: samples of a rank. ``bottom_mlp``, ``top_mlp``: of a DLRM, of tables alone both empty."""

    name: str
    tables: int
    rows: int
    dim: int
    pooling_factor: int
    exponent: float
    batch: int
    steps: int
    optimizer: Any
    deferred: bool
    ranks: int
    interaction: Literal["dot", "dcn"]
    bottom_mlp: Sequence[int]
    top_mlp: Sequence[int]
    budgets: Sequence[float]

    @property
    def table_names(self) -> list[str]:
        return [f"t{number}" for number in range(self.tables)]

    @property
    def rule(self) -> tierstore.optim.Optimizer:
        return RULES[self.optimizer](lr=0.01)

    @property
    def layers(self) -> dict[str, Any]:
        """Of ``models.DLRM``."""
        own = {"bottom_mlp": self.bottom_mlp, "top_mlp": self.top_mlp, "interaction": self.interaction}
        return own | _CROSSING

    @property
    def dense(self) -> DenseWork:
        if not self.top_mlp:
            return DenseWork(0.0, 0.0, 0.0)
        return dlrm_work([self.dim] * self.tables, num_dense=_DENSE, **self.layers)

    def drawn(self, seed: int) -> list[Any]:
        """int64 [steps, ids of all ranks] of each table."""
        generator, size = np.random.default_rng(seed), self.ranks * self.batch * self.pooling_factor
        count = self.steps * size
        return [ids_of(generator, self.rows, count, self.exponent).reshape(-1, size) for _ in range(self.tables)]

    def batches(self, seed: int, rank: int) -> StepWorkload:
        """Of one rank."""
        size, drawn = self.batch * self.pooling_factor, self.drawn(seed)
        own = slice(rank * size, (rank + 1) * size)
        batches = [jagged([each[step, own] for each in drawn], self.pooling_factor) for step in range(self.steps)]
        return StepWorkload(self.name, [self.rows] * self.tables, self.dim, batches)

    def step(self, store: Any, module: torch.nn.Module, wrapped: Callable[..., Any]) -> Callable[[Any], None]:
        """A training step, given its batch."""
        rows = store.optimizer() if self.deferred else None
        if not self.top_mlp:
            gradient = torch.full((self.batch, self.tables * self.dim), 1e-3)
            return lambda batch: module(batch).values().backward(gradient)
        torch.manual_seed(1)
        model = wrapped(DLRM(module, num_features=self.tables, embedding_dim=self.dim, **self.layers))
        rule = torch.optim.SGD([each for name, each in model.named_parameters() if "embeddings." not in name], lr=0.01)
        rules = [rule, rows] if rows is not None else [rule]
        dense, labels = torch.randn(self.batch, _DENSE), torch.rand(self.batch).round()

        def step(batch: Any) -> None:
            for each in rules:
                each.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(model(dense, batch), labels).backward()  # type: ignore[no-untyped-call]
            for each in rules:
                each.step()

        return step


class Measured(NamedTuple):
    """One run with one budget: means over the steps that counted.

    Attributes:
        sent_bytes: a step, of a rank; None of one.
    """

    hit_rate: float
    step_s: float
    rows_read: float
    pages_read: float
    rows_written: float
    rows_moved: float
    sent_bytes: float | None = None


def _measured(
    store: tierstore.Store, module: Any, step: Callable[[Any], None], batches: list[Any], depth: int
) -> Measured:
    """Train on the first half of the batches; means over the second.

    What the first half wrote is on its way to the device when the second begins, and what the second wrote when it
    ends: as at any moment of a long run.
    """
    half = len(batches) // 2
    with contextlib.closing(timed(module, step, batches[:half], depth)) as before:
        for _ in before:
            pass
    began, start = store.stats(), time.perf_counter()
    steps = len(list(timed(module, step, batches[half:], depth)))
    seconds, ended = time.perf_counter() - start, store.stats()
    page = next(iter(store.tables.values())).layout.page_bytes
    unique = ended.ddr.unique - began.ddr.unique
    return Measured(
        (ended.ddr.hits - began.ddr.hits) / max(unique, 1),
        seconds / steps,
        (ended.ssd.lookups - began.ssd.lookups) / steps,
        (ended.ssd.bytes_read - began.ssd.bytes_read) / page / steps,
        (ended.ssd.rows_written - began.ssd.rows_written) / steps,
        (ended.ssd.rows_moved - began.ssd.rows_moved) / steps,
    )


class PlannedRun:
    """A workload over its store, in this process or in ranks."""

    def __init__(self, case: Case, path: Path, config: dict[str, Any]) -> None:
        self._case, self._path, self._config = case, path, config
        self._own = case.batches(config["seed"], 0)
        if case.ranks == 1:
            fill(path, self._own, case.rule)

    @property
    def trace(self) -> Trace:
        """What all ranks look up."""
        case = self._case
        bags = case.steps * case.ranks * case.batch
        offsets = np.arange(0, bags * case.pooling_factor + 1, case.pooling_factor)
        drawn = zip(case.table_names, case.drawn(self._config["seed"]), strict=True)
        tables = {name: TableTrace(ids.reshape(-1), offsets) for name, ids in drawn}
        return Trace(tables=tables, batch_samples=case.ranks * case.batch)

    def at(self, budgets: list[int]) -> tuple[list[Measured], RankCosts | None]:
        """A run of each budget, in bytes of all ranks; and what steps over ranks cost here, measured just before."""
        case = self._case
        if case.ranks == 1:
            return [self._alone(budget) for budget in budgets], None
        shutil.rmtree(self._path, ignore_errors=True)
        of_ranks = run_ranks(_in_rank, case.ranks, case._asdict(), budgets, self._path, self._config)
        runs = zip(*(runs for _, runs in of_ranks), strict=True)
        means = [Measured(*map(statistics.mean, zip(*of_budget, strict=True))) for of_budget in runs]
        return means, of_ranks[0][0]

    def _alone(self, budget: int) -> Measured:
        case, config = self._case, self._config
        page_cache.warm(self._path / _ROWS_FILE)
        settings: dict[str, Any] = {"ddr": budget, "policy": config["policy"], "threads": config["threads"]}
        with tierstore.open(self._path, mode="w", **settings) as store:
            module = tierstore.TieredEmbeddingBagCollection(store)
            step = case.step(store, module, lambda model: model)
            return _measured(store, module, step, self._own.batches, config["depth"])


def _in_rank(
    fields: dict[str, Any], budgets: list[int], path: Path, config: dict[str, Any]
) -> tuple[RankCosts, list[Measured]]:
    case = Case(**fields)
    batches = case.batches(config["seed"], dist.get_rank()).batches
    costs = measure_ranks(optimizer=case.optimizer, seconds=config["rank_seconds"])
    runs = []
    with open_sharded(path, ddr="256MiB", threads=1) as store:
        for name in case.table_names:
            table = tierstore.TableConfig(
                name=name, feature_names=(f"f{name[1:]}",), num_embeddings=case.rows, embedding_dim=case.dim,
                pooling="sum", optimizer=case.rule,
            )  # fmt: skip
            owned = store.create_table(table, sharding_type="row_wise", ranks=range(case.ranks)).local
            for ids in torch.split(torch.arange(owned.rows.start, owned.rows.stop), CHUNK):
                owned.write(ids, torch.full((len(ids), case.dim), 0.01))
        store.commit()
    for budget in budgets:
        with open_sharded(path, ddr=budget // case.ranks, policy=config["policy"], threads=1) as store:
            page_cache.warm(store.local.directory / _ROWS_FILE)
            module = ShardedTieredEmbeddingBagCollection(store)
            step = case.step(store, module, data_parallel)
            before = store.ranks.traffic.bytes_sent
            found = _measured(store.local, module, step, batches, config["depth"])
            sent = (store.ranks.traffic.bytes_sent - before) / len(batches)
            runs.append(found._replace(sent_bytes=sent))
    return costs, runs
