"""What a run did over time, in bounded memory: its loss, and the tiers' totals at some of its steps."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..pool.stats import Stats

RANGES_MAX: Final = 200  # ranges of steps that a history tells apart; even, so that all of them merge in pairs
_LOSS_STEPS: Final = 100
_OF_EACH_RANK: Final = ("hbm_hits", "hbm_unique", "ddr_hits", "ddr_unique", "bytes_read", "bytes_written")


class Point(NamedTuple):
    """Running totals after a step, since this process began to train. Neighbours differ by what the steps between
    them did."""

    step: int  # steps since the run was begun, those of earlier processes included
    samples: int
    seconds: float  # on a GPU the last steps may still be in flight
    loss_sum: float  # of the steps' mean losses
    hbm_hits: int
    hbm_unique: int  # rows asked for, as ``TierStats.unique``
    ddr_hits: int
    ddr_unique: int
    bytes_read: int  # from SSD, rows fetched ahead included
    bytes_written: int  # to SSD, rows written back and committed


class History:
    """Totals after every step of the first 200; then of every second step, every fourth, as they come to be too
    many. It never waits for a device before it is asked. ``step``: of the run, where this process continues it."""

    def __init__(self, tiers: Callable[[], Stats], *, step: int = 0) -> None:
        self.tiers = tiers
        self.samples = 0
        self._step = step
        self._width = 1
        self._started = time.perf_counter()
        self._loss_sum = torch.zeros((), dtype=torch.float64)
        self._losses: deque[Tensor] = deque(maxlen=_LOSS_STEPS)
        self._before = _totals(tiers())
        self._marks = [self._mark()]
        """Points, and their sums of losses, which a device may still compute."""

    @property
    def loss(self) -> float | None:
        """Mean loss of the last 100 steps, which it waits for; None before the first."""
        if not self._losses:
            return None
        losses: list[float] = torch.stack(list(self._losses)).tolist()
        return sum(losses) / len(losses)

    def step(self, samples: int, loss: Tensor) -> None:
        """Count a step; its mean loss, a scalar, is left where it is."""
        self._step += 1
        self.samples += samples
        self._losses.append(loss)
        self._loss_sum = self._loss_sum + loss
        if self._step - self._marks[-1][0].step == self._width:
            self._marks.append(self._mark())
            if len(self._marks) > RANGES_MAX:
                del self._marks[1::2]
                self._width *= 2

    def close(self) -> None:
        """End it: what was done since the last step, as its commit, counts to the last range."""
        if self._marks[-1][0].step == self._step:
            self._marks.pop()
        self._marks.append(self._mark())

    def points(self) -> list[Point]:
        """From before the first step to the last that was counted, at most 201."""
        return [point._replace(loss_sum=float(loss_sum)) for point, loss_sum in self._marks]

    def _mark(self) -> tuple[Point, Tensor]:
        totals = (now - before for now, before in zip(_totals(self.tiers()), self._before, strict=True))
        return Point(self._step, self.samples, time.perf_counter() - self._started, 0.0, *totals), self._loss_sum


def _totals(stats: Stats) -> list[int]:
    """In the order of ``_OF_EACH_RANK``."""
    rows = (count for tier in (stats.hbm, stats.ddr) for count in (tier.hits, tier.unique))
    return [*rows, stats.ssd.bytes_read, stats.ssd.bytes_written]


def together(ranks: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The history of ranks that trained the same steps together: tiers of all, time of the first."""
    return tuple(
        each[0]._replace(**{name: sum(getattr(point, name) for point in each) for name in _OF_EACH_RANK})
        for each in zip(*ranks, strict=True)
    )
