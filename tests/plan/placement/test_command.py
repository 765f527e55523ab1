"""``tierstore plan place``, with a host and a workload of its own."""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.plan.placement.support import drive, host_of, workload_of
from tests.plan.placement.test_strategies import Asked
from tierstore.plan.placement import through_tiers
from tierstore.plan.placement.command import add_place_arguments, run_place


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    parts, presets = ModuleType("tierstore.plan.parts"), ModuleType("tierstore.plan.presets")
    parts.load_host = lambda name: host_of(2, storage=(drive(),), name=name)  # type: ignore[attr-defined]
    presets.load_workload = lambda name: workload_of(3)  # type: ignore[attr-defined]
    for module in (parts, presets):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(through_tiers, "planned_store", lambda policy: Asked())
    parser = argparse.ArgumentParser()
    add_place_arguments(parser)
    return parser


def test_all_strategies_are_compared(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plans.json"
    assert run_place(parser.parse_args(["w", "--host", "h", "--hosts", "2", "--json", str(path)])) == 0
    text = capsys.readouterr().out
    plans = json.loads(path.read_text())["plans"]
    assert [plan["strategy"] for plan in plans] == [line.split()[0] for line in text.splitlines()[1:6]]
    assert f"{plans[0]['strategy']}: toy on 2 x h" in text


def test_one_strategy_that_does_not_fit(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["w", "--host", "h", "--strategy", "gpu", "--hbm-share", "0.5"]
    assert run_place(parser.parse_args(given)) == 1
    assert "does not fit" in capsys.readouterr().out


def test_wrong_words(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["w", "--host", "h", "--strategy", "gpus"])
    assert "gpu" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ddr_share"):
        run_place(parser.parse_args(["w", "--host", "h", "--ddr-share", "1.5"]))
