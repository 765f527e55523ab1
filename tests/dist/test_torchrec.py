"""Sharded training against TorchRec's, on the same ranks, batches and first weights; needs ``make peers``."""

from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist

import tierstore
from bench.peers import torchrec
from bench.sharded.systems import Ours, Setup, Theirs, dense_part, train_step
from bench.steps import StepWorkload
from tierstore.dist.plan import Exchange, ShardingType

from .ranks import run

pytestmark = pytest.mark.skipif(not torchrec.is_there(), reason="TorchRec is not there: make peers")

ROWS, DIM, SAMPLES, STEPS = (2, 50, 301), 8, 32, 25
RANKS = 2
DENSE_LR = 0.1
LR = {"SGD": 5.0, "row-wise Adagrad": 0.03}
AT_MOST = {"SGD": 1e-6, "row-wise Adagrad": 5e-6}
CASES = [
    {"sharding_type": kind, "exchange": exchange, "rule": rule, "lr": LR[rule]}
    for rule in AT_MOST
    for kind in get_args(ShardingType)
    for exchange in get_args(Exchange)
    # TorchRec's row-wise Adagrad is another rule where it shards by columns.
    if kind in ("table_wise", "row_wise") or (kind == "column_wise" and rule == "SGD")
]


def workload() -> StepWorkload:
    generator = torch.Generator().manual_seed(1)
    names = [f"f{number}" for number in range(len(ROWS))]
    batches = []
    for _ in range(RANKS * STEPS):
        lengths = torch.randint(0, 4, (len(ROWS), SAMPLES), generator=generator)
        lengths[0] = 1  # whose ids tell the labels
        counts = lengths.sum(dim=1).tolist()
        ids = [torch.randint(0, rows, (count,), generator=generator) for rows, count in zip(ROWS, counts, strict=True)]
        batches.append(tierstore.KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths.flatten()))
    return StepWorkload("small", ROWS, DIM, batches)


def losses(setup: Setup, workload: StepWorkload) -> list[tuple[float, float]]:
    """This rank's loss in each step by (tierstore, TorchRec), over its share of the batches; for a rank."""
    ours = Ours(setup)
    steps = [(system, train_step(system, DENSE_LR)) for system in (ours, Theirs(setup))]
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for number, batch in enumerate(workload.batches[rank::size]):
        dense, labels = dense_part(batch, size * number + rank)
        own, theirs = (step(system.jagged(batch), dense, labels).item() for system, step in steps)
        found.append((own, theirs))
    ours.close()
    return found


def train_all() -> list[list[tuple[float, float]]]:
    torch.set_num_threads(1)
    setup = Setup(ROWS, DIM, "row_wise", mlps=((16,), (16,)))
    return [losses(setup._replace(**case), workload()) for case in CASES]


def test_losses_are_those_of_torchrec(tmp_path: Path) -> None:
    for of_rank in run(train_all, RANKS, tmp_path):
        for case, found in zip(CASES, of_rank, strict=True):
            ours, theirs = torch.tensor(found, dtype=torch.float64).T
            assert ours[-5:].mean() < ours[:5].mean() / 2, "it learns"
            assert (ours - theirs).abs().max() < AT_MOST[case["rule"]], case
