"""The GPU benchmarks run on the CPU, at tiny sizes: whether they work, not how fast anything is."""

import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import Report, Run, plain
from bench.data import ROOT
from bench.gpu import runner
from bench.gpu.rig import Rig
from bench.gpu.runner import PARTS, run

from .support import DEVICES

CONFIG = tomllib.loads((ROOT / "bench" / "gpu.toml").read_text())
QUICK = CONFIG.pop("quick")
TOTAL_SECONDS_MAX = 480


def test_quick_sizes_have_the_keys_of_the_whole_ones_which_have_time() -> None:
    assert set(CONFIG) - {"seed"} == set(QUICK) == {*PARTS}
    assert {name: set(QUICK[name]) for name in PARTS} == {name: set(CONFIG[name]) for name in PARTS}
    assert sum(CONFIG[name]["limit_s"] for name in PARTS) < TOTAL_SECONDS_MAX


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARTS)
def test_each_part_works(tmp_path: Path, name: str, device: str) -> None:
    part = importlib.import_module(f"bench.gpu.{name}")
    found = list(part.measure(Rig(device), QUICK[name], tmp_path))
    assert [len(each["left"]) for each in found] == list(reversed(range(len(found))))
    figures = json.loads(json.dumps(plain(found[-1]), allow_nan=False))
    report: Report = part.tell(figures)
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


def make_request(folder: Path, saved: list[Report], *, quick: bool = True, **config: Any) -> Run:
    """Of the two parts that take least."""
    told = {"seed": 1} | config
    return Run(config=told, quick=quick, folder=folder, parts=("cached", "latency"), save=saved.append)


def test_a_part_that_fails_does_not_take_the_others_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved: list[Report] = []
    report = run(make_request(tmp_path, saved, latency=QUICK["latency"], cached={"limit_s": 100}))
    assert report.figures["cached"]["failed"] == "KeyError: 'steps'"
    assert report.figures["latency"]["cases"]
    assert any("cached failed" in note for note in report.notes)
    assert any("NO RESULTS" in note for note in report.notes)
    assert "KeyError" in capfd.readouterr().err
    # After each part, what there was.
    assert [[*each.figures] for each in saved] == [["cached"], ["cached", "latency"]]


def test_a_part_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE_SECONDS", 0.1)
    config = {"latency": QUICK["latency"] | {"limit_s": 0.1}, "cached": QUICK["cached"] | {"limit_s": 0.1}}
    report = run(make_request(tmp_path, [], **config))
    assert all("killed after" in report.figures[name]["failed"] for name in ("cached", "latency"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(make_request(tmp_path, [], quick=False))
    assert not ended.value.code
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"
    assert list(tmp_path.iterdir()) == []
