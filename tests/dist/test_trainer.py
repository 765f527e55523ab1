"""The trainer over ranks: the bits of one process that works off the ranks' parts, whatever interrupts it."""

import contextlib
import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from bench.data import ROOT
from tests.train.runs import TEST_ROWS, TRAIN_ROWS, config_of
from tierstore.cli import main
from tierstore.dist import Plan, Sharding
from tierstore.pool.stats import total
from tierstore.serve.models.ranking import Ranking
from tierstore.settings.sections import to_toml
from tierstore.train import RunConfig, Summary, train, trainer
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.metrics import Evaluation, Predictions
from tierstore.train.summary import digest_bits

from .ranks import DIED, as_torchrun_starts, run

BATCH = 23
"""Of 300 rows: parts of a batch differ in length, and one of the last batch is empty."""
STEPS = 2 * math.ceil(TRAIN_ROWS / BATCH)


def config(folder: Path, store: str, **changes: object) -> RunConfig:
    return config_of(folder, store, **{"train__batch_size": BATCH, "train__commit_every": 4, **changes})


def train_rank(made: RunConfig, resume: bool = False, stop_at: int = 0) -> Summary:
    """As rank; rank 0 gets SIGTERM in the step ``stop_at``."""
    trainer.warm_up = lambda _: None
    steps, real = iter(range(1, 1_000_000)), trainer.train_step

    def step(*arguments: Any) -> Any:
        if next(steps) == stop_at and torch.distributed.get_rank() == 0:
            signal.raise_signal(signal.SIGTERM)
        return real(*arguments)

    trainer.train_step = step
    return train(made, resume=resume, bits=True)


def one_process(made: RunConfig, parts: int) -> tuple[str, float, float]:
    """What the ranks must come to: each batch's parts one after another, gradients divided and summed in that order."""
    reader, hasher = open_data(made)

    def batches(part: int) -> Any:
        return reader.batches(hasher, batch_size=BATCH, stop_row=TRAIN_ROWS, part=part, parts=parts)

    with open_run_store(made) as store:
        built = build_run(made, store)
        rows, dense = store.optimizer(), list(built.model.dense_parameters().values())
        for _ in range(made.train.epochs):
            for together in zip(*map(batches, range(parts)), strict=True):
                rows.zero_grad()
                total = [torch.zeros_like(each) for each in dense]
                for batch in filter(len, together):
                    built.optimizer.zero_grad()
                    loss = binary_cross_entropy_with_logits(built.model(batch.dense, batch.sparse), batch.labels)
                    (loss * (len(batch) * parts / sum(map(len, together))) / parts).backward()
                    for sums, each in zip(total, dense, strict=True):
                        sums += each.grad
                for sums, each in zip(total, dense, strict=True):
                    each.grad = sums
                rows.step()
                if made.optimizer.dense_clip_norm:
                    torch.nn.utils.clip_grad_norm_(dense, made.optimizer.dense_clip_norm)
                built.optimizer.step()
        found = evaluated(made, built.model)
        return digest_bits(built), found.auc, found.log_loss


@torch.no_grad()
def evaluated(made: RunConfig, model: torch.nn.Module) -> Evaluation:
    predictions, (reader, hasher) = Predictions(), open_data(made)
    for batch in reader.batches(hasher, batch_size=BATCH, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + TEST_ROWS):
        predictions.add(batch.labels, model(batch.dense, batch.sparse))
    return predictions.evaluate()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float, float]:
    folder = tmp_path_factory.mktemp("one")
    return one_process(config(folder, "store"), 2)


SHARDINGS: list[tuple[Any, tuple[int, ...]]] = [
    *(("table_wise", (1,)), ("column_wise", (0, 1)), ("data_parallel", (0, 1)), ("table_row_wise", (1, 0))),
    ("row_wise", (0, 1)),
]
FITS_NOTHING = 462_000
"""Bytes."""


@pytest.mark.parametrize(
    "changes",
    [
        {"train__prefetch_depth": 0},
        {"train__prefetch_depth": 3, "store__ddr": FITS_NOTHING, "store__threads": 2},
    ],
)
def test_ranks_end_in_the_bits_of_one_process_that_works_off_their_parts(
    tmp_path: Path, expected: tuple[str, float, float], changes: dict[str, Any]
) -> None:
    plan = Plan(2, {f"C{i + 1}": Sharding(kind, ranks) for i, (kind, ranks) in enumerate(SHARDINGS)})
    plan.save(tmp_path / "plan.json")
    found = run(train_rank, 2, tmp_path, config(tmp_path, "run", ranks__plan=str(tmp_path / "plan.json"), **changes))
    bits, auc, log_loss = expected
    assert {each.bits for each in found} == {bits}
    assert {each.test for each in found} == {found[0].test}
    assert found[0].test.auc == pytest.approx(auc, abs=1e-12)
    assert found[0].test.log_loss == pytest.approx(log_loss, abs=1e-7)
    assert {(each.step, each.rows, each.test.rows) for each in found} == {(STEPS, 2 * TRAIN_ROWS, TEST_ROWS)}
    assert [each.store for each in found[0].ranks] == [str(tmp_path / "run" / f"{rank}-of-2") for rank in range(2)]
    assert found[0].tiers == total([each.tiers for each in found[0].ranks])
    last = found[0].history[-1]
    assert (last.step, last.samples, last.bytes_read) == (STEPS, 2 * TRAIN_ROWS, found[0].tiers.ssd.bytes_read)
    assert found[1].history == found[0].history


def test_a_signal_to_one_rank_stops_all_at_one_step_and_they_resume_to_the_same_bits(
    tmp_path: Path, expected: tuple[str, float, float]
) -> None:
    made = config(tmp_path, "run")
    stopped = run(train_rank, 2, tmp_path, made, False, 17)
    assert {(each.interrupted, each.step, each.test) for each in stopped} == {(True, 17, None)}
    with pytest.raises(AssertionError, match="holds a run already: continue it with --resume"):
        run(train_rank, 2, tmp_path, made)
    resumed = run(train_rank, 2, tmp_path, made, True)
    assert {(each.interrupted, each.step, each.bits) for each in resumed} == {(False, STEPS, expected[0])}


def test_dynamic_ids_are_stopped_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    changes = {"data__hashing": "none", "embedding__ids": "dynamic", "embedding__num_embeddings": 20}
    changes |= {"embedding__admit_after": 2, "train__commit_every": 4}
    whole = run(train_rank, 2, tmp_path, config(tmp_path, "whole", train__prefetch_depth=0, **changes))
    run(train_rank, 2, tmp_path, config(tmp_path, "parts", **changes), False, 9)
    resumed = run(train_rank, 2, tmp_path, config(tmp_path, "parts", **changes), True)
    assert {(each.bits, each.test) for each in resumed} == {(whole[0].bits, whole[0].test)}


def train_as_started(words: list[str], port: int, dies_at: int) -> int:
    """The command's status; rank 1 ends in a step."""
    rank = as_torchrun_starts(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it stays from start to start
    trainer.warm_up = lambda _: None
    steps, real = iter(range(1, 1_000_000)), trainer.train_step

    def step(*arguments: Any) -> Any:
        if next(steps) == dies_at and rank:
            os._exit(DIED)
        return real(*arguments)

    trainer.train_step = step
    with contextlib.redirect_stdout(io.StringIO()):
        return main(words)


def test_ranks_started_again_after_one_died_end_in_the_same_bits(
    tmp_path: Path, expected: tuple[str, float, float]
) -> None:
    """As torchrun does with --max-restarts."""
    (tmp_path / "run.toml").write_text(to_toml(config(tmp_path, "run", train__commit_every=1)))
    agent = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    words = ["train", f"{tmp_path / 'run.toml'}", "--resume", "--digest", "--json", f"{tmp_path / 'summary.json'}"]
    assert run(train_as_started, 2, tmp_path, words, agent.port, 7, statuses=[0, DIED]) == [1, None]
    assert run(train_as_started, 2, tmp_path, words, agent.port, 0) == [0, 0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["step"], summary["bits"]) == (STEPS, expected[0])
    assert summary["rows"] < 2 * TRAIN_ROWS


TOWERS = [[f"C{i}" for i in range(start, 27, 2)] for start in (1, 2)]


def train_on_hosts(made: RunConfig, on_host: int, dies_at: int = 0) -> tuple[Summary, str]:
    """Goes on if there is a commit; and what the model has as embeddings. Rank 1 ends in a step."""
    os.environ["LOCAL_WORLD_SIZE"] = f"{on_host}"
    found, build, step = [], trainer.build_run, trainer.train_step

    def built(*arguments: Any) -> Any:
        found.append(build(*arguments))
        return found[0]

    def stepped(run: Any, *arguments: Any) -> Any:
        if dies_at and torch.distributed.get_rank() and next(steps) == dies_at:
            os._exit(DIED)
        return step(run, *arguments)

    trainer.build_run, trainer.train_step, steps = built, stepped, iter(range(1, 1_000_000))
    return train_rank(made, resume=True), type(found[0].model.embeddings).__name__


@pytest.mark.parametrize(("interaction", "dense"), [("dot", "sgd"), ("dcn", "adam")])
def test_towers_on_their_hosts_are_killed_resumed_and_served_by_one_process(
    tmp_path: Path, interaction: str, dense: str
) -> None:
    changes = {"model__towers": TOWERS, "model__interaction": interaction, "optimizer__dense": dense}
    changes |= {"optimizer__dense_clip_norm": 0.05, "optimizer__dense_lr": 0.1 if dense == "sgd" else 0.001}
    _, auc, log_loss = one_process(config(tmp_path, "one", **changes), 2)
    made = config(tmp_path, "run", **changes)
    whole = run(train_on_hosts, 2, tmp_path, config(tmp_path, "whole", **changes), 1)
    assert run(train_on_hosts, 2, tmp_path, made, 1, 7, statuses=[1, DIED]) == [None, None]
    resumed = run(train_on_hosts, 2, tmp_path, made, 1)
    for summary, kind in whole + resumed:
        assert (summary.bits, summary.test) == (whole[0][0].bits, whole[0][0].test)
        assert kind == "TowerTieredEmbeddingBagCollection"
    on_one_host = run(train_on_hosts, 2, tmp_path, made, 2)
    for summary, kind in on_one_host + run(train_on_hosts, 3, tmp_path, made, 3):
        assert (summary.bits, kind) == (whole[0][0].bits, "Towers")
    found = whole[0][0].test
    assert (found.auc, found.log_loss) == (pytest.approx(auc, abs=1e-4), pytest.approx(log_loss, abs=1e-5))
    with tierstore.open(tmp_path / "whole", mode="r", ddr="8MiB") as store:
        served = evaluated(made, Ranking(store, made, None)._model)
    assert (served.auc, served.log_loss) == (pytest.approx(found.auc, abs=1e-6), pytest.approx(found.log_loss))


def test_towers_of_other_hosts_are_joined_by_each_rank(tmp_path: Path) -> None:
    """Rows of a run that began on one host stay where they are, also when it goes on on two."""
    made = config(tmp_path, "run", model__towers=TOWERS)
    run(train_on_hosts, 2, tmp_path, made, 2, 7, statuses=[1, DIED])
    assert {kind for _, kind in run(train_on_hosts, 2, tmp_path, made, 1)} == {"Towers"}


@pytest.mark.soak
def test_torchrun_restarts_a_killed_rank_and_all_end_in_the_same_bits(
    tmp_path: Path, expected: tuple[str, float, float]
) -> None:
    (tmp_path / "run.toml").write_text(to_toml(config(tmp_path, "run", train__commit_every=1)))
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "tierstore"]
    command = [sys.executable, "-m", *words, "train", "run.toml", "--resume", "--json", "summary.json", "--digest"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    is_killed, told = False, []
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as torchrun:
        assert torchrun.stderr is not None
        for line in torchrun.stderr:
            told.append(line)
            if "committed version" in line and not is_killed:
                (rank,) = [each for each in psutil.Process(torchrun.pid).children() if each.environ()["RANK"] == "1"]
                rank.kill()
                is_killed = True
    assert torchrun.returncode == 0, "".join(told)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (is_killed, summary["step"], summary["bits"]) == (True, STEPS, expected[0])
    assert summary["rows"] < 2 * TRAIN_ROWS


def train_differently(made: RunConfig) -> None:
    rank = torch.distributed.get_rank()
    train_rank(dataclasses.replace(made, train=dataclasses.replace(made.train, seed=rank)))


def test_ranks_with_different_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 has train\.seed = 0, not 1 in its run file: give all ranks the"):
        run(train_differently, 2, tmp_path, config(tmp_path, "run"))
