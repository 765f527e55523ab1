"""Curves beside stores that look the same batches up, by the stores' own counters.

Points off for each trace and policy: python -m bench.planning.beside_stores
"""

import bisect
import contextlib
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import tierstore
from tierstore.errors import BudgetError
from tierstore.layout import RowLayout
from tierstore.plan import accesses_of, once_a_batch
from tierstore.plan.curves import curve
from tierstore.store.budget import divide

from ..data import ROOT, find_criteo
from ..steps import StepWorkload, criteo
from ..workload import ids_of
from .validation import trace_of

__all__ = ["POLICIES", "StoreErrors", "errors_of", "looked_up", "one_table", "traces"]

Int64s = NDArray[np.int64]

POLICIES: Final = ("lru", "lfu", "tinylfu")
_DIM: Final = 4
_STEP_SECONDS: Final = 0.004
"""Of a step with batches brought in ahead, so that they are ahead."""
_LARGEST: Final = 0.6
"""Of the distinct rows."""
_LARGEST_BUDGET: Final = 2**32


@dataclass(frozen=True, kw_only=True)
class StoreErrors:
    """Of the curves of one policy and trace, at sizes from the largest batch's distinct rows on.

    Attributes:
        depth: batches brought in ahead, by the store and in the curve.
        sizes: rows that the stores had, beside the largest batch's distinct rows.
        hit_rates: of the stores, of the distinct rows of batches.
        points: hit rate of the curve less that of the store, in points, at each size.
    """

    trace: str
    policy: str
    depth: int
    largest_batch: int
    sizes: tuple[int, ...]
    hit_rates: tuple[float, ...]
    points: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Of the points off."""
        return float(np.abs(self.points).max())


def one_table(name: str, batches: Sequence[Int64s]) -> StepWorkload:
    """Batches of ids as lookups of one table, which has as many rows more: a store that has room for all evicts none.
    A batch is one sample, so that batches may have any number of ids."""
    rows = 2 * int(max(ids.max() for ids in batches)) + 2
    jagged = [
        tierstore.KeyedJaggedTensor(["f0"], torch.from_numpy(ids), lengths=torch.tensor([len(ids)])) for ids in batches
    ]
    return StepWorkload(name, [rows], _DIM, jagged)


def traces(config: dict[str, Any]) -> Iterator[StepWorkload]:
    """Small and large batches, equal ones and others; popularity that stays, drifts or is none."""
    count, rows = config["store_batches"], config["store_rows"]
    generator = np.random.default_rng(config["seed"])
    path = find_criteo()
    for batch in config["store_criteo_batches"] if path is not None else ():
        assert path is not None
        found = criteo(path, {"seed": 1, "criteo_batch": batch, "dim": _DIM}, count)
        yield found._replace(name=f"Criteo's lookups, {batch} samples")
    for size, exponent in ((40, 1.05), (2000, 1.05), (8000, 0.7)):
        ids = ids_of(generator, rows, size * count, exponent)
        yield one_table(f"Zipf {exponent}, {size:,} ids", list(ids.reshape(count, size)))
    ids = ids_of(generator, rows // 4, 1500 * count, 1.1)
    moving = (ids + np.arange(len(ids)) // 10) % rows
    yield one_table("Zipf 1.1, drifting, 1,500 ids", list(moving.reshape(count, 1500)))
    loop = np.arange(1000 * count) % (rows // 5) + rows
    mixed = np.where(generator.random(len(loop)) < 0.5, loop, ids_of(generator, rows, len(loop), 1.0))
    yield one_table("Zipf 1.0 and a scan, 1,000 ids", list(mixed.reshape(count, 1000)))
    ends = np.cumsum(np.maximum(1, generator.lognormal(6.5, 1.0, count).astype(np.int64)))
    ids = ids_of(generator, rows, int(ends[-1]), 1.0)
    yield one_table("Zipf 1.0, of 1 to many ids", np.split(ids, ends[:-1]))


class Looked(NamedTuple):
    """Of a store, after it looked all batches up; rows count once a batch."""

    capacity: int
    unique: int
    misses: int


def looked_up(
    workload: StepWorkload, capacity: int, policy: str, *, depth: int = 0, step: Callable[[Any], None] | None = None
) -> Looked:
    """Look batches up in a store of about so many rows.

    Args:
        depth: batches brought in ahead.
        step: what is done with the store before each lookup.
    """
    with tierstore.open(cold="memory", ddr="64MiB") as store:
        layout = _add_tables(store, workload)
    budget = _budget_of(workload, layout, capacity, policy)
    with tierstore.open(cold="memory", ddr=budget, policy=policy, threads=1) as store:
        _add_tables(store, workload)
        module = tierstore.TieredEmbeddingBagCollection(store)
        with torch.no_grad(), contextlib.closing(tierstore.prefetch(workload.batches, module, depth=depth)) as ahead:
            for batch in ahead:
                if step is not None:
                    step(store)
                module(batch)
        found = store.stats().ddr
        return Looked(found.capacity_rows, found.unique, found.misses)


def _add_tables(store: tierstore.Store, workload: StepWorkload) -> RowLayout:
    for number, rows in enumerate(workload.rows):
        options = {"feature_names": (f"f{number}",), "optimizer": tierstore.optim.SGD(lr=0.1)}
        shape = {"name": f"t{number}", "num_embeddings": rows, "embedding_dim": workload.dim}
        table = store.create_table(tierstore.TableConfig(**shape, **options))  # type: ignore[arg-type]
    return table.layout


def _budget_of(workload: StepWorkload, layout: RowLayout, capacity: int, policy: str) -> int:
    """The least that has room for so many rows."""
    rows, num_tables = {layout: sum(workload.rows)}, len(workload.rows)

    def rows_of(budget: int) -> int:
        try:
            return divide(budget, rows, num_tables=num_tables, policy=policy, given=budget).pools[layout].cached_rows
        except BudgetError:
            return 0

    return bisect.bisect_left(range(_LARGEST_BUDGET), capacity, key=rows_of)


def errors_of(workload: StepWorkload, policy: str, depth: int, num_sizes: int) -> StoreErrors:
    """At sizes evenly apart on a scale of logarithms, from the largest batch's rows on."""
    accesses = once_a_batch(accesses_of(trace_of(workload)))
    num_rows, largest = len(np.unique(accesses.keys)), int(np.diff(accesses.starts).max())
    asked = np.unique(np.geomspace(largest, max(largest, _LARGEST * num_rows), num_sizes).astype(np.int64))
    stores = [looked_up(workload, int(rows), policy, depth=depth, step=_slow if depth else None) for rows in asked]
    sizes = [each.capacity for each in stores]
    made = curve(accesses, policy, sizes=sizes, prefetch_depth=depth)
    rates = [1 - each.misses / len(accesses.keys) for each in stores]
    return StoreErrors(
        trace=workload.name,
        policy=policy,
        depth=depth,
        largest_batch=largest,
        sizes=tuple(sizes),
        hit_rates=tuple(rates),
        points=tuple(100 * (made.hit_rate(rows) - rate) for rows, rate in zip(sizes, rates, strict=True)),
    )


def _slow(_store: tierstore.Store) -> None:
    time.sleep(_STEP_SECONDS)


def _main() -> None:
    config = tomllib.loads((ROOT / "bench" / "plan.toml").read_text())
    for workload in traces(config):
        for policy in POLICIES:
            for depth in (0, 2):
                found = errors_of(workload, policy, depth, config["store_sizes"])
                points = np.abs(found.points)
                print(
                    f"{found.trace:<34} {policy:<8} ahead {depth}  mean {points.mean():.2f}  worst {points.max():.2f}  "
                    + " ".join(
                        f"{rows / found.largest_batch:.1f}:{each:+.2f}"
                        for rows, each in zip(found.sizes, found.points, strict=True)
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    _main()
