"""What a reader starts by torchrun, in ranks that are forked here: the example of docs/distributed.md, the demo."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from bench.data import ROOT, examples
from tierstore.cli import main
from tierstore.train import demo

from .ranks import run, take_torchruns_environment


def follow(folder: Path, example: str) -> None:
    os.chdir(folder)
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # the group is there, and ends with the rank
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
            assert store.extra == {"step": steps}
            assert list(store.tables) == ["user", "item"]
            assert store["item"].state.step == steps


def command(words: list[str]) -> None:
    """As torchrun starts it, in the group that is there."""
    take_torchruns_environment()
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(words) == 0


def test_the_demo_shares_tables_among_ranks_and_ends_in_equal_bits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def torchrun(words: list[str], **_: Any) -> SimpleNamespace:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tierstore"]
        assert words[:7] == [sys.executable, *launcher]
        run(command, 2, tmp_path, words[7:])
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
    with pytest.raises(ValueError, match="several train on the CPU for now"):
        demo.run_demo(tmp_path / "other", device="cuda", ranks=2)
