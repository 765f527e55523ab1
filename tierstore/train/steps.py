"""A step, and batches on their way to it: rows prefetched, dense features and labels on the model's device."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..dist import own_tensors
from ..nn.prefetch import prefetch
from ..optim import HessianFree
from .build import Run
from .config import OptimizerSection
from .readers import Batch


def train_step(run: Run, batch: Batch, wants_stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, bool]:
    """One step; rows are updated inside backward. Returns the mean loss of the batch of all processes, a scalar, and
    whether one of them wants to stop. On a GPU the step may still be in flight."""
    share = len(batch) * run.processes.size / batch.total_rows
    if isinstance(run.optimizer, HessianFree):
        loss = _hessian_free_step(run, run.optimizer, batch, share)
        return run.processes.average([], loss, wants_stop())
    loss = _mean_loss(run.model(batch.dense, batch.sparse), batch.labels) * share
    run.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    dense, own = run.model.dense_parameters(), own_tensors(run.model)
    gradients = [each.grad for name, each in dense.items() if name not in own and each.grad is not None]
    agreed = run.processes.average(gradients, loss.detach(), wants_stop())
    if run.clip_norm:
        norm = get_total_norm(gradients)
        if of_towers := [dense[name].grad for name in own if name in dense]:
            norms = run.processes.gather([0.0 if each is None else float(each.norm()) for each in of_towers])
            norm = torch.tensor([norm, *map(max, *norms)]).norm()  # each host has the gradients of its own tower
        clip_grads_with_norm_(dense.values(), run.clip_norm, norm)
    run.optimizer.step()
    return agreed


def _hessian_free_step(run: Run, optimizer: HessianFree, batch: Batch, share: float) -> Tensor:
    """Rows are looked up once: the optimizer evaluates the dense part alone."""
    pooled = run.model.embeddings(batch.sparse).values()
    part = slice(math.ceil(len(batch) * run.curvature_share))

    def evaluated(pooled: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = run.model.dense_part(batch.dense[rows], pooled[rows])
        return _mean_loss(logits, batch.labels[rows]) * share, logits

    loss: Tensor = optimizer.step(lambda: evaluated(pooled, slice(None)), lambda: evaluated(pooled.detach(), part))
    return loss


def set_rates(run: Run, section: OptimizerSection, step: int) -> None:
    """Set the learning rates of the step that follows so many, if they change at all."""
    if section.warmup_steps or section.decay != "none":
        share = section.rate_at(step)
        for table in run.embeddings.tables:
            table.learning_rate = section.sparse_lr * share
        for group in run.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * share


def _mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean of nothing would be NaN; but backward, in which all processes take part, needs a loss."""
    return binary_cross_entropy_with_logits(logits, labels) if len(labels) else logits.sum()


def feed(run: Run, batches: Iterator[Batch], *, depth: int | Literal["auto"]) -> Generator[Batch, None, None]:
    """The batches, on the store's device but for their ids: up to ``depth`` prefetched. Closing it releases what was
    prefetched and not used."""
    device = run.local.device
    ahead = prefetch(batches, run.embeddings, depth=depth, features=lambda batch: batch.sparse)
    with contextlib.closing(ahead):
        for batch in ahead:
            yield dataclasses.replace(
                batch,
                dense=batch.dense.to(device, non_blocking=True),
                labels=batch.labels.to(device, non_blocking=True),
            )
