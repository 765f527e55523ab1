"""Training steps of dense models on the cores, small and large, on one thread and on all: loops of the stage "dense".

What such a model takes beside its flops at the speed of large products: each product has its fixed cost, more where it
wakes other threads, and values are read and written. Work on the weights themselves is left out: a cost per weight and
step fitted no better, and an optimizer's pass is some 3 % of a step of 256 samples.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ...models import DLRM
from ..dense import dlrm_work
from ..host import TRAINING_FLOPS, Processor, dense_work
from .fit import Loop
from .machine import torch_threads

_NUM_DENSE: Final = 13
_CROSS_LAYERS: Final = 2
_WARM_STEPS: Final = 3
_LEAST_STEPS: Final = 5
_MOST_STEPS: Final = 200


class _Shape(NamedTuple):
    """Of a DLRM, and the samples of its batch."""

    dim: int
    tables: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]
    samples: int
    cross_rank: int = 0
    """Of a cross network of two layers; 0: dot products."""

    @property
    def interaction(self) -> Literal["dot", "dcn"]:
        return "dcn" if self.cross_rank else "dot"

    def __str__(self) -> str:
        widths = [*self.bottom_mlp, self.dim, *self.top_mlp]
        return f"{self.samples:,} samples, {self.tables} tables, layers of {', '.join(map(str, widths))}"


_SHAPES: Final = (
    _Shape(16, 4, (32,), (32,), 64),
    _Shape(16, 4, (32,), (32,), 4096),
    _Shape(64, 26, (64,), (64,), 512),
    _Shape(32, 12, (), (64, 64, 64, 64), 2048),
    _Shape(16, 26, (512, 256, 64), (512, 256), 256),
    _Shape(32, 12, (64,), (64, 64), 512, cross_rank=64),
    _Shape(128, 8, (1024,), (512,), 128),
)
"""From next to no work a product to large ones; few pairs of vectors, and many; a cross network."""


def measure_dense(processor: Processor, *, seconds: float) -> list[Loop]:
    """Time them.

    Args:
        processor: its cores, and their speed in large products.
        seconds: to spend, about.
    """
    threads = sorted({1, processor.cores})
    each = seconds / (len(_SHAPES) * len(threads))
    return [loop for count in threads for loop in _loops(processor, count, each)]


def _loops(processor: Processor, threads: int, seconds: float) -> Iterator[Loop]:
    flops = processor.flops * threads / processor.cores
    with torch_threads(threads):
        for shape in _SHAPES:
            samples = shape.samples
            dense = dlrm_work(
                [shape.dim] * shape.tables, num_dense=_NUM_DENSE, bottom_mlp=shape.bottom_mlp, top_mlp=shape.top_mlp,
                interaction=shape.interaction, cross_layers=_CROSS_LAYERS, cross_rank=shape.cross_rank,
            )  # fmt: skip
            yield Loop(
                f"dense model on {threads} cores, {shape}",
                "dense",
                _step_ns(_step_of(shape), seconds),
                dense_work(dense, samples=samples, threads=threads, is_training=True),
                1e9 * TRAINING_FLOPS * samples * dense.dense_flops / flops,
            )


def _step_of(shape: _Shape) -> Callable[[], None]:
    """A training step, rows given and their gradient taken."""
    columns = shape.tables * shape.dim
    model = DLRM(
        nn.Identity(), num_features=shape.tables, embedding_dim=shape.dim, num_dense=_NUM_DENSE,
        bottom_mlp=shape.bottom_mlp, top_mlp=shape.top_mlp, interaction=shape.interaction,
        cross_layers=_CROSS_LAYERS, cross_rank=shape.cross_rank,
    )  # fmt: skip
    rule = torch.optim.SGD(model.parameters(), lr=0.01)
    dense, pooled = torch.rand(shape.samples, _NUM_DENSE), torch.rand(shape.samples, columns, requires_grad=True)
    labels = torch.ones(shape.samples)

    def step() -> None:
        rule.zero_grad()
        loss: Tensor = nn.functional.binary_cross_entropy_with_logits(model.dense_part(dense, pooled), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        rule.step()
        pooled.grad = None

    return step


def _step_ns(step: Callable[[], None], seconds: float) -> float:
    """Median."""
    for _ in range(_WARM_STEPS):
        step()
    taken: list[float] = []
    while len(taken) < _LEAST_STEPS or (sum(taken) < seconds and len(taken) < _MOST_STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    return 1e9 * statistics.median(taken)
