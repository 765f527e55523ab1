"""Part "bytes": what ranks send to each other for Criteo's lookups, tierstore's and TorchRec's."""

import functools
from collections.abc import Callable
from statistics import mean
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from tierstore.dist.plan import ShardingType

from ..common import Goal, Run, Table
from ..data import require_criteo
from ..parts import Part, Told
from ..steps import StepWorkload, criteo
from .ranks import run_ranks
from .sockets import count_sent
from .systems import Ours, Setup, System, Theirs

__all__ = ["PART"]

_GOAL: Final = 0.35
_STEPS: Final = 3
ROWS: Final = "tierstore, rows"
BF16: Final = "tierstore, rows as bf16"
THEIRS: Final = "TorchRec"
OURS: Final[dict[str, dict[str, Any]]] = {
    ROWS: {},
    BF16: {"forward_precision": "bf16", "backward_precision": "bf16"},
    "tierstore, rows as int8": {"forward_precision": "int8", "backward_precision": "int8"},
    "tierstore, pooled": {"exchange": "pooled"},
}


def _of_step(system: System, batch: Any) -> dict[str, int]:
    """Bytes that this rank sends in forward, those of ids among them, and in backward."""
    out: list[Tensor] = []
    jagged = system.jagged(batch)
    forward = count_sent(lambda: out.append(system.pooled(jagged)))
    backward = count_sent(lambda: out[0].backward(torch.full_like(out[0], 1e-3)))  # type: ignore[no-untyped-call]
    return {"ids": forward.ids, "values": forward.total - forward.ids, "gradients": backward.total}


def _in_rank(config: dict[str, Any]) -> list[dict[str, Any]]:
    count = dist.get_world_size() * (_STEPS + 1)
    workload = criteo(require_criteo(), config | {"criteo_batch": config["batch"], "dim": 0}, count)
    return [_point(workload._replace(dim=dim), kind) for kind in config["shardings"] for dim in config["dims"]]


def _point(workload: StepWorkload, sharding_type: ShardingType) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    setup = Setup(workload.rows, workload.dim, sharding_type)
    systems: dict[str, Callable[[], System]] = {
        name: functools.partial(Ours, setup._replace(**how)) for name, how in OURS.items()
    }
    systems[THEIRS] = functools.partial(Theirs, setup)
    batches = workload.batches[rank::size]
    sent = {}
    for name, make in systems.items():
        system = make()
        _of_step(system, batches[0])  # connections are made
        sent[name] = [_of_step(system, batch) for batch in batches[1:]]
        system.close()
    return {"ranks": size, "sharding_type": sharding_type, "dim": workload.dim, "sent": sent}


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    points = []
    for size in request.config["ranks"]:
        for of_point in zip(*run_ranks(_in_rank, size, request.config), strict=True):
            sent = {}
            for name in of_point[0]["sent"]:
                steps = [step for rank in of_point for step in rank["sent"][name]]
                sent[name] = {what: mean(step[what] for step in steps) for what in steps[0]}
            points.append({**of_point[0], "sent": sent})
    return {"points": points, "batch": request.config["batch"]}


def _total(sent: dict[str, float]) -> float:
    return sum(sent.values())


def _tell(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    rows, goals = [], []
    for point in points:
        where, theirs = f"{point['ranks']}, {point['sharding_type']}", point["sent"][THEIRS]
        for name, sent in point["sent"].items():
            kib = [f"{each / 1024:,.0f}" for each in sent.values()]
            rows.append([where, str(point["dim"]), name, *kib, f"{_total(sent) / _total(theirs):.3f}"])
    columns = ["ranks, sharding", "dim", "system", "ids", "rows or bags", "gradients", "of TorchRec's, in all"]
    table = Table(title="KiB that a rank sends to the others in a step, Criteo's lookups", columns=columns, rows=rows)
    for ranks, kind in dict.fromkeys((each["ranks"], each["sharding_type"]) for each in points):
        own = [each["sent"] for each in points if (each["ranks"], each["sharding_type"]) == (ranks, kind)]
        share = max(_total(sent[ROWS]) / _total(sent[THEIRS]) for sent in own)
        name = f"bytes of a step over TorchRec's, {ranks} ranks, {kind}, the worst of dims"
        goals.append(Goal(name=name, value=round(share, 3), at_most=_GOAL))
    halves = max(
        (_total(each["sent"][BF16]) - each["sent"][BF16]["ids"])
        / (_total(each["sent"][ROWS]) - each["sent"][ROWS]["ids"])
        for each in points
    )
    goals.append(Goal(name="bytes of rows and gradients as bf16, over float32", value=round(halves, 3), at_most=0.51))
    note = (
        f"Bytes: as the kernel counts them for the ranks' TCP connections; {figures['batch']:,} samples a rank, one id "
        "a bag or none, mean over ranks and steps. Ids are int64 in both, with their lengths and counts. tierstore "
        "sends each distinct row of a rank's batch once, TorchRec pooled bags. Where tables are row-wise, each of its "
        "ranks has a part of every bag, and gloo's reduce-scatter sends it twice."
    )
    return Told(tables=[table], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)
