"""Is a fused training step over rows in memory as fast as FBGEMM's, and faster than torch's own modules?

Forward, backward and optimizer of the tables alone, same ids, same gradient, the same threads open to all.
"""

import os
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import tierstore

from .common import Goal, Report, Run, Spread, Table, measure, per_second, program
from .peers import fbgemm
from .workload import Batches, distance, make_store

__all__ = ["run"]

OURS: Final = "tierstore"
DEFERRED: Final = "tierstore, backward and then store.optimizer().step()"
CLIPPED: Final = "the same with clip_grad_norm_ between"
FBGEMM: Final = "FBGEMM, table-batched"
TORCH: Final = "torch.nn.EmbeddingBag, sparse"
COPY: Final = "copying the bytes of the distinct rows"
_RULES: Final = {"SGD": "EXACT_SGD", "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD"}


def _rule(name: str, config: dict[str, Any]) -> Any:
    if name == "SGD":
        return tierstore.optim.SGD(lr=config["lr"])
    return tierstore.optim.RowWiseAdagrad(lr=config["lr"], eps=config["eps"])


class _Ours:
    def __init__(self, path: Path, rule: Any, config: dict[str, Any], batches: Batches) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shape = {key: config[key] for key in ("tables", "rows", "dim", "ddr")}
        self.store = make_store(path, optimizer=rule, **shape)
        self._module = tierstore.TieredEmbeddingBagCollection(self.store)
        names = [f"f{table}" for table in range(config["tables"])]
        self._features = [
            tierstore.KeyedJaggedTensor(names, values, offsets=batches.offsets) for values in batches.values
        ]

    @property
    def weights(self) -> list[Tensor]:
        return [table.read(torch.arange(table.config.num_embeddings)) for table in self.store.tables.values()]

    def step(self, index: int, gradient: Tensor) -> None:
        self._module(self._features[index]).values().backward(gradient)


class _Deferred(_Ours):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._optimizer = self.store.optimizer()

    def step(self, index: int, gradient: Tensor) -> None:
        super().step(index, gradient)
        self._between()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _between(self) -> None:
        pass


class _Clipped(_Deferred):
    def _between(self) -> None:
        self._optimizer.clip_grad_norm_(max_norm=1e9)  # which no gradient reaches, as the peers clip none


class _Torch:
    """``torch.nn.EmbeddingBag`` for each table, sparse gradients, one of torch's optimizers that take them."""

    def __init__(self, weights: list[Tensor], name: str, config: dict[str, Any], batches: Batches) -> None:
        self._modules = [
            torch.nn.EmbeddingBag.from_pretrained(each.clone(), freeze=False, mode="sum", sparse=True)
            for each in weights
        ]
        parameters = [module.weight for module in self._modules]
        if name == "SGD":
            self._optimizer: Any = torch.optim.SGD(parameters, lr=config["lr"])
        else:
            self._optimizer = torch.optim.Adagrad(parameters, lr=config["lr"], eps=config["eps"])
        self._batches = batches

    @property
    def weights(self) -> list[Tensor]:
        return [module.weight.detach() for module in self._modules]

    def step(self, index: int, gradient: Tensor) -> None:
        self._optimizer.zero_grad()
        width = gradient.shape[1] // len(self._modules)
        for table, module in enumerate(self._modules):
            module(*self._batches.of_table(index, table)).backward(gradient[:, table * width : (table + 1) * width])
        self._optimizer.step()


def _copy(batches: Batches, config: dict[str, Any]) -> Callable[[], object]:
    """The least a step must move: each distinct row read for the forward, read and written for the update."""
    rows = statistics.mean(batches.unique(index) for index in range(batches.count))
    words = int(rows * config["dim"]) * 3 // 2
    source, target = torch.ones(words), torch.empty(words)
    return lambda: target.copy_(source)


def _same(ours: list[Tensor], others: list[Tensor], name: str) -> float:
    """The largest difference of a weight after the same steps, which differ in the order of sums only."""
    worst = distance(ours, others)
    if not worst < 1e-3:
        raise RuntimeError(f"after the same steps {name} has weights that differ by {worst}")
    return worst


def _compare(request: Run, name: str, batches: Batches) -> tuple[dict[str, Spread], dict[str, float]]:
    """Lookups a second of each contender, and how far the peers' weights are from ours in the end."""
    config = request.config
    gradient = torch.randn(config["batch"], config["tables"] * config["dim"], generator=torch.manual_seed(0)) / 100
    ours = _Ours(request.folder / "train_store", _rule(name, config), config, batches)
    deferred = _Deferred(request.folder / "deferred_store", _rule(name, config), config, batches)
    clipped = _Clipped(request.folder / "clipped_store", _rule(name, config), config, batches)
    start = ours.weights
    torchs = _Torch(start, name, config, batches)
    peers: dict[str, Any] = {DEFERRED: deferred, CLIPPED: clipped, TORCH: torchs}
    steps: dict[str, Callable[[int], object]] = {
        OURS: lambda index: ours.step(index, gradient),
        DEFERRED: lambda index: deferred.step(index, gradient),
        CLIPPED: lambda index: clipped.step(index, gradient),
        TORCH: lambda index: torchs.step(index, gradient),
    }
    if fbgemm.is_there():
        theirs = fbgemm.Fbgemm(start, optimizer=_RULES[name], lr=config["lr"], eps=config["eps"])
        peers[FBGEMM] = theirs
        steps[FBGEMM] = lambda index: theirs.step(batches.values[index], batches.offsets, gradient)
    del start
    turn = {"index": 0}

    def advance() -> None:
        turn["index"] = (turn["index"] + 1) % batches.count

    actions: dict[str, Callable[[], object]] = {"next batch": advance, COPY: _copy(batches, config)}
    for contender, step in steps.items():
        actions[contender] = lambda step=step: step(turn["index"])  # type: ignore[misc]
    measure(actions, repetitions=batches.count)
    seconds = measure(actions, repetitions=config["repetitions"])
    trained = ours.weights
    # torch's Adagrad keeps an accumulator a column, not a row: another rule.
    far = {
        peer: _same(trained, contender.weights, peer)
        for peer, contender in peers.items()
        if name == "SGD" or peer != TORCH
    }
    for each in (ours, deferred, clipped):
        each.store.close()
        shutil.rmtree(each.store.directory)
    return {key: per_second(batches.lookups, seconds[key]) for key in (OURS, *peers, COPY)}, far


def run(request: Run) -> Report:
    config = request.config
    keys = ("tables", "rows", "batch", "pooling_factor", "exponent", "seed")
    batches = Batches(**{key: config[key] for key in keys}, count=config["batches"])
    rates: dict[str, dict[str, Spread]] = {}
    far: dict[str, dict[str, float]] = {}
    for name in _RULES:
        rates[name], far[name] = _compare(request, name, batches)
    goals, rows = [], []
    best_torch = max(by_name[TORCH].median for by_name in rates.values())
    for name, by_name in rates.items():
        own = by_name[OURS].median
        for contender, rate in by_name.items():
            spread = f"{rate.lowest / 1e6:.1f} - {rate.highest / 1e6:.1f}"
            rows.append([name, contender, f"{rate.median / 1e6:.1f} M", spread, f"{own / rate.median:.2f}"])
        value = round(own / by_name[DEFERRED].median, 3)
        goals.append(Goal(name=f"{name}: time of a deferred step over a fused one's", value=value, at_most=1.3))
        if FBGEMM in by_name:
            value = round(own / by_name[FBGEMM].median, 3)
            goals.append(Goal(name=f"{name}: lookups a second over FBGEMM's", value=value, at_least=1.0))
        value = round(own / best_torch, 3)
        goals.append(Goal(name=f"{name}: over the best of torch.nn.EmbeddingBag", value=value, at_least=1.5))
    unique = int(np.mean([batches.unique(index) for index in range(batches.count)]))
    return Report(
        question="Is a fused training step over rows in memory as fast as FBGEMM's, and faster than torch's modules?",
        tables=[
            Table(
                title=f"training steps over {config['tables']} tables of {config['rows']:,} rows of {config['dim']}",
                columns=["optimizer", "step by", "lookups/s", "lowest - highest", "tierstore is faster by"],
                rows=rows,
            )
        ],
        figures={
            "lookups_per_s": {name: {key: asdict(rate) for key, rate in by.items()} for name, by in rates.items()},
            "largest_difference_of_a_weight": far,
            "distinct_rows_a_batch": unique,
            "threads": len(os.sched_getaffinity(0)),
        },
        goals=goals,
        notes=[
            f"Batches of {config['batch']:,} samples, {config['pooling_factor']} ids a bag, Zipf {config['exponent']}: "
            f"{batches.lookups:,} lookups of {unique:,} distinct rows a step; {config['repetitions']} repetitions in "
            f"turns. Every contender may use all {len(os.sched_getaffinity(0))} threads. torch's Adagrad keeps an "
            "accumulator for each column, a heavier rule. The copy is of as many bytes as a step must move at least: "
            "each distinct row read forward, then read and written by the update.",
            *([] if fbgemm.is_there() else ["FBGEMM is not there: `make peers` brings it."]),
        ],
    )


if __name__ == "__main__":
    sys.exit(program("train", run))
