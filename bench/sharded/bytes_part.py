"""Part "bytes": what ranks send to each other for Criteo's lookups, tierstore's and TorchRec's."""

import time
from collections.abc import Callable
from statistics import mean
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.dist.plan import ShardingType

from ..common import Goal, Part, Report, Run, Table
from ..steps import StepWorkload, criteo
from .ranks import run_ranks
from .systems import Ours, Setup, System, Theirs

_GOAL: Final = 0.35
_STEPS: Final = 3
_SETTLE_SECONDS: Final = 0.05
ROWS: Final = "tierstore, rows"
BF16: Final = "tierstore, rows as bf16"
THEIRS: Final = "TorchRec"
OURS: Final[dict[str, dict[str, Any]]] = {
    ROWS: {},
    BF16: {"forward_precision": "bf16", "backward_precision": "bf16"},
    "tierstore, rows as int8": {"forward_precision": "int8", "backward_precision": "int8"},
    "tierstore, pooled": {"exchange": "pooled"},
}


def _sent(action: Callable[[], object]) -> float:
    """Bytes that a rank sends during an action of all ranks, on average: what goes over loopback meanwhile."""

    def total() -> int:
        dist.barrier()
        time.sleep(_SETTLE_SECONDS)
        found = int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
        dist.barrier()
        return found

    before = total()
    action()
    return (total() - before) / dist.get_world_size()


def _of_step(system: System, batch: Any) -> dict[str, float]:
    """Bytes of forward and of backward."""
    out: list[Tensor] = []
    jagged = system.jagged(batch)
    forward = _sent(lambda: out.append(system.pooled(jagged)))
    backward = _sent(lambda: out[0].backward(torch.full_like(out[0], 1e-3)))  # type: ignore[no-untyped-call]
    return {"forward": forward, "gradients": backward}


def _in_rank(config: dict[str, Any]) -> list[dict[str, Any]]:
    count = dist.get_world_size() * (_STEPS + 1)
    workload = criteo(config | {"criteo_batch": config["batch"], "dim": 0}, count)
    return [_point(workload._replace(dim=dim), kind) for kind in config["shardings"] for dim in config["dims"]]


def _point(workload: StepWorkload, sharding_type: ShardingType) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    setup = Setup(workload.rows, workload.dim, sharding_type)
    batches, sent = workload.batches[rank::size], {}
    for name in (*OURS, THEIRS):
        system = Theirs(setup) if name == THEIRS else Ours(setup._replace(**OURS[name]))
        _of_step(system, batches[0])  # connections are made
        steps = [_of_step(system, batch) for batch in batches[1:]]
        sent[name] = {what: mean(step[what] for step in steps) for what in steps[0]}
        system.close()
    return {"ranks": size, "sharding_type": sharding_type, "dim": workload.dim, "sent": sent}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    points = [point for size in config["ranks"] for point in run_ranks(_in_rank, size, config)[0]]
    return {"points": points, "batch": config["batch"]}


def _tell(figures: dict[str, Any]) -> Report:
    rows, worst = list[list[str]](), dict[str, float]()
    for point in figures["points"]:
        totals = {name: sum(sent.values()) for name, sent in point["sent"].items()}
        kind = f"{point['ranks']} ranks, {point['sharding_type']}"
        worst[kind] = max(worst.get(kind, 0.0), totals[ROWS] / totals[THEIRS])
        for name, sent in point["sent"].items():
            kib = [f"{each / 1024:,.0f}" for each in sent.values()]
            where = f"{point['ranks']}, {point['sharding_type']}"
            rows.append([where, str(point["dim"]), name, *kib, f"{totals[name] / totals[THEIRS]:.3f}"])
    goals = [
        Goal(f"bytes of a step over TorchRec's, {kind}, the worst of dims", round(share, 3), at_most=_GOAL)
        for kind, share in worst.items()
    ]
    columns = ["ranks, sharding", "dim", "system", *sent, "of TorchRec's, in all"]
    note = (
        f"Bytes: as the kernel counts them on the loopback device; {figures['batch']:,} samples a rank, one id a bag "
        "or none, mean over ranks and steps; forward has ids too, int64 in both. tierstore sends each distinct row of "
        "a rank's batch once, TorchRec pooled bags. Where tables are row-wise, each of its ranks has a part of every "
        "bag, and gloo's reduce-scatter sends it twice."
    )
    title = "KiB that a rank sends to the others in a step, Criteo's lookups"
    return Report([Table(title, columns, rows)], goals, [note])


PART: Final = Part(_measure, _tell)
