"""Sharded training against TorchRec's, on the same ranks, batches and first weights; needs ``make peers``."""

from pathlib import Path

import pytest
import torch

import tierstore
from bench.peers import torchrec
from bench.sharded.loss_part import AT_MOST, CASES, RANKS, losses
from bench.sharded.systems import Setup
from bench.steps import StepWorkload

from .ranks import run

pytestmark = pytest.mark.skipif(not torchrec.is_there(), reason="TorchRec is not there: make peers")

ROWS, DIM, SAMPLES, STEPS = (2, 50, 301), 8, 32, 25
LR = {"SGD": 5.0, "row-wise Adagrad": 0.03}


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


def train_all() -> list[list[tuple[float, float]]]:
    torch.set_num_threads(1)
    setup = Setup(ROWS, DIM, "row_wise", mlps=((16,), (16,)))
    return [losses(case.of(setup, LR), workload()) for case in CASES]


def test_losses_are_those_of_torchrec(tmp_path: Path) -> None:
    for of_rank in run(train_all, RANKS, tmp_path):
        for case, found in zip(CASES, of_rank, strict=True):
            ours, theirs = torch.tensor(found, dtype=torch.float64).T
            assert ours[-5:].mean() < ours[:5].mean() / 2, "it learns"
            assert (ours - theirs).abs().max() < AT_MOST[case.rule], case
