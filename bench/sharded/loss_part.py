"""Part "loss": training by tierstore and by TorchRec from the same weights, on the same batches."""

import itertools
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_args

import torch.distributed as dist

from tierstore.dist.plan import Exchange, ShardingType

from ..common import Goal, Run, Table
from ..data import require_criteo
from ..parts import Part, Told
from ..steps import StepWorkload, criteo
from .ranks import run_ranks
from .systems import Ours, Setup, Theirs, dense_part, train_step

__all__ = ["AT_MOST", "CASES", "PART", "RANKS", "losses"]

RANKS: Final = 2
DENSE_LR: Final = 0.1
AT_MOST: Final = {"SGD": 1e-6, "row-wise Adagrad": 5e-6}


class Case(NamedTuple):
    """How tables are sharded and trained."""

    sharding_type: ShardingType
    exchange: Exchange
    rule: str

    def of(self, setup: Setup, lr: Mapping[str, float]) -> Setup:
        return setup._replace(**self._asdict(), lr=lr[self.rule])


CASES: Final = [
    Case(kind, exchange, rule)
    for rule in AT_MOST
    for kind, exchange in itertools.product(get_args(ShardingType), get_args(Exchange))
    if kind in ("table_wise", "row_wise") or (kind == "column_wise" and rule == "SGD")
]


def losses(setup: Setup, workload: StepWorkload) -> list[tuple[float, float]]:
    """This rank's loss in each step by (tierstore, TorchRec), over its share of the batches; for a rank."""
    both = Ours(setup), Theirs(setup)
    steps = [(system, train_step(system, DENSE_LR)) for system in both]
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for number, batch in enumerate(workload.batches[rank::size]):
        dense, labels = dense_part(batch, size * number + rank)
        ours, theirs = (step(system.jagged(batch), dense, labels).item() for system, step in steps)
        found.append((ours, theirs))
    both[0].close()
    return found


def _in_rank(config: dict[str, Any]) -> list[list[tuple[float, float]]]:
    shape = {"seed": config["seed"], "criteo_batch": config["loss_batch"], "dim": config["dims"][0]}
    workload = criteo(require_criteo(), shape, RANKS * config["loss_steps"])
    mlps = config["bottom_mlp"], config["top_mlp"]
    setup = Setup(workload.rows, workload.dim, "row_wise", mlps=mlps)
    return [losses(case.of(setup, config["loss_lr"]), workload) for case in CASES]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config = request.config
    of_ranks = run_ranks(_in_rank, RANKS, config)
    points = []
    for number, case in enumerate(CASES):
        found = [each for rank in of_ranks for each in rank[number]]
        off = max(abs(ours - theirs) for ours, theirs in found)
        points.append({**case._asdict(), "off": off, "first": found[0], "last": found[-1]})
    return {"points": points, "steps": config["loss_steps"], "batch": config["loss_batch"]}


def _tell(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    rows = [
        [
            each["sharding_type"],
            each["exchange"],
            each["rule"],
            f"{each['off']:.1e}",
            f"{each['first'][0]:.7f}",
            *(f"{loss:.7f}" for loss in each["last"]),
        ]
        for each in points
    ]
    title = f"loss of DLRM over {RANKS} ranks, largest difference in {figures['steps']} steps of a rank"
    columns = ["sharding", "exchange", "rule", "difference", "first loss", "last, tierstore", "TorchRec"]
    goals = [
        Goal(
            name=f"{rule}: loss of a step, off TorchRec's at most",
            value=max(each["off"] for each in points if each["rule"] == rule),
            at_most=bound,
        )
        for rule, bound in AT_MOST.items()
    ]
    note = (
        f"Loss: Criteo's lookups, {figures['batch']} samples a rank, the same first weights and other layers, SGD for "
        "those. TorchRec's row-wise Adagrad is another rule where it shards by columns, and is not compared there."
    )
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)
