"""The trainer over ranks: the bits of one process that works off the ranks' parts, whatever interrupts it, and where
hosts have disks of their own. Ranks that die or hang are named to the others."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from bench.data import ROOT, examples
from tests.train.runs import TEST_ROWS, TRAIN_ROWS, config_of
from tierstore.cli import main
from tierstore.dist import Plan, ShardedTieredEmbeddingBagCollection, Sharding, open_sharded
from tierstore.metrics import Evaluation, Predictions
from tierstore.pool.stats import total
from tierstore.serve.models.ranking import Ranking
from tierstore.settings.sections import to_toml
from tierstore.train import RunConfig, Summary, demo, train, trainer
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.summary import digest_bits

from .ranks import DIED, as_torchrun_starts, run, take_torchruns_environment

BATCH = 23
"""Of 300 rows: parts of a batch differ in length, and one of the last batch is empty."""
STEPS = 2 * math.ceil(TRAIN_ROWS / BATCH)


def config(folder: Path, store: str, **changes: object) -> RunConfig:
    return config_of(folder, store, **{"train__batch_size": BATCH, "train__commit_every": 4, **changes})


def before_step(number: int, rank: int, act: Callable[[], object]) -> None:
    trainer.warm_up = lambda _: None
    steps, real = iter(range(1, 1_000_000)), trainer.train_step

    def step(*arguments: Any) -> Any:
        if next(steps) == number and torch.distributed.get_rank() == rank:
            act()
        return real(*arguments)

    trainer.train_step = step


def die() -> None:
    os._exit(DIED)


def train_rank(made: RunConfig, resume: bool = False, stop_at: int = 0) -> Summary:
    """As rank; rank 0 gets SIGTERM in the step ``stop_at``."""
    before_step(stop_at, 0, lambda: signal.raise_signal(signal.SIGTERM))
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
    return one_process(config(tmp_path_factory.mktemp("one"), "store"), 2)


SHARDINGS: list[tuple[Any, tuple[int, ...]]] = [
    *(("table_wise", (1,)), ("column_wise", (0, 1)), ("data_parallel", (0, 1)), ("table_row_wise", (1, 0))),
    ("row_wise", (0, 1)),
]
FITS_NOTHING = 462_000
"""Bytes."""


def test_ranks_end_in_the_bits_of_one_process_that_works_off_their_parts(tmp_path, expected):
    changes = {"train__prefetch_depth": 3, "store__ddr": FITS_NOTHING, "store__threads": 2}
    plan = Plan(2, {f"C{i + 1}": Sharding(kind, ranks) for i, (kind, ranks) in enumerate(SHARDINGS)})
    plan.save(tmp_path / "plan.json")
    found = run(train_rank, 2, tmp_path, config(tmp_path, "run", ranks__plan=str(tmp_path / "plan.json"), **changes))
    bits, auc, log_loss = expected
    assert {each.bits for each in found} == {bits}
    assert all(each.test == found[0].test for each in found)
    assert found[0].test.auc == pytest.approx(auc, abs=1e-12)
    assert found[0].test.log_loss == pytest.approx(log_loss, abs=1e-7)
    assert {(each.step, each.rows, each.test.rows) for each in found} == {(STEPS, 2 * TRAIN_ROWS, TEST_ROWS)}
    assert [each.store for each in found[0].ranks] == [str(tmp_path / "run" / f"{rank}-of-2") for rank in range(2)]
    assert found[0].tiers == total([each.tiers for each in found[0].ranks])
    last = found[0].history[-1]
    assert (last.step, last.samples, last.bytes_read) == (STEPS, 2 * TRAIN_ROWS, found[0].tiers.ssd.bytes_read)
    assert found[1].history == found[0].history


DYNAMIC: dict[str, object] = {"data__hashing": "none", "embedding__ids": "dynamic", "embedding__num_embeddings": 20}
DYNAMIC |= {"embedding__admit_after": 2, "train__batch_size": 75, "train__epochs": 1}  # 4 steps
CLASS: dict[str, object] = {"model__class": "tests.train.nets:Net", "model__args": {"norm": False, "spare": True}}
CLASS |= {"data__shuffle_rows": 46, "embedding__tables": {"C1": {"dim": 6}}, "optimizer__sparse_lr": 0.3}
CLASS |= {"train__test_every_steps": 5, "train__patience": 2}
CLASS |= {"metrics__names": ["ne", "auc", "gauc"], "metrics__window": 60, "metrics__group": "C26"}


@pytest.mark.parametrize("changes", [{}, DYNAMIC, CLASS], ids=["plain", "dynamic", "class"])
def test_a_signal_to_one_rank_stops_all_at_one_step_and_they_resume_to_the_same_bits(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    whole = run(train_rank, 2, tmp_path, config(tmp_path, "whole", train__prefetch_depth=0, **changes))
    stopped = run(train_rank, 2, tmp_path, config(tmp_path, "parts", **changes), False, 2)
    assert {(each.interrupted, each.step, each.test) for each in stopped} == {(True, 2, None)}
    with pytest.raises(AssertionError, match="holds a run already: continue it with --resume"):
        run(train_rank, 2, tmp_path, config(tmp_path, "parts", **changes))
    resumed = run(train_rank, 2, tmp_path, config(tmp_path, "parts", **changes), True)
    assert [(each.bits, each.test) for each in resumed] == [(whole[0].bits, whole[0].test)] * 2
    windows = [[{**own, "first": 0} for own in each.windows] for each in (*resumed, *whole)]  # that is of a process
    assert windows == windows[:1] * 4, "the window of before went on"
    assert bool(whole[0].windows) == (changes is CLASS)
    for refused in ({"train__keep_best": True, "train__test_each_epoch": True}, {"train__commit_seconds": 1.0}):
        with pytest.raises(AssertionError, match=r"train\.keep_best, .* for one process; over ranks .* store\.keep"):
            run(train_rank, 2, tmp_path, config(tmp_path, "n", **changes, **refused))


def train_as_started(words: list[str], port: int, dies_at: int) -> int:
    """The command's status; rank 1 ends in a step."""
    before_step(dies_at, 1, die)
    as_torchrun_starts(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it stays from start to start
    with contextlib.redirect_stdout(io.StringIO()):
        return main(words)


def test_ranks_started_again_after_one_died_end_the_same(tmp_path: Path, expected: tuple[str, float, float]) -> None:
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
    found, build = [], trainer.build_run
    before_step(dies_at, 1, die)

    def built(*arguments: Any) -> Any:
        found.append(build(*arguments))
        return found[0]

    trainer.build_run = built
    return train_rank(made, resume=True), type(found[0].model.embeddings).__name__


def test_towers_on_their_hosts_are_killed_resumed_and_served_by_one_process(tmp_path: Path) -> None:
    changes = {"model__towers": TOWERS, "model__interaction": "dcn", "optimizer__dense": "adam"}
    changes |= {"optimizer__dense_clip_norm": 0.05, "optimizer__dense_lr": 0.001}
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


def train_differently(made: RunConfig) -> None:
    rank = torch.distributed.get_rank()
    train_rank(dataclasses.replace(made, train=dataclasses.replace(made.train, seed=rank)))


def test_ranks_with_different_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 has train\.seed = 0, not 1 in its run file: give all ranks the"):
        run(train_differently, 2, tmp_path, config(tmp_path, "run"))


RANKS, LOCAL = 4, 2
HOST_SHARDINGS: list[Any] = [
    *(("table_row_wise", (0, 1)), ("table_row_wise", (3, 2)), ("table_wise", (3,)), ("data_parallel", (0, 1, 2, 3))),
    *(("column_wise", (0, 2)), ("row_wise", (0, 1, 2, 3))),
]


def train_in_folders(made: RunConfig, folder: Path | None, dying: int = -1) -> Summary:
    """As rank, on a host that has a folder, or all in one folder; rank ``dying`` ends in the seventh step."""
    os.environ["LOCAL_WORLD_SIZE"] = f"{LOCAL}"
    before_step(7, dying, die)
    if folder is not None:
        path = str(folder / f"host-{torch.distributed.get_rank() // LOCAL}" / "run")
        made = dataclasses.replace(made, store=dataclasses.replace(made.store, path=path))
    return train(made, resume=True, bits=True)


def test_hosts_lose_a_rank_and_go_on_to_the_bits_of_ranks_on_one_disk(tmp_path: Path) -> None:
    plan = Plan(RANKS, {f"C{number + 1}": Sharding(kind, ranks) for number, (kind, ranks) in enumerate(HOST_SHARDINGS)})
    plan.save(tmp_path / "plan.json")
    made = config(tmp_path, "one", ranks__plan=f"{tmp_path / 'plan.json'}", train__commit_every=3, train__epochs=1)
    expected = run(train_in_folders, RANKS, tmp_path, made, None)
    with pytest.raises(AssertionError, match=r"RankError: ranks? [\d, ]*2[\d, ]* ended, or did not answer"):
        run(train_in_folders, RANKS, tmp_path, made, tmp_path, 2)
    found = run(train_in_folders, RANKS, tmp_path, made, tmp_path)
    assert {each.bits for each in found} == {expected[0].bits}
    assert 0 < found[0].rows < expected[0].rows
    for host in range(RANKS // LOCAL):
        own = [f"{rank}-of-{RANKS}" for rank in range(host * LOCAL, (host + 1) * LOCAL)]
        assert sorted(path.name for path in (tmp_path / f"host-{host}" / "run").glob("*-of-*")) == own
    assert [each.store for each in found[0].ranks] == [
        str(tmp_path / f"host-{rank // LOCAL}" / "run" / f"{rank}-of-{RANKS}") for rank in range(RANKS)
    ]


TIMEOUT_S, SIZE, LOST = 2, 3, 1
IDS = tierstore.KeyedJaggedTensor(["t"], torch.arange(100), lengths=torch.ones(100, dtype=torch.int64))


def hang(folder: Path) -> tuple[str, int]:
    """(what ranks are told of one that does not answer, the version that all reopen)."""
    with open_sharded(folder, ddr="500KiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=100, embedding_dim=8))
        module = ShardedTieredEmbeddingBagCollection(store)
        module(IDS).values().sum().backward()
        store.commit()
        if store.ranks.rank == LOST:
            time.sleep(3 * TIMEOUT_S)
        with pytest.raises(RuntimeError) as caught:
            module(IDS)
        return str(caught.value), store.version


def reopen(folder: Path) -> int:
    with open_sharded(folder, ddr="500KiB", threads=1) as store:
        ShardedTieredEmbeddingBagCollection(store)(IDS)
        return store.version


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    found = run(hang, SIZE, tmp_path, tmp_path / "store", timeout_s=TIMEOUT_S)
    for told, version in (found[rank] for rank in range(SIZE) if rank != LOST):
        assert told.startswith(f"rank {LOST} ended, or did not answer")
        assert version == 1
    assert run(reopen, SIZE, tmp_path, tmp_path / "store") == [1] * SIZE


def follow(folder: Path, example: str) -> None:
    os.chdir(folder)
    torch.distributed.init_process_group = lambda *_: None  # the group is there, and ends with the rank
    torch.distributed.destroy_process_group = lambda *_: None
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(example, "train.py", "exec"), {})


def test_example_trains_and_goes_on(tmp_path: Path) -> None:
    example, *_ = examples("docs/distributed.md")
    weights: dict[str, torch.Tensor] = {}
    for steps in (3, 6):
        run(follow, 2, tmp_path, tmp_path, example)
        for rank in ("0-of-2", "1-of-2"):
            with tierstore.open(tmp_path / "clicks" / rank, mode="r") as store:
                assert store.extra["extra"] == {"step": steps}
                dense = torch.load(io.BytesIO(store.tensors()["tierstore.checkpoint"].numpy()))
            assert all(int(each["step"]) == steps for each in dense["optimizers"][0]["state"].values())
            weights = weights or dense["model"]
            torch.testing.assert_close(dense["model"], weights, atol=0.01, rtol=0)  # of Adam's steps of 0.001


def test_example_of_a_model_goes_on(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "sharded_model.py").read_text()
    for steps in (60, 120):
        run(follow, 2, tmp_path, tmp_path, example)
        with tierstore.open(tmp_path / "sharded-store", mode="r") as store:
            assert (store.extra, list(store.tables)) == ({"step": steps}, ["user", "item"])
            assert store["item"].state.step == steps


def command(words: list[str]) -> None:
    take_torchruns_environment()
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0


def test_the_demo_shares_tables_among_ranks_and_ends_in_equal_bits(tmp_path, capfd, monkeypatch):
    def torchrun(words: list[str], **_: Any) -> SimpleNamespace:
        launcher = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tierstore"]
        assert words[:8] == [sys.executable, *launcher]
        run(command, 2, tmp_path, words[8:])
        return SimpleNamespace(returncode=0)

    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "_BUDGET_SHARE", 0.5)  # of few rows a tenth is no budget
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=torchrun))
    assert demo.run_demo(folder, rows=6_000, ranks=2)
    output = capfd.readouterr().out
    assert "divided among 2 ranks." in output
    shown = r"^\$ .*(torchrun|torch.distributed.run) --nproc-per-node 2 -m tierstore train"
    assert len(re.findall(shown, output, re.MULTILINE)) == 2
    assert "Both ended in the same bits" in output
    for rank in ("0-of-2", "1-of-2"):
        with tierstore.open(folder / "tiered" / rank, mode="r") as store:
            assert store.version
