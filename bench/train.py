"""Is a fused training step over rows in memory as fast as FBGEMM's, and faster than torch's modules?

Forward, backward and optimizer of the tables alone, same ids, same gradient, the same threads open to all.
"""

import contextlib
import os
import statistics
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import tierstore

from .common import Goal, Report, Run, Spread, Table, fresh_folder, measure, per_second, start
from .peers import fbgemm
from .workload import Batches, make_store

__all__ = ["run"]

OURS: Final = "tierstore"
DEFERRED: Final = "tierstore, backward and then store.optimizer().step()"
CLIPPED: Final = "the same with clip_grad_norm_ between"
FBGEMM: Final = "FBGEMM, table-batched"
TORCH: Final = "torch.nn.EmbeddingBag, sparse"
COPY: Final = "copying the bytes of the distinct rows"
_RULES: Final = {"SGD": "EXACT_SGD", "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD"}
_SHAPE: Final = ("tables", "rows", "dim", "ddr")


class _Ours:
    """tierstore's tables; ``finish`` is given the optimizer of a step that backward deferred, None where none is."""

    def __init__(
        self, store: tierstore.Store, batches: Batches, gradient: Tensor, finish: Callable[[Any], object] | None = None
    ) -> None:
        self._store, self._gradient, self._finish = store, gradient, finish
        self._module = tierstore.TieredEmbeddingBagCollection(store)
        self._features = [batches.jagged(index) for index in range(batches.count)]
        self._optimizer = store.optimizer() if finish else None

    @property
    def weights(self) -> list[Tensor]:
        return [table.read(torch.arange(table.config.num_embeddings)) for table in self._store.tables.values()]

    def step(self, index: int) -> None:
        self._module(self._features[index]).values().backward(self._gradient)
        if self._finish and self._optimizer:
            self._finish(self._optimizer)
            self._optimizer.step()
            self._optimizer.zero_grad()


class _Torch:
    """``torch.nn.EmbeddingBag`` for each table, sparse gradients, one of torch's optimizers that take them."""

    def __init__(
        self, weights: list[Tensor], name: str, config: dict[str, Any], batches: Batches, gradient: Tensor
    ) -> None:
        self._modules = [
            torch.nn.EmbeddingBag.from_pretrained(each.clone(), freeze=False, mode="sum", sparse=True)
            for each in weights
        ]
        parameters = [module.weight for module in self._modules]
        if name == "SGD":
            self._optimizer: Any = torch.optim.SGD(parameters, lr=config["lr"])
        else:
            self._optimizer = torch.optim.Adagrad(parameters, lr=config["lr"], eps=config["eps"])
        self._batches, self._gradients = batches, torch.split(gradient, config["dim"], dim=1)

    @property
    def weights(self) -> list[Tensor]:
        return [module.weight.detach() for module in self._modules]

    def step(self, index: int) -> None:
        self._optimizer.zero_grad()
        for table, (module, gradient) in enumerate(zip(self._modules, self._gradients, strict=True)):
            module(*self._batches.of_table(index, table)).backward(gradient)
        self._optimizer.step()


def _copy(batches: Batches, config: dict[str, Any]) -> Callable[[], object]:
    """The least a step must move: each distinct row read for the forward, read and written for the update."""
    rows = statistics.mean(batches.unique(index) for index in range(batches.count))
    words = int(rows * config["dim"]) * 3 // 2
    source, target = torch.ones(words), torch.empty(words)
    return lambda: target.copy_(source)


def _distance(ours: list[Tensor], others: list[Tensor], name: str) -> float:
    """The largest difference of a weight after the same steps, which differ in the order of sums only."""
    worst = max(float((one - other).abs().max()) for one, other in zip(ours, others, strict=True))
    if not worst < 1e-3:
        raise RuntimeError(f"after the same steps {name} has weights that differ by {worst}")
    return worst


def _compare(request: Run, name: str, batches: Batches) -> tuple[dict[str, Spread], dict[str, float]]:
    """Lookups a second of each contender, and how far the peers' weights are from ours in the end."""
    config = request.config
    gradient = torch.randn(config["batch"], config["tables"] * config["dim"], generator=torch.manual_seed(0)) / 100
    adagrad = tierstore.optim.RowWiseAdagrad(lr=config["lr"], eps=config["eps"])
    rule = tierstore.optim.SGD(lr=config["lr"]) if name == "SGD" else adagrad
    # No gradient reaches the bound of what is clipped, as the peers clip none.
    ways: dict[str, Callable[[Any], object] | None] = {
        OURS: None, DEFERRED: lambda _: None, CLIPPED: lambda optimizer: optimizer.clip_grad_norm_(max_norm=1e9)
    }  # fmt: skip
    contenders: dict[str, Any] = {}
    index = 0

    def advance() -> None:
        nonlocal index
        index = (index + 1) % batches.count

    with contextlib.ExitStack() as stack:
        for number, (way, finish) in enumerate(ways.items()):
            path = stack.enter_context(fresh_folder(request.folder / f"train_store{number}"))
            store = stack.enter_context(make_store(path, optimizer=rule, **{key: config[key] for key in _SHAPE}))
            contenders[way] = _Ours(store, batches, gradient, finish)
        first = contenders[OURS].weights
        contenders[TORCH] = _Torch(first, name, config, batches, gradient)
        steps: dict[str, Callable[[int], object]] = {way: each.step for way, each in contenders.items()}
        if fbgemm.is_there():
            theirs = fbgemm.Fbgemm(first, optimizer=_RULES[name], lr=config["lr"], eps=config["eps"])
            contenders[FBGEMM] = theirs
            steps[FBGEMM] = lambda index: theirs.step(batches.values[index], batches.offsets, gradient)
        del first
        actions: dict[str, Callable[[], object]] = {"next batch": advance, COPY: _copy(batches, config)}
        for way, step in steps.items():
            actions[way] = lambda step=step: step(index)  # type: ignore[misc]
        seconds = measure(actions, repetitions=config["repetitions"], warm_up=batches.count)
        trained = contenders[OURS].weights
        # torch's Adagrad keeps an accumulator a column, not a row: another rule.
        far = {
            peer: _distance(trained, each.weights, peer)
            for peer, each in contenders.items()
            if peer != OURS and (name == "SGD" or peer != TORCH)
        }
    return {key: per_second(batches.lookups, seconds[key]) for key in (*contenders, COPY)}, far


def run(request: Run) -> Report:
    config = request.config
    keys = ("tables", "rows", "batch", "pooling_factor", "exponent", "seed")
    batches = Batches(**{key: config[key] for key in keys}, count=config["batches"])
    found = {name: _compare(request, name, batches) for name in _RULES}
    rates = {name: own for name, (own, _) in found.items()}
    goals, rows = [], []
    best_torch = max(by_name[TORCH].median for by_name in rates.values())
    for name, by_name in rates.items():
        own = by_name[OURS].median
        for contender, rate in by_name.items():
            spread = f"{rate.lowest / 1e6:.1f} - {rate.highest / 1e6:.1f}"
            rows.append([name, contender, f"{rate.median / 1e6:.1f} M", spread, f"{own / rate.median:.2f}"])
        value = round(own / by_name[DEFERRED].median, 3)
        goals.append(Goal(f"{name}: time of a deferred step over a fused one's", value, at_most=1.3))
        if FBGEMM in by_name:
            value = round(own / by_name[FBGEMM].median, 3)
            goals.append(Goal(f"{name}: lookups a second over FBGEMM's", value, at_least=1.0))
        goals.append(Goal(f"{name}: over the best of torch.nn.EmbeddingBag", round(own / best_torch, 3), at_least=1.5))
    unique, threads = int(np.mean([batches.unique(i) for i in range(batches.count)])), len(os.sched_getaffinity(0))
    title = f"training steps over {config['tables']} tables of {config['rows']:,} rows of {config['dim']}"
    columns = ["optimizer", "step by", "lookups/s", "lowest - highest", "tierstore is faster by"]
    notes = [
        f"Batches of {config['batch']:,} samples, {config['pooling_factor']} ids a bag, Zipf {config['exponent']}: "
        f"{batches.lookups:,} lookups of {unique:,} distinct rows a step; {config['repetitions']} repetitions in "
        f"turns. Every contender may use all {threads} threads. torch's Adagrad keeps an accumulator a column, a "
        "heavier rule. The copy is of as many bytes as a step must move at least: each distinct row read forward, then "
        "read and written by the update.",
        *([] if fbgemm.is_there() else ["FBGEMM is not there: `make peers` brings it."]),
    ]
    figures = {
        "lookups_per_s": rates,
        "largest_difference_of_a_weight": {name: far for name, (_, far) in found.items()},
        "distinct_rows_a_batch": unique,
        "threads": threads,
    }
    return Report([Table(title, columns, rows)], goals, notes, figures)


if __name__ == "__main__":
    start("train")
