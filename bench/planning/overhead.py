"""What recording lookups costs a training step, and a batch that a server runs.

What recording adds is the time of one call a batch, on the thread that looks up, so that call is timed where it stands:
amid steps, its code and data out of the processor's caches. Each batch is run twice, once recorded and once not, by
turns; the second time it finds its rows in memory, so calls and steps count where they came first. The difference of
recorded steps and others is told beside: it has all that recording does to a step, and the noise of whole steps, which
on a machine that others use is several times a call.
"""

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

import tierstore
from tierstore.models import DLRM
from tierstore.store.recording import Recorder

from ..common import Spread
from ..workload import ids_of, make_store

__all__ = ["Overhead", "Shape", "measure_overhead"]

_EXPONENT: Final = 1.05
_DENSE: Final = 13


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a step is of.

    Attributes:
        rows: of each table.
        pooling_factor: ids a bag.
        ddr: budget for rows; of all of them where it is "200% of tables".
        has_model: with the MLPs of DLRM around the tables; else lookup, backward and optimizer of the tables alone.
        trains: else lookups only, without gradients.
    """

    name: str
    tables: int
    rows: int
    dim: int
    batch: int
    pooling_factor: int
    ddr: str = "200% of tables"
    has_model: bool = False
    trains: bool = True

    @property
    def lookups(self) -> int:
        """Ids of a step."""
        return self.tables * self.batch * self.pooling_factor


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What was measured.

    Attributes:
        plain_s, recorded_s: of steps that came first.
        call_s: of those that were recorded, in the recorder's call.
        share: of a step that is not recorded, the call; medians.
        ns_a_lookup: the call's, for each id.
        share_by_difference: what recorded steps took longer, of a step: the median where they came first, the same
            where they came second, and the mean of both.
    """

    shape: Shape
    rate: float
    plain_s: Spread
    recorded_s: Spread
    call_s: Spread
    share: float
    ns_a_lookup: float
    share_by_difference: float


def measure_overhead(
    shape: Shape, folder: Path, *, rate: float = 0.01, steps: int = 200, warm_steps: int = 20, seed: int = 1
) -> Overhead:
    """Measure it; a store is made in ``folder``, and removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rule = tierstore.optim.RowWiseAdagrad(lr=0.05)
    try:
        with make_store(
            folder / "store", tables=shape.tables, rows=shape.rows, dim=shape.dim, optimizer=rule, ddr=shape.ddr
        ) as store:
            module = tierstore.TieredEmbeddingBagCollection(store)
            step, batches = _step(module, shape), _batches(shape, warm_steps + steps, seed)
            with store.record(folder / "lookups.npz", rate=rate) as recorder:
                calls = _timed_calls(recorder)
                for batch in batches[:warm_steps]:
                    step(batch)
                calls.clear()
                pairs = [_pair(store, recorder, step, batch, i) for i, batch in enumerate(batches[warm_steps:])]
                store.recorder = recorder
    finally:
        shutil.rmtree(folder)
    first, second = pairs[::2], pairs[1::2]
    plain, recorded = [pair.plain_s for pair in first], [pair.recorded_s for pair in second]
    step_s, call_s = statistics.median(plain), statistics.median(calls[1::2])
    longer_s = [statistics.median(pair.recorded_s - pair.plain_s for pair in own) for own in (first, second)]
    return Overhead(
        shape=shape,
        rate=rate,
        plain_s=Spread.of(plain),
        recorded_s=Spread.of(recorded),
        call_s=Spread.of(calls[1::2]),
        share=call_s / step_s,
        ns_a_lookup=1e9 * call_s / shape.lookups,
        share_by_difference=statistics.mean(longer_s) / step_s,
    )


def _timed_calls(recorder: Recorder) -> list[float]:
    """Seconds of each call that tells the recorder of a module's batch, from now on."""
    note, seconds = recorder.note_lookups, list[float]()

    def timed(lookups: Any) -> None:
        started = time.perf_counter()
        note(lookups)
        seconds.append(time.perf_counter() - started)

    setattr(recorder, "note_lookups", timed)  # noqa: B010
    return seconds


class _Pair(NamedTuple):
    """Seconds of one step without and with recording."""

    plain_s: float
    recorded_s: float


def _pair(store: tierstore.Store, recorder: Recorder, step: Callable[[Any], None], batch: Any, number: int) -> _Pair:
    """Of even numbers without recording first."""
    seconds = {}
    for is_recorded in (True, False) if number % 2 else (False, True):
        store.recorder = recorder if is_recorded else None
        started = time.perf_counter()
        step(batch)
        seconds[is_recorded] = time.perf_counter() - started
    return _Pair(seconds[False], seconds[True])


def _batches(shape: Shape, count: int, seed: int) -> Sequence[tierstore.KeyedJaggedTensor]:
    generator = np.random.default_rng(seed)
    size, names = shape.batch * shape.pooling_factor, [f"f{table}" for table in range(shape.tables)]
    drawn = [ids_of(generator, shape.rows, size * count, _EXPONENT).reshape(count, size) for _ in names]
    offsets = torch.arange(0, shape.lookups + 1, shape.pooling_factor)
    return [
        tierstore.KeyedJaggedTensor(names, torch.from_numpy(np.concatenate([ids[i] for ids in drawn])), offsets=offsets)
        for i in range(count)
    ]


def _step(module: tierstore.TieredEmbeddingBagCollection, shape: Shape) -> Callable[[Any], None]:
    """A step, given its batch."""
    grad = contextlib.nullcontext() if shape.trains else torch.inference_mode()
    call: Any = module
    rule: torch.optim.Optimizer | None = None
    if shape.has_model:
        torch.manual_seed(1)
        model = DLRM(
            module, num_features=shape.tables, embedding_dim=shape.dim, bottom_mlp=(512, 256, shape.dim),
            top_mlp=(512, 256),
        )  # fmt: skip
        dense, rule = torch.randn(shape.batch, _DENSE), torch.optim.SGD(model.parameters(), lr=0.1)
        call = lambda batch: model(dense, batch)  # noqa: E731

    def step(batch: Any) -> None:
        with grad:
            out = call(batch)
            if shape.trains:
                (out if shape.has_model else out.values()).sum().backward()
            if rule is not None:
                rule.step()
                rule.zero_grad()

    return step
