"""The example of docs/distributed.md, as its reader starts it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import torch

import tierstore
from bench.data import ROOT, examples


def test_example_trains_and_goes_on(tmp_path: Path) -> None:
    example, *_ = examples("docs/distributed.md")
    (tmp_path / "train.py").write_text(example)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    weights: dict[str, torch.Tensor] = {}
    for steps in (3, 6):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for rank in ("0-of-2", "1-of-2"):
            with tierstore.open(tmp_path / "clicks" / rank, mode="r") as store:
                assert store.extra["extra"] == {"step": steps}
                dense = torch.load(io.BytesIO(store.tensors()["tierstore.checkpoint"].numpy()))
            assert all(int(each["step"]) == steps for each in dense["optimizers"][0]["state"].values())
            weights = weights or dense["model"]
            torch.testing.assert_close(dense["model"], weights, atol=0.01, rtol=0)  # of Adam's steps of 0.001
