"""Parts "unseen" and "known": predicted against measured on whole models, deferred optimizers, and tables over ranks.

Unseen workloads were chosen before they were run, and nothing of the planner was fitted to them. Known ones were unseen
once; the model of dense layers and of ranks was mended after them.
"""

import functools
import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.dist.placement import RankCosts
from tierstore.dist.placement.measure import measure_ranks
from tierstore.models import DLRM
from tierstore.plan import Host, Prediction, Setup, Workload, accesses_of
from tierstore.plan.demand import Demand
from tierstore.plan.dense import DenseWork, dlrm_work
from tierstore.plan.measure import measure
from tierstore.plan.model import predict
from tierstore.plan.prediction import in_words
from tierstore.plan.workload import OPTIMIZERS

from ..common import Goal, Run, Table
from ..parts import Part, Told
from ..sharded.ranks import run_ranks
from ..steps import StepWorkload, fill, jagged
from ..workload import CHUNK, ids_of
from .validation import (
    ROWS_FILE,
    Measured,
    as_cleaned,
    hit_rate_of,
    measured,
    newest_half,
    trace_of,
    warm_pages,
    workload_of,
)

__all__ = ["KNOWN", "UNSEEN"]

_DENSE: Final = 13
_CROSS_LAYERS, _CROSS_RANK = 2, 32


class _Case(NamedTuple):
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
    def rule(self) -> tierstore.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](lr=0.01)

    @property
    def dense(self) -> DenseWork:
        if not self.top_mlp:
            return DenseWork(0.0, 0.0, 0.0)
        return dlrm_work([self.dim] * self.tables, num_dense=_DENSE, **self.layers)

    @property
    def layers(self) -> dict[str, Any]:
        """Of ``models.DLRM``."""
        crossing = {"cross_layers": _CROSS_LAYERS, "cross_rank": _CROSS_RANK}
        return {
            "bottom_mlp": self.bottom_mlp, "top_mlp": self.top_mlp, "interaction": self.interaction, **crossing,
        }  # fmt: skip

    def workloads(self, seed: int) -> tuple[StepWorkload, list[StepWorkload]]:
        """Of all ranks together, and of each."""
        generator, size = np.random.default_rng(seed), self.batch * self.pooling_factor
        drawn = [
            ids_of(generator, self.rows, self.steps * self.ranks * size, self.exponent).reshape(self.steps, -1)
            for _ in range(self.tables)
        ]
        parts = [slice(rank * size, (rank + 1) * size) for rank in range(self.ranks)]
        return self._workload(drawn, slice(None)), [self._workload(drawn, part) for part in parts]

    def _workload(self, drawn: Sequence[Any], part: slice) -> StepWorkload:
        batches = [jagged([each[step, part] for each in drawn], self.pooling_factor) for step in range(self.steps)]
        return StepWorkload(self.name, [self.rows] * self.tables, self.dim, batches)


def _step_of(case: _Case, store: Any, module: torch.nn.Module, wrapped: Callable[..., Any]) -> Callable[[Any], None]:
    """A training step, given its batch."""
    rows = store.optimizer() if case.deferred else None
    if not case.top_mlp:
        gradient = torch.full((case.batch, case.tables * case.dim), 1e-3)
        return lambda batch: module(batch).values().backward(gradient)
    torch.manual_seed(1)
    model = wrapped(DLRM(module, num_features=case.tables, embedding_dim=case.dim, **case.layers))
    rule = torch.optim.SGD([each for name, each in model.named_parameters() if "embeddings." not in name], lr=0.01)
    dense, labels = torch.randn(case.batch, _DENSE), torch.rand(case.batch).round()

    def step(batch: Any) -> None:
        rule.zero_grad()
        if rows is not None:
            rows.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(dense, batch), labels).backward()  # type: ignore[no-untyped-call]
        rule.step()
        if rows is not None:
            rows.step()

    return step


# Runs


class _Run(NamedTuple):
    """One budget in one round.

    Attributes:
        sent_bytes: a step, of a rank; None of one.
    """

    measured: Measured
    sent_bytes: float | None = None


def _budget_of(workload: Workload, percent: float) -> int:
    return int(workload.table_bytes * percent / 100)


def _alone(path: Path, case: _Case, own: StepWorkload, budget: int, config: dict[str, Any]) -> _Run:
    warm_pages(path / ROWS_FILE)
    with tierstore.open(path, mode="w", ddr=budget, policy=config["policy"], threads=config["threads"]) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = _step_of(case, store, module, lambda model: model)
        return _Run(measured(budget, store, module, step, own.batches, config["depth"]))


def _in_rank(
    fields: dict[str, Any], budgets: list[int], path: Path, config: dict[str, Any]
) -> tuple[RankCosts, list[_Run]]:
    """What steps over ranks cost here, and of this rank a run of each budget of all ranks."""
    case = _Case(**fields)
    _, workloads = case.workloads(config["seed"])
    own = workloads[dist.get_rank()]
    costs = measure_ranks(optimizer=case.optimizer, seconds=config["unseen_rank_seconds"])
    runs = []
    with open_sharded(path, ddr="256MiB", threads=1) as store:
        _write_all(store, case)
    for budget in budgets:
        ddr = budget // case.ranks
        with open_sharded(path, ddr=ddr, policy=config["policy"], threads=1) as store:
            warm_pages(store.local.directory / ROWS_FILE)
            module = ShardedTieredEmbeddingBagCollection(store)
            step = _step_of(case, store, module, data_parallel)
            before = store.ranks.traffic.bytes_sent
            found = measured(ddr, store.local, module, step, own.batches, config["depth"])
            sent = (store.ranks.traffic.bytes_sent - before) / len(own.batches)
            runs.append(_Run(found, sent))
    return costs, runs


def _write_all(store: ShardedStore, case: _Case) -> None:
    for number in range(case.tables):
        config = tierstore.TableConfig(
            name=f"t{number}", feature_names=(f"f{number}",), num_embeddings=case.rows, embedding_dim=case.dim,
            pooling="sum", optimizer=case.rule,
        )  # fmt: skip
        owned = store.create_table(config, sharding_type="row_wise", ranks=range(case.ranks)).local
        for first in range(owned.rows.start, owned.rows.stop, CHUNK):
            ids = torch.arange(first, min(first + CHUNK, owned.rows.stop))
            owned.write(ids, torch.full((len(ids), case.dim), 0.01))
    store.commit()


# Predictions


def _predicted(
    subject: "_Subject", host: Host, rank_costs: RankCosts | None, budget: int, run: _Run, config: dict[str, Any]
) -> Prediction:
    setup = Setup(
        workload=subject.shape,
        host=host,
        ddr_bytes=budget,
        page_cache_bytes=config["page_cache_gib"] * 2**30,
        policy=config["policy"],
        prefetch_depth=config["depth"],
        threads=config["threads"],
        rank_costs=rank_costs,
    )
    return predict(as_cleaned(setup, subject.demand, run.measured.rows_moved), subject.demand)


class _Subject(NamedTuple):
    """A workload, ready to be run again and again."""

    case: _Case
    own: StepWorkload
    shape: Workload
    demand: Demand
    path: Path

    @classmethod
    def made(cls, case: _Case, path: Path, config: dict[str, Any]) -> "_Subject":
        whole, (own, *_) = case.workloads(config["seed"])
        shape = workload_of(whole, case.exponent, case.optimizer, case.dense)
        demand = Demand.from_accesses(shape, accesses_of(trace_of(whole)), config["policy"], make_curve=newest_half)
        if case.ranks == 1:
            fill(path, own, case.rule)
        return cls(case, own, shape, demand, path)

    def round(self, host: Host, config: dict[str, Any]) -> list[tuple[_Run, Prediction]]:
        """A run of each budget, and what is predicted of it."""
        case = self.case
        budgets = [_budget_of(self.shape, percent) for percent in case.budgets]
        if case.ranks == 1:
            runs, rank_costs = [_alone(self.path, case, self.own, budget, config) for budget in budgets], None
        else:
            shutil.rmtree(self.path, ignore_errors=True)
            of_ranks = run_ranks(_in_rank, case.ranks, case._asdict(), budgets, self.path, config)
            runs = [_mean([run[number] for _, run in of_ranks]) for number in range(len(budgets))]
            rank_costs = of_ranks[0][0]
        pairs = zip(budgets, runs, strict=True)
        found = [_predicted(self, host, rank_costs, budget, run, config) for budget, run in pairs]
        for percent, run, prediction in zip(case.budgets, runs, found, strict=True):
            print(
                f"  {case.name}, {percent:g} %: hits {run.measured.hit_rate:.4f}, predicted "
                f"{hit_rate_of(prediction):.4f}; step {1e3 * run.measured.step_s:.2f} ms, predicted "
                f"{1e3 * prediction.step_s:.2f}",
                flush=True,
            )
        return list(zip(runs, found, strict=True))


def _mean(runs: Sequence[_Run]) -> _Run:
    """Of ranks."""
    sent = statistics.mean(run.sent_bytes or 0.0 for run in runs)
    figures = (statistics.mean(column) for column in zip(*(run.measured for run in runs), strict=True))
    return _Run(Measured(*figures), sent)


def _measure(request: Run, _figures: dict[str, Any], *, key: str) -> dict[str, Any]:
    config = request.config
    folder = request.folder / f"plan_{key}"
    folder.mkdir(parents=True, exist_ok=True)
    cases = [_Case(**(fields | config.get("unseen_changes", {}))) for fields in config[key]]
    subjects = [_Subject.made(case, folder / f"{number}", config) for number, case in enumerate(cases)]
    rounds: list[list[list[tuple[_Run, Prediction]]]] = []
    hosts: list[dict[str, float]] = []
    for _ in range(config[f"{key}_rounds"]):
        host = measure(request.folder, seconds=config["unseen_machine_seconds"])
        hosts.append({"flops": host.processor.flops, **vars(host.costs)})
        rounds.append([subject.round(host, config) for subject in subjects])
    shutil.rmtree(folder)
    points = [
        _plain(subject, percent, [of_round[number][place] for of_round in rounds])
        for number, subject in enumerate(subjects)
        for place, percent in enumerate(subject.case.budgets)
    ]
    return {"points": points, "cases": [case._asdict() for case in cases], "hosts": hosts}


def _plain(subject: _Subject, percent: float, of_rounds: list[tuple[_Run, Prediction]]) -> dict[str, Any]:
    """Medians of the rounds, of what was measured and of what was predicted."""
    runs = sorted((run for run, _ in of_rounds), key=lambda run: run.measured.step_s)
    predictions = sorted((found for _, found in of_rounds), key=lambda found: found.step_s)
    run, found = runs[len(runs) // 2], predictions[len(predictions) // 2]
    loads = {load.resource: load for load in found.loads}
    ring = 2 * (subject.case.ranks - 1) / subject.case.ranks * subject.shape.dense_flops / 2 * 4
    return {
        "workload": subject.case.name,
        "budget_percent": percent,
        **run.measured._asdict(),
        "sent_bytes": run.sent_bytes,
        "step_s_of_rounds": [each.measured.step_s for each, _ in of_rounds],
        "predicted_hit_rate": hit_rate_of(found),
        "predicted_step_s": found.step_s,
        "predicted_step_s_of_rounds": [each.step_s for _, each in of_rounds],
        "predicted_sent_bytes": loads["network"].amount - ring + loads["id exchange"].amount,
        "bottleneck": found.bottleneck,
        "loads": {name: load.seconds for name, load in loads.items()},
    }


def _tell(figures: dict[str, Any], *, key: str, title: str, note: str) -> Told:
    points = figures["points"]
    hits = [100 * abs(each["predicted_hit_rate"] - each["hit_rate"]) for each in points]
    times = [100 * abs(each["predicted_step_s"] / each["step_s"] - 1) for each in points]
    rows = []
    for each in points:
        sent = each["sent_bytes"]
        rows.append(
            [
                each["workload"], f"{each['budget_percent']:g} %", f"{each['hit_rate']:.2%}",
                f"{each['predicted_hit_rate']:.2%}", f"{1e3 * each['step_s']:.1f}",
                f"{1e3 * each['predicted_step_s']:.1f}", f"{each['predicted_step_s'] / each['step_s'] - 1:+.0%}",
                in_words(each["bottleneck"]),
                "" if sent is None else f"{sent / 2**20:.2f}, {each['predicted_sent_bytes'] / 2**20:.2f}",
            ]
        )  # fmt: skip
    columns = [
        "workload", "DDR", "hits measured", "predicted", "step ms measured", "predicted", "off", "bottleneck",
        "MiB a rank sends for tables, measured and predicted",
    ]  # fmt: skip
    return Told(
        tables=[Table(title=title, columns=columns, rows=rows)],
        goals=[
            Goal(name=f"{key}: points the predicted hit rate is off, on average", value=_rounded(hits), at_most=1),
            Goal(name=f"{key}: % the predicted step time is off, on average", value=_rounded(times), at_most=15),
        ],
        notes=[note],
    )


def _rounded(errors: Sequence[float]) -> float:
    return round(statistics.mean(errors), 3)


def _part(key: str, title: str, note: str) -> Part:
    return Part(
        functools.partial(_measure, key=key), functools.partial(_tell, key=key, title=title, note=note)
    )  # fmt: skip


UNSEEN: Final = _part(
    "unseen",
    "workloads that nothing was fitted to",
    "Unseen: the workloads were fixed before they were first run, and bench/plan.toml has them.",
)
KNOWN: Final = _part(
    "known",
    "whole models that were looked at",
    "Known: these were the unseen workloads before; dense layers, ranks and threads are modelled since.",
)
