"""Systems that train in turns, so that whatever else the machine does meets all of them."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tierstore

from ..common import spread
from ..steps import model_step
from .ranks import whole_machine
from .systems import System

_PAUSE_SECONDS: Final = 0.02
"""Before each turn: threads of the process that is alone spin for a while after their work."""
_DENSE_LR: Final = 0.1

Batch = tuple[Any, Tensor, Tensor]
"""Ids, dense features, labels."""


class Contender(NamedTuple):
    """A system, and what it does in a turn: steps over batches, ``depth`` of them prefetched by tierstore's tables. If
    ``alone_threads`` is not 0, only the first rank works, with so many."""

    system: System
    batches: Sequence[Batch]
    step: Callable[[Batch], object]
    depth: int = 0
    alone_threads: int = 0

    def turn(self) -> list[float]:
        """Seconds from the end of a step to that of the next; at either end those are left out that prefetch, which
        begins and ends with the turn, would make longer or shorter."""
        ends, batches = [], iter(self.batches)
        if self.depth:
            model = self.system.model
            batches = tierstore.prefetch(batches, model, depth=self.depth, features=lambda batch: batch[0])
        for batch in batches:
            self.step(batch)
            ends.append(time.perf_counter())
        return [end - begin for begin, end in itertools.pairwise(ends[2:-2])]


def contender(
    system: System, batches: Sequence[tierstore.KeyedJaggedTensor], *, is_model: bool, **how: Any
) -> Contender:
    """Of a model over the tables, or of tables alone, whose gradient is given."""
    given: list[Batch] = []
    for number, batch in enumerate(batches):
        generator, samples = torch.Generator().manual_seed(number), batch.stride()
        dense, labels = torch.randn(samples, 13, generator=generator), torch.rand(samples, generator=generator).round()
        given.append((system.jagged(batch), dense, labels))
    if is_model:
        own = [each for name, each in system.model.named_parameters() if "embeddings." not in name]
        trained = model_step(system.model, [torch.optim.SGD(own, lr=_DENSE_LR)])
        return Contender(system, given, lambda batch: trained(*batch), **how)
    gradient = torch.full_like(system.pooled(given[0][0]), 1e-3)

    def step(batch: Batch) -> None:
        system.pooled(batch[0]).backward(gradient)  # type: ignore[no-untyped-call]

    return Contender(system, given, step, **how)


def take_turns(contenders: dict[str, Contender], turns: int) -> dict[str, list[float]]:
    """Seconds of each contender's steps in this rank, after a first turn that is left out. Collective."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(turns + 1):
        for name, each in contenders.items():
            time.sleep(_PAUSE_SECONDS)
            dist.barrier()
            seconds = list[float]()
            if not each.alone_threads:
                seconds = each.turn()
            elif not dist.get_rank():
                with whole_machine(each.alone_threads):
                    seconds = each.turn()
            if number:
                found[name] += seconds
    return found


def spreads(of_ranks: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Of each contender's steps; a step takes as long as in its slowest rank."""
    found = {}
    for name in of_ranks[0]:
        times = [each[name] for each in of_ranks if each[name]]
        found[name] = spread([max(step) for step in zip(*times, strict=True)])
    return found
