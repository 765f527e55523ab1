"""The trainer over ranks: the bits of one process that works off the ranks' parts, whatever interrupts it."""

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tests.train.runs import TEST_ROWS, TRAIN_ROWS, config_of
from tierstore.settings.sections import to_dict
from tierstore.train import RunConfig, Summary, train, trainer
from tierstore.train.build import Run, build_run, open_data, open_run_store
from tierstore.train.metrics import Predictions
from tierstore.train.summary import digest_bits

from .ranks import run

BATCH = 43
"""Of 300 rows: the last batch has 42, and no part of a batch is as long as every other."""
STEPS = 2 * math.ceil(TRAIN_ROWS / BATCH)


def config(folder: Path, store: str, **changes: object) -> RunConfig:
    return config_of(folder, store, **{"train__batch_size": BATCH, "train__commit_every": 4, **changes})


def train_rank(made: RunConfig, resume: bool = False, stop_at: int = 0, failing: int = -1) -> Summary:
    """As rank; rank 0 gets SIGTERM in the step ``stop_at``, or ``failing`` fails in it."""
    trainer.warm_up = lambda _: None
    steps, real = iter(range(1, 1_000_000)), trainer.train_step

    def step(*arguments: Any) -> Any:
        if next(steps) == stop_at:
            if torch.distributed.get_rank() == failing:
                raise OSError("the disk is on fire")
            if failing < 0 and torch.distributed.get_rank() == 0:
                signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    trainer.train_step = step
    return train(made, resume=resume, bits=True)


def one_process(made: RunConfig, parts: int) -> tuple[str, float, float]:
    """What the ranks must come to: each batch's parts one after another, gradients divided and summed in that order."""
    reader, hasher = open_data(made)

    def batches(part: int, begin: int, end: int) -> Any:
        return reader.batches(
            hasher, batch_size=made.train.batch_size, start_row=begin, stop_row=end, part=part, parts=parts
        )

    with open_run_store(made) as store:
        built = build_run(made, store)
        rows, dense = store.optimizer(), list(built.model.dense_parameters().values())
        for _ in range(made.train.epochs):
            for together in zip(*(batches(part, 0, TRAIN_ROWS) for part in range(parts)), strict=True):
                rows.zero_grad()
                total = [torch.zeros_like(each) for each in dense]
                for batch in together:
                    built.optimizer.zero_grad()
                    loss = binary_cross_entropy_with_logits(built.model(batch.dense, batch.sparse), batch.labels)
                    (loss * (len(batch) * parts / sum(map(len, together))) / parts).backward()
                    for sums, each in zip(total, dense, strict=True):
                        sums += each.grad
                for sums, each in zip(total, dense, strict=True):
                    each.grad = sums
                rows.step()
                built.optimizer.step()
        predictions = Predictions()
        with torch.no_grad():
            for batch in batches(0, TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS) if parts == 1 else ():
                predictions.add(batch.labels, built.model(batch.dense, batch.sparse))
            for part in range(parts) if parts > 1 else ():
                for batch in batches(part, TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS):
                    predictions.add(batch.labels, built.model(batch.dense, batch.sparse))
        found = predictions.evaluate()
        return digest_bits(built), found.auc, found.log_loss


@pytest.mark.parametrize(("size", "depth"), [(2, 0), (2, 3)])
def test_ranks_end_in_the_bits_of_one_process_that_works_off_their_parts(tmp_path: Path, size: int, depth: int) -> None:
    found = run(train_rank, size, tmp_path, config(tmp_path, "ranks", train__prefetch_depth=depth))
    bits, auc, log_loss = one_process(config(tmp_path, "one"), size)
    assert {each.bits for each in found} == {bits}
    assert {(each.test.rows, each.test.auc) for each in found} == {(TEST_ROWS, auc)}
    assert found[0].test.log_loss == pytest.approx(log_loss, abs=1e-12)
    assert {(each.step, each.rows) for each in found} == {(STEPS, 2 * TRAIN_ROWS)}
