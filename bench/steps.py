"""What training is measured on: tables, batches of ids for them, and a store in which every row was written."""

import contextlib
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tierstore
from tierstore.models import DLRM

from .data import criteo_keys, require_criteo
from .serving.shape import kaggle_rows
from .workload import Batches, ids_of, make_store


class StepWorkload(NamedTuple):
    """Tables, and batches of ids for them: one bag a sample and table."""

    name: str
    rows: Sequence[int]
    dim: int
    batches: list[tierstore.KeyedJaggedTensor]
    is_model: bool = False
    """With MLPs around the tables."""

    @property
    def table_bytes(self) -> int:
        """Of all rows, with the one accumulator that row-wise Adagrad keeps, in a cache."""
        return sum(self.rows) * (self.dim * 4 + 8)


def jagged(ids: Sequence[Any], pooling_factor: int) -> tierstore.KeyedJaggedTensor:
    values = torch.from_numpy(np.concatenate(ids))
    keys = [f"f{table}" for table in range(len(ids))]
    return tierstore.KeyedJaggedTensor(keys, values, offsets=torch.arange(0, len(values) + 1, pooling_factor))


def zipf(config: dict[str, Any], exponent: float, count: int) -> StepWorkload:
    shape = {name: config[name] for name in ("tables", "rows", "batch", "pooling_factor", "seed")}
    found = Batches(exponent=exponent, count=count, **shape)
    batches = [found.jagged(step) for step in range(count)]
    return StepWorkload(f"Zipf {exponent}", [config["rows"]] * config["tables"], config["dim"], batches)


def criteo(config: dict[str, Any], count: int) -> StepWorkload:
    """Criteo's lookups: ids hashed (scattered over each table), samples in an order of their own each epoch."""
    keys = criteo_keys(require_criteo())
    generator = np.random.default_rng(config["seed"])
    # A sample lists its columns in ascending order.
    columns, batch = keys >> 40, config["criteo_batch"]
    samples = np.cumsum(np.diff(columns, prepend=columns[0]) <= 0) - 1
    lookups, rows = np.full((int(samples[-1]) + 1, 26), -1), []
    for column in range(26):
        own = columns == column
        values, ids = np.unique(keys[own], return_inverse=True)
        lookups[samples[own], column] = generator.permutation(len(values))[ids]
        rows.append(len(values))
    batches: list[tierstore.KeyedJaggedTensor] = []
    while len(batches) < count:
        order = generator.permutation(len(lookups))
        batches += [_ragged(lookups[part]) for part in order[: len(order) // batch * batch].reshape(-1, batch)]
    return StepWorkload("Criteo's lookups", rows, config["dim"], batches[:count])


def _ragged(ids: NDArray[np.int64]) -> tierstore.KeyedJaggedTensor:
    """Bags of at most one id, from int64 [samples, features], -1 for none."""
    by_feature = ids.T
    keys = [f"f{feature}" for feature in range(len(by_feature))]
    lengths = torch.from_numpy((by_feature >= 0).reshape(-1).astype(np.int64))
    return tierstore.KeyedJaggedTensor(keys, torch.from_numpy(by_feature[by_feature >= 0]), lengths=lengths)


def kaggle(config: dict[str, Any], count: int) -> StepWorkload:
    generator = np.random.default_rng(config["seed"])
    rows = kaggle_rows(config)
    size = config["kaggle_batch"]
    drawn = [ids_of(generator, each, size * count, 1.05).reshape(count, size) for each in rows]
    batches = [jagged([each[step] for each in drawn], 1) for step in range(count)]
    return StepWorkload("Criteo-Kaggle's tables, Zipf 1.05", rows, config["kaggle_dim"], batches)


def fill(path: Path, workload: StepWorkload, rule: tierstore.optim.Optimizer) -> None:
    """A store in which every row was written once, so that each has to be read."""
    shutil.rmtree(path, ignore_errors=True)
    make_store(path, rows=workload.rows, dim=workload.dim, optimizer=rule, ddr="512MiB", value=0.01).close()


def step_of(
    module: Any, workload: StepWorkload, *, rules: Sequence[Any] = (), wrapped: Callable[[Any], Any] | None = None,
    **layers: Any,
) -> Callable[[Any], None]:  # fmt: skip
    """A training step, given its batch; of a model with the published DLRM's layers, or those given, and by more
    optimizers than that of its own weights."""
    samples, columns = workload.batches[0].stride(), len(workload.rows) * workload.dim
    if not workload.is_model:
        gradient = torch.full((samples, columns), 1e-3)
        return lambda batch: module(batch).values().backward(gradient)
    torch.manual_seed(1)
    layers = {"bottom_mlp": (512, 256, 64), "top_mlp": (512, 256)} | layers
    model: Any = DLRM(module, num_features=len(workload.rows), embedding_dim=workload.dim, **layers)
    model = wrapped(model) if wrapped else model
    own = [each for name, each in model.named_parameters() if "embeddings." not in name]
    step = model_step(model, [torch.optim.SGD(own, lr=0.1), *rules])
    dense, labels = torch.randn(samples, 13), torch.rand(samples).round()
    return lambda batch: step(batch, dense, labels)


def model_step(model: Any, rules: Sequence[Any]) -> Callable[[Any, Tensor, Tensor], None]:
    """A training step of a DLRM by some optimizers, given ids, dense features and labels."""

    def step(ids: Any, dense: Tensor, labels: Tensor) -> None:
        for each in rules:
            each.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(dense, ids), labels).backward()  # type: ignore[no-untyped-call]
        for each in rules:
            each.step()

    return step


def timed(module: Any, step: Callable[[Any], None], batches: list[Any], depth: Any) -> Generator[float, None, None]:
    """Seconds from step to step."""
    with contextlib.closing(tierstore.prefetch(batches, module, depth=depth)) as ahead:
        last = time.perf_counter()
        for batch in ahead:
            step(batch)
            now = time.perf_counter()
            yield now - last
            last = now
