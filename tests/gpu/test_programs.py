"""The GPU benchmarks run on the CPU, at tiny sizes: whether they work, not how fast anything is."""

import importlib
import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from bench.common import Report, Run
from bench.data import ROOT
from bench.gpu import run, runner
from bench.gpu.compulsory import Work, pooled_bytes, updated_bytes
from bench.gpu.ids import Zipf
from bench.gpu.part import PARTS, Part
from bench.gpu.rig import Rig, rounds_of
from bench.gpu.rows_report import _median, _shown
from bench.gpu.stores import WaitLane, hbm_bytes
from tierstore.hbm.lanes import open_lane

from .support import DEVICES

CONFIG = tomllib.loads((ROOT / "bench" / "gpu.toml").read_text())
QUICK = CONFIG.pop("quick")
TOTAL_SECONDS_MAX = 480


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig("cpu")


def test_quick_sizes_have_the_keys_of_the_whole_ones() -> None:
    assert set(QUICK) == {*PARTS, "total_s"}
    assert set(CONFIG) == {*PARTS, "total_s", "seed"}
    for name in PARTS:
        assert set(QUICK[name]) == set(CONFIG[name]), name


def test_all_parts_have_time_within_the_whole() -> None:
    assert sum(CONFIG[name]["limit_s"] for name in PARTS) <= CONFIG["total_s"] < TOTAL_SECONDS_MAX


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PARTS)
def test_each_part_works(tmp_path: Path, name: str, device: str) -> None:
    found: list[Part] = list(importlib.import_module(f"bench.gpu.{name}").run(Rig(device), QUICK[name], tmp_path))
    part = found[-1]
    assert [len(each.left) for each in found] == list(reversed(range(len(found))))
    assert part.tables
    for table in part.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert Part.of_json(json.loads(json.dumps(asdict(part), allow_nan=False))) == part
    if name == "cached":
        bits = {case["bits"] for case in part.figures["cases"].values()}
        assert [goal.met for goal in part.goals if goal.exactly is not None] == [True]
        assert len(bits) == 1
    if name == "rows":
        assert len(part.goals) == 3
    if name == "ssd":
        assert all(found["read_bytes"] > 0 for found in part.figures["rounds"])


def test_zipf_is_as_skewed_as_it_says(rig: Rig) -> None:
    zipf = Zipf(rig, 1000, 1.05)
    counts = torch.bincount(zipf.ranks(200_000), minlength=1000).double()
    wanted = torch.arange(1, 1001, dtype=torch.float64) ** -1.05
    assert torch.allclose(counts[:10] / counts.sum(), (wanted / wanted.sum())[:10], rtol=0.05)
    drawn = torch.bincount(zipf.draw(200_000), minlength=1000)
    assert sorted(drawn.tolist())[-1] == pytest.approx(float(counts.max()), rel=0.05)
    for rows in (1, 2, 3, 10, 1000):
        ranks = torch.arange(rows)
        assert sorted((ranks * Zipf(rig, rows, 0.0)._step % rows).tolist()) == ranks.tolist()
    uniform = torch.bincount(Zipf(rig, 10, 0.0).draw(100_000), minlength=10)
    assert uniform.min() > 9000


def test_actions_take_turns_and_are_made_ready(rig: Rig) -> None:
    happened: list[tuple[str, int]] = []
    seconds = rig.times(
        {"a": lambda number: happened.append(("a", number)), "b": lambda number: happened.append(("b", number))},
        repetitions=2,
        before={"b": lambda number: happened.append(("before b", number))},
    )
    assert [len(each) for each in seconds.values()] == [2, 2]
    calls = rig.calls({"a": lambda number: happened.append(("a", number))}, repetitions=2)
    assert [call.done >= call.returned > 0 for call in calls["a"]] == [True, True]
    numbers = [number for name, number in happened if name == "a"]
    assert numbers == list(range(rounds_of(2)))
    assert happened[:3] == [("a", 0), ("before b", 0), ("b", 0)]


def test_compulsory_bytes_are_counted_once() -> None:
    # 7 ids of 4 bytes, 4 offsets; 5 rows of 16 floats, 3 results: each result is written, and not zeroed and read.
    work = Work(positions=7, distinct=5, bags=3, weight_bytes=64, result_bytes=64)
    assert pooled_bytes(work) == 7 * 4 + 4 * 4 + 5 * 64 + 3 * 64
    # Rows and their state are read and written, gradients read.
    assert updated_bytes(work, 0) == 7 * 4 + 4 * 4 + 2 * 5 * 64 + 3 * 64
    assert updated_bytes(work, 4) - updated_bytes(work, 0) == 2 * 5 * 4


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


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_a_budget_has_the_rows_that_were_asked_for(store_dir: Path, share: float) -> None:
    rows = 40_000
    with tierstore.open(store_dir, ddr="32MiB", hbm=hbm_bytes(share * rows, 16 * 4)) as store:
        store.create_table(
            tierstore.TableConfig(name="t", num_embeddings=rows, embedding_dim=16, optimizer=tierstore.optim.SGD())
        )
        hot = store["t"].pool.tier
        assert hot is not None
        assert hot.cache.capacity == pytest.approx(share * rows, rel=0.03, abs=70)


@pytest.mark.parametrize("device", DEVICES)
def test_a_lane_that_is_watched_is_a_lane(device: str) -> None:
    lane = WaitLane(open_lane(torch.device(device)), Rig(device))
    lane.recording = True
    with lane.side(), lane.side():
        mark = lane.mark()
        lane.follow(mark)
    assert lane.waited_seconds() == 0
    lane.follow(mark)
    mark.synchronize()
    assert lane.waited_seconds() >= 0
    assert lane._waits == []


def test_what_was_not_measured_is_shown_as_nothing() -> None:
    case = {"seconds": {"a": {"median": 2.0}}}
    assert _shown(_median(case, "a")) == "2.00"
    assert _shown(_median(case, "b")) == ""


def make_request(folder: Path, saved: list[Report], *, quick: bool = True, **config: Any) -> Run:
    """Of the two parts that take least."""
    told = {"seed": 1, "total_s": 300} | config
    return Run(config=told, quick=quick, folder=folder, parts=("admit", "limits"), save=saved.append)


def test_a_part_that_fails_does_not_take_the_others_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved: list[Report] = []
    report = run(make_request(tmp_path, saved, limits=QUICK["limits"], admit={"limit_s": 100}))
    assert report.figures["failed"] == {"admit": "KeyError: 'slots'"}
    assert report.figures["limits"]["bytes_per_s"]
    assert any("admit failed" in note for note in report.notes)
    assert "NO RESULTS" in report.notes[-1]
    assert "KeyError" in capfd.readouterr().err
    # After each part, what there was.
    assert [set(each.figures) & set(PARTS) for each in saved] == [set(), {"limits"}]


def test_a_part_without_time_gives_what_it_has(tmp_path: Path) -> None:
    config = {"admit": QUICK["admit"] | {"limit_s": 0.01}, "limits": QUICK["limits"]}
    report = run(make_request(tmp_path, [], total_s=0.02, **config))
    assert len(report.figures["admit"]["cases"]) == 1
    assert report.figures["ran_out"] == {
        "admit": ["exponent 1.05, 50% hits", "exponent 0.0, 100% hits", "exponent 0.0, 50% hits"]
    }
    assert any("admit ended before" in note for note in report.notes)
    assert "no time was left" in report.figures["failed"]["limits"]


def test_a_part_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_GRACE_SECONDS", 0.1)
    config = {"admit": QUICK["admit"] | {"limit_s": 0.1}, "limits": QUICK["limits"] | {"limit_s": 0.1}}
    report = run(make_request(tmp_path, [], **config))
    assert set(report.figures["failed"]) == {"admit", "limits"}
    assert "killed after" in report.figures["failed"]["admit"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(make_request(tmp_path, [], quick=False))
    assert not ended.value.code
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"
    assert list(tmp_path.iterdir()) == []
