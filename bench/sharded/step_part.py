"""Part "steps": time of a training step over Criteo's lookups, beside TorchRec's and one process's."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

import tierstore
from tierstore.dist.plan import ShardingType

from ..common import Goal, Run, Spread, Table
from ..data import require_criteo
from ..parts import Part, Told
from ..steps import StepWorkload, criteo
from .ranks import run_ranks
from .systems import Alone, Ours, Setup, System, Theirs, dense_part, train_step

__all__ = ["PART", "timed"]

OURS: Final = "tierstore"
THEIRS: Final = "TorchRec"
ALONE: Final = "one process"
TABLES: Final = "tables alone"
MODEL: Final = "DLRM"
_ALONE_RANKS: Final = 2
_PAUSE_SECONDS: Final = 0.02
"""Before each step: threads of the process that is alone spin for a while after their work."""


class _Step(NamedTuple):
    """A system's step of each batch that it is given; ``threads`` of torch and, where it is alone, of the tables."""

    run: Callable[[int], object]
    threads: int
    is_alone: bool


def timed(steps: dict[str, _Step], repetitions: int, batches: int) -> dict[str, list[float]]:
    """Seconds of each system's steps in this rank, the systems taking turns; a first round is left out. Collective."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-batches, repetitions):
        for name, step in steps.items():
            takes_part = not step.is_alone or not dist.get_rank()
            torch.set_num_threads(step.threads if takes_part else 1)
            time.sleep(_PAUSE_SECONDS)
            dist.barrier()
            start = time.perf_counter()
            if takes_part:
                step.run(number % batches)
            if number >= 0:
                found[name].append(time.perf_counter() - start)
    torch.set_num_threads(1)
    return found


def joined(batches: Sequence[tierstore.KeyedJaggedTensor]) -> tierstore.KeyedJaggedTensor:
    """The samples of all batches, one after another."""
    keys = batches[0].keys()
    lengths = [batch.lengths().view(len(keys), -1) for batch in batches]
    parts: list[Any] = [
        torch.split(batch.values(), each.sum(dim=1).tolist()) for batch, each in zip(batches, lengths, strict=True)
    ]
    values = torch.cat([part[number] for number in range(len(keys)) for part in parts])
    return tierstore.KeyedJaggedTensor(keys, values, lengths=torch.cat(lengths, dim=1).flatten())


def step_of(system: System, batches: Sequence[tierstore.KeyedJaggedTensor], is_model: bool) -> Callable[[int], object]:
    """A step of the batch of a number."""
    given = [system.jagged(batch) for batch in batches]
    if is_model:
        step, dense = train_step(system, 0.1), [dense_part(batch, number) for number, batch in enumerate(batches)]
        return lambda number: step(given[number], *dense[number])
    columns = system.pooled(given[0]).shape[1]
    gradient = torch.full((batches[0].stride(), columns), 1e-3)
    return lambda number: system.pooled(given[number]).backward(gradient)  # type: ignore[no-untyped-call]


def _in_rank(config: dict[str, Any]) -> list[dict[str, Any]]:
    mlps = config["bottom_mlp"], config["top_mlp"]
    count = dist.get_world_size() * config["batches"]
    workload = criteo(require_criteo(), config | {"criteo_batch": config["batch"], "dim": 0}, count)
    return [
        _point(workload._replace(dim=dim), kind, layers, config)
        for kind in config["shardings"]
        for dim in config["dims"]
        for layers in (None, mlps)
    ]


def _point(workload: StepWorkload, kind: ShardingType, mlps: Any, config: dict[str, Any]) -> dict[str, Any]:
    rank, size, count = dist.get_rank(), dist.get_world_size(), config["batches"]
    setup = Setup(workload.rows, workload.dim, kind, mlps=mlps, lr=config["lr"])
    own, is_model = workload.batches[rank::size], mlps is not None
    systems: dict[str, System] = {OURS: Ours(setup), THEIRS: Theirs(setup)}
    steps = {name: _Step(step_of(system, own, is_model), 1, False) for name, system in systems.items()}
    if size == _ALONE_RANKS:
        systems[ALONE] = Alone(setup, size)
        whole = [joined(workload.batches[first : first + size]) for first in range(0, size * count, size)]
        steps[ALONE] = _Step(step_of(systems[ALONE], whole, is_model), size, True)
    seconds = timed(steps, config["repetitions"], count)
    for system in systems.values():
        system.close()
    return {"sharding_type": kind, "dim": workload.dim, "what": MODEL if is_model else TABLES, "seconds": seconds}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    points = []
    for size in config["ranks"]:
        for of_point in zip(*run_ranks(_in_rank, size, config), strict=True):
            first = of_point[0]
            # A step ends when its last rank does; the rank that works alone is the first one.
            slowest = {
                name: [max(times) for times in zip(*(each["seconds"][name] for each in of_point), strict=True)]
                for name in first["seconds"]
            }
            spreads = {name: asdict(Spread.of(times)) for name, times in slowest.items()}
            points.append({**first, "ranks": size, "seconds": spreads})
    return {"points": points, "batch": config["batch"], "repetitions": config["repetitions"]}


def _ratio(point: dict[str, Any], other: str) -> float:
    return float(point["seconds"][other]["median"] / point["seconds"][OURS]["median"])


def _tell(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    rows = []
    for point in points:
        times = [f"{1e3 * point['seconds'][name]['median']:.1f}" for name in (OURS, THEIRS)]
        has_alone = ALONE in point["seconds"]
        alone = [f"{1e3 * point['seconds'][ALONE]['median']:.1f}", f"{_ratio(point, ALONE):.2f}"] if has_alone else []
        rows.append([
            f"{point['ranks']}, {point['sharding_type']}", str(point["dim"]), point["what"], times[0], times[1],
            f"{_ratio(point, THEIRS):.2f}", *(alone or ["", ""]),
        ])  # fmt: skip
    columns = ["ranks, sharding", "dim", "step of", "tierstore", "TorchRec", "faster by", "one process", "of its speed"]
    table = Table(title="ms of a training step, Criteo's lookups, all rows in memory", columns=columns, rows=rows)
    goals = [
        Goal(
            name=f"{size} ranks, {kind}: speed of a step over TorchRec's, the worst of dims and models",
            value=round(min(_ratio(each, THEIRS) for each in points if _is(each, size, kind)), 3),
            at_least=1.0,
        )
        for size, kind in dict.fromkeys((each["ranks"], each["sharding_type"]) for each in points)
    ]
    pairs = [each for each in points if ALONE in each["seconds"] and each["what"] == MODEL]
    for kind in dict.fromkeys(each["sharding_type"] for each in pairs):
        value = min(_ratio(each, ALONE) for each in pairs if each["sharding_type"] == kind)
        name = f"2 ranks, {kind}: speed over one process of 2 threads, DLRM, the worst of dims"
        goals.append(Goal(name=name, value=round(value, 3), at_least=0.8))
    return Told(tables=[table], goals=goals, notes=[_NOTE.format(**figures)])


def _is(point: dict[str, Any], size: int, kind: str) -> bool:
    return bool(point["ranks"] == size and point["sharding_type"] == kind)


_NOTE: Final = (
    "Steps: forward, backward and row-wise Adagrad, {batch:,} samples a rank, medians of {repetitions} steps in turns; "
    "a step takes as long as its slowest rank. Each rank has one thread; one process has two and the batches of both "
    "ranks. 4 ranks share the machine's cores. The DLRM has the layers of examples/criteo.toml, and SGD for them; with "
    "tables alone the gradient is given."
)

PART: Final = Part(_measure, _tell)
