"""The GPU benchmarks run on the CPU, at tiny sizes: whether they work, not how fast anything is."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.common import Run, plain
from bench.data import ROOT
from bench.gpu.rig import Rig

from .support import DEVICES

CONFIG = tomllib.loads((ROOT / "bench" / "gpu.toml").read_text())
QUICK = CONFIG.pop("quick")


def test_quick_sizes_have_the_keys_of_the_whole_ones() -> None:
    assert set(CONFIG) - {"seed"} == set(QUICK) == {*gpu.PARTS}
    assert {name: set(QUICK[name]) for name in gpu.PARTS} == {name: set(CONFIG[name]) for name in gpu.PARTS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", gpu.PARTS)
def test_each_part_works(tmp_path: Path, name: str, device: str) -> None:
    part: Any = getattr(gpu, name)
    found = part.measure(Rig(device), QUICK[name], tmp_path)
    figures = json.loads(json.dumps(plain(found), allow_nan=False))
    report = part.tell(figures)
    assert report.tables
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    if name == "cached":
        assert [goal.met for goal in report.goals if goal.exactly is not None] == [True]
        assert len({case["bits"] for case in figures["cases"].values()}) == 1


@pytest.mark.gpu
def test_events_time_the_work_and_not_its_launch() -> None:
    rig = Rig("cuda")
    value = torch.zeros(2**28, dtype=torch.uint8, device=rig.device)
    cycles = 5_000_000
    slept = rig.times({"sleep": lambda _: torch.cuda._sleep(cycles)}, repetitions=3)["sleep"]
    assert 1e-3 < min(slept) <= max(slept) < 1e-1
    copied = rig.times({"copy": lambda _: value.add_(1)}, repetitions=5)["copy"]
    assert max(copied) < min(slept)
    assert rig.copy_bytes_per_s() > 1e11


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.run(Run(config={}, quick=False, folder=tmp_path))
    assert not ended.value.code
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"
    assert list(tmp_path.iterdir()) == []
