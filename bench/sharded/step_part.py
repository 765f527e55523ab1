"""Part "steps": time of a training step over Criteo's lookups, beside TorchRec's and one process's."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

import tierstore
from tierstore.dist.plan import ShardingType

from ..common import Goal, Part, Report, Run, Table
from ..steps import StepWorkload, criteo
from .ranks import run_ranks, whole_machine
from .systems import Alone, Ours, Setup, Theirs
from .turns import contender, spreads, take_turns

OURS: Final = "tierstore"
AHEAD: Final = "prefetched"
THEIRS: Final = "TorchRec"
ALONE: Final = "one process"
TABLES: Final = "tables alone"
MODEL: Final = "DLRM"
_ALONE_RANKS: Final = 2


def joined(batches: Sequence[tierstore.KeyedJaggedTensor]) -> tierstore.KeyedJaggedTensor:
    """The samples of all batches, one after another."""
    keys = batches[0].keys()
    lengths = [batch.lengths().view(len(keys), -1) for batch in batches]
    parts: list[Any] = [
        torch.split(batch.values(), each.sum(dim=1).tolist()) for batch, each in zip(batches, lengths, strict=True)
    ]
    values = torch.cat([part[number] for number in range(len(keys)) for part in parts])
    return tierstore.KeyedJaggedTensor(keys, values, lengths=torch.cat(lengths, dim=1).flatten())


def _in_rank(config: dict[str, Any]) -> list[dict[str, Any]]:
    mlps = config["bottom_mlp"], config["top_mlp"]
    count = dist.get_world_size() * config["batches"]
    workload = criteo(config | {"criteo_batch": config["batch"], "dim": 0}, count)
    return [
        _point(workload._replace(dim=dim), kind, layers, config)
        for kind in config["shardings"]
        for dim in config["dims"]
        for layers in ((None, mlps) if dist.get_world_size() == _ALONE_RANKS else (None,))
    ]


def _point(workload: StepWorkload, kind: ShardingType, mlps: Any, config: dict[str, Any]) -> dict[str, Any]:
    rank, size, count = dist.get_rank(), dist.get_world_size(), config["batches"]
    setup = Setup(workload.rows, workload.dim, kind, mlps=mlps, lr=config["lr"])
    own, is_model = workload.batches[rank::size], mlps is not None
    made, ours = partial(contender, is_model=is_model), Ours(setup)
    contenders = {
        OURS: made(ours, own),
        AHEAD: made(ours, own, depth=config["depth"]),
        THEIRS: made(Theirs(setup), own),
    }
    if size == _ALONE_RANKS:
        with whole_machine(size):
            alone = Alone(setup, size)
        whole = [joined(workload.batches[first : first + size]) for first in range(0, size * count, size)]
        contenders[ALONE] = made(alone, whole, alone_threads=size)
    seconds = take_turns(contenders, config["turns"])
    for each in contenders.values():
        each.system.close()
    return {"sharding_type": kind, "dim": workload.dim, "what": MODEL if is_model else TABLES, "seconds": seconds}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    points = [
        {**of_point[0], "ranks": size, "seconds": spreads([each["seconds"] for each in of_point])}
        for size in config["ranks"]
        for of_point in zip(*run_ranks(_in_rank, size, config), strict=True)
    ]
    return {"points": points, "batch": config["batch"], "turns": config["turns"], "depth": config["depth"]}


def _tell(figures: dict[str, Any]) -> Report:
    rows, theirs, alone = [], dict[str, float](), dict[str, float]()
    for point in figures["points"]:
        times = {name: each["median"] for name, each in point["seconds"].items()}
        ratios = {name: times[name] / times[OURS] for name in (THEIRS, ALONE) if name in times}
        kind, ms = f"{point['ranks']} ranks, {point['sharding_type']}", {n: f"{1e3 * t:.1f}" for n, t in times.items()}
        last = [ms[ALONE], f"{ratios[ALONE]:.2f}"] if ALONE in ms else ["", ""]
        cells = [*(ms[name] for name in (OURS, AHEAD, THEIRS)), f"{ratios[THEIRS]:.2f}", *last]
        rows.append([f"{point['ranks']}, {point['sharding_type']}", str(point["dim"]), point["what"], *cells])
        theirs[kind] = min(theirs.get(kind, math.inf), ratios[THEIRS])
        if ALONE in ratios and point["what"] == MODEL:
            alone[kind] = min(alone.get(kind, math.inf), ratios[ALONE])
    columns = ["ranks, sharding", "dim", "step of", OURS, AHEAD, THEIRS, "faster by", ALONE, "of its speed"]
    name = "{}: speed of a step over TorchRec's, the worst of dims and models"
    goals = [Goal(name.format(kind), round(ratio, 3), at_least=1.0) for kind, ratio in theirs.items()]
    name = "{}: speed over one process of 2 threads, DLRM, the worst of dims"
    goals += [Goal(name.format(kind), round(ratio, 3), at_least=0.8) for kind, ratio in alone.items()]
    table = Table("ms of a training step, Criteo's lookups, all rows in memory", columns, rows)
    return Report([table], goals, [_NOTE.format(**figures)])


_NOTE: Final = (
    "Steps: forward, backward and row-wise Adagrad, {batch:,} samples a rank, medians over {turns} turns of each; a "
    "step takes as long as in its slowest rank. Each rank has one thread, bound to a core (and one more there that "
    "prefetches {depth} batches ahead); one process has two threads, both cores and the batches of both ranks. 4 ranks "
    "share the cores. The DLRM has the layers of examples/criteo.toml, and SGD for them; with tables alone the "
    "gradient is given. Ratios are of steps without prefetch."
)

PART: Final = Part(_measure, _tell)
