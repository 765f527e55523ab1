"""How well are devices balanced when a shard plan is run, by bytes moved and by learned costs?

A device is a store of its own on one thread, which looks up and updates all its parts by one collection. Costs are
fitted to lookups of other tables than those that are sharded.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.nn import KeyedJaggedTensor
from tierstore.plan import TableShape, Workload
from tierstore.plan.placement import (
    QUICK,
    Accuracy,
    CostModel,
    LinearCost,
    LookupShape,
    Measurement,
    Part,
    ShardPlan,
    Timing,
    accuracy,
    fit_cost,
    measure_costs,
    measure_lookups,
    shard,
)
from tierstore.plan.placement.shapes import Shapes
from tierstore.plan.placement.splitting import SplitKind
from tierstore.plan.placement.timing import draw_bags, store_of

__all__ = ["MeasuredPlan", "ShardingResult", "measure_sharding", "rmc_mix"]

_BUDGET: Final = 1 << 40
_STEPS: Final = 15


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """One plan, and the seconds of a step of each device as it was run.

    Attributes:
        model: which costs the plan was made by.
        balance: of the measured seconds, the largest over the mean.
        slowest_s: what a step would take.
        total_s: of all devices; splits and fixed costs add to it.
    """

    model: str
    num_devices: int
    parts: int
    split_tables: int
    predicted_s: list[float]
    measured_s: list[float]
    predicted_balance: float
    balance: float
    slowest_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class ShardingResult:
    """
    Attributes:
        num_fitted: lookups that the models were fitted to.
        fit_s: seconds that timing them took.
        held_out: each model's error on the tables that are sharded, timed one by one, calls included.
        cross_validated: the learned model's own.
    """

    num_fitted: int
    fit_s: float
    linear: LinearCost
    cross_validated: Accuracy
    held_out: dict[str, Accuracy]
    plans: list[MeasuredPlan]


class _Known:
    """The costs of whole tables as they were timed one by one: what a model of such costs can reach at best."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._seconds = {each.shape: each.seconds for each in measurements}

    def seconds(self, shapes: Sequence[LookupShape]) -> NDArray[np.float64]:
        return np.array([self._seconds[shape] for shape in shapes])


def rmc_mix(count: int, *, seed: int, quick: bool) -> Workload:
    """Random tables like those of the published models RMC1 to RMC3: 50 thousand to 4 million rows, 16 to 128 columns,
    1 to 120 ids a bag, and exponents of 0.6 to 1.3; one batch of 256 samples."""
    generator = np.random.default_rng(seed)
    low, high = (200, 2000) if quick else (50_000, 4_000_000)
    most_bytes = 192 << 20
    tables = []
    for number in range(count):
        dim = int(generator.choice([16, 32, 64, 128]))
        rows = int(low * (high / low) ** generator.random())
        ids = float(np.round(120 ** generator.random(), 1))
        exponent = round(float(generator.uniform(0.6, 1.3)), 2)
        shape = {"num_embeddings": min(rows, most_bytes // (4 * dim)), "embedding_dim": dim}
        tables.append(TableShape(name=f"t{number}", pooling_factor=ids, exponent=exponent, **shape))
    batch = 8 if quick else 256
    return Workload(name="mix", tables=tuple(tables), batch_samples=batch, optimizer="rowwise_adagrad")


def measure_sharding(folder: Path, *, quick: bool, seed: int = 0) -> ShardingResult:
    """Some five minutes; quick: some seconds, and the figures say nothing.

    Args:
        folder: for stores that are removed again.
    """
    timing = QUICK if quick else Timing(seed=seed)
    begin = time.perf_counter()
    measurements = measure_costs(folder, timing=dataclasses.replace(timing, seconds=60.0))
    fit_s = time.perf_counter() - begin
    workload = rmc_mix(6 if quick else 40, seed=seed + 1, quick=quick)
    shapes = Shapes(workload)
    alone = measure_lookups(shapes.lookups(shapes.whole()), folder, timing=dataclasses.replace(timing, seconds=600.0))
    linear, learned = LinearCost.fit(measurements), fit_cost(measurements)
    models: dict[str, CostModel] = {
        "bytes moved": LinearCost(bytes_per_s=linear.bytes_per_s), "linear": linear, "learned": learned,
    }  # fmt: skip
    calls = np.array([each.call_s for each in alone])
    measured = calls + [each.seconds for each in alone]
    held_out = {
        name: accuracy(calls + model.seconds([each.shape for each in alone]), measured)
        for name, model in models.items()
    }
    models["timed"] = _Known(alone)
    plans = [
        _run(name, _plan(workload, model, devices, whole=name == "timed"), workload, folder, timing)
        for devices in ((2, 3) if quick else (4, 8))
        for name, model in models.items()
    ]
    return ShardingResult(
        num_fitted=len(measurements), fit_s=fit_s, linear=linear, cross_validated=learned.cross_validated,
        held_out=held_out, plans=plans,
    )  # fmt: skip


def _plan(workload: Workload, model: CostModel, devices: int, *, whole: bool) -> ShardPlan:
    allow: tuple[SplitKind, ...] = ("table",) if whole else ("table", "row", "column")
    return shard(workload, num_devices=devices, budget_bytes=_BUDGET, cost_model=model, allow=allow)


def _run(name: str, plan: ShardPlan, workload: Workload, folder: Path, timing: Timing) -> MeasuredPlan:
    own = [[part for part in plan.parts if part.device == device] for device in range(plan.num_devices)]
    measured = [_device_seconds(parts, workload, folder, timing) for parts in own]
    return MeasuredPlan(
        model=name,
        num_devices=plan.num_devices,
        parts=len(plan.parts),
        split_tables=len(plan.split_tables),
        predicted_s=plan.device_costs_s.tolist(),
        measured_s=measured,
        predicted_balance=plan.balance,
        balance=max(measured) / statistics.mean(measured),
        slowest_s=max(measured),
        total_s=sum(measured),
    )


def _device_seconds(parts: Sequence[Part], workload: Workload, folder: Path, timing: Timing) -> float:
    """The median of steps: a lookup of all parts by one collection, forward and backward."""
    if not parts:
        return 0.0
    tables, shapes = [], []
    by_name = {table.name: table for table in workload.tables}
    for number, part in enumerate(parts):
        whole = by_name[part.table]
        share = part.num_rows / whole.num_embeddings
        table = dataclasses.replace(
            whole, name=f"p{number}", num_embeddings=part.num_rows, embedding_dim=part.num_columns,
            pooling_factor=whole.pooling_factor * share,
        )  # fmt: skip
        size = 4 * part.num_columns
        tables.append(table)
        shapes.append(
            LookupShape(
                part.num_rows, part.num_columns, table.pooling_factor, workload.batch_samples, whole.exponent, size
            )
        )
    generator = np.random.default_rng(timing.seed)
    batches = [_features(tables, shapes, generator) for _ in range(timing.batches)]
    with tempfile.TemporaryDirectory(dir=folder) as directory, store_of(tables, directory, timing) as store:
        collection = tierstore.TieredEmbeddingBagCollection(store)
        for features in batches:
            _step(collection, features, timing)
        steps = range(_STEPS)
        return statistics.median(_step(collection, batches[step % len(batches)], timing) for step in steps)


def _features(
    tables: Sequence[TableShape], shapes: Sequence[LookupShape], generator: np.random.Generator
) -> KeyedJaggedTensor:
    bags = [draw_bags(generator, shape) for shape in shapes]
    lengths = torch.cat([torch.diff(each.offsets) for each in bags])
    return KeyedJaggedTensor([table.name for table in tables], torch.cat([each.ids for each in bags]), lengths=lengths)


def _step(collection: tierstore.TieredEmbeddingBagCollection, features: KeyedJaggedTensor, timing: Timing) -> float:
    clock = timing.clock
    start = clock()
    values = collection(features).values()
    middle = clock()
    gradient = torch.ones_like(values)
    again = clock()
    values.backward(gradient)
    return middle - start + clock() - again
