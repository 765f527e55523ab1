"""``tierstore plan place``."""

import json
from pathlib import Path

import pytest

from tests.plan.commands import run
from tierstore.plan.placement import STRATEGIES


def test_all_strategies_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    assert run("place", "rmc3", "--host", "node-1xh100", "--hosts", 2, "--json", path) == 0
    text = capsys.readouterr().out
    plans = json.loads(path.read_text())["plans"]
    assert {plan["strategy"] for plan in plans} == set(STRATEGIES)
    assert [plan["strategy"] for plan in plans] == [line.split()[0] for line in text.splitlines()[1:6]]
    assert f"{plans[0]['strategy']}: rmc3 on 2 x node-1xh100" in text


def test_one_strategy_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("mlperf-dlrm-v2", "--host", "node-1xh100", "--strategy", "gpu", "--hbm-share", "0.5")
    assert run("place", *given) == 1
    assert "does not fit" in capsys.readouterr().out


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("place", "rmc1", "--host", "node-1xh100", "--strategy", "gpus")
    assert "gpu" in capsys.readouterr().err
    with pytest.raises(ValueError, match="ddr_share"):
        run("place", "rmc1", "--host", "node-1xh100", "--ddr-share", "1.5")
