"""The commands of ``tierstore plan``: each runs, and its errors are one line."""

import json
from pathlib import Path

import pytest

from tests.plan.asking import shop_plan
from tierstore.cli import entry as cli
from tierstore.plan import planning


@pytest.fixture
def plan_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file that can be answered, in a folder of its own with what it names."""
    monkeypatch.chdir(tmp_path)
    shop_plan(tmp_path)
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nfile = "shop.toml"\n[host]\nfile = "box.json"\n[setup]\nddr = "8MiB"\n')
    return path


def test_a_plan_is_printed_and_written(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "plan.toml", "--html", "plan.html", "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Answer\n  1 x box (")
    assert said.endswith("the report: plan.html\n")
    assert "\x1b" not in said
    page = plan_path.with_suffix(".html").read_text(encoding="utf-8")
    assert "<title>shop: a plan</title>" in page
    found = json.loads(plan_path.with_suffix(".json").read_text())
    assert found["asked"]["setup"]["ddr"] == "8MiB"
    assert f"{found['prediction']['samples_per_s']:,.0f} samples/s" in said


def test_what_prevents_files_is_told_before_the_work(
    plan_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "plan", None)
    assert cli.main(["plan", "run", "plan.toml", "--html", ".", "--force"]) == 1
    assert capsys.readouterr().err == "tierstore: . is a directory; choose the name of a file\n"
    assert cli.main(["plan", "run", "plan.toml", "--html", "out", "--json", f"{plan_path.parent}/out", "--force"]) == 2
    assert "--html and --json are both" in capsys.readouterr().err
    for words, status, said in (
        (["run"], 2, "give a plan file: tierstore plan run FILE.toml; --keys prints one with all keys\n"),
        (["run", "plan.toml", "--html", "nosuch/a"], 1, "nosuch is not a directory; make it first\n"),
        (["presets", "rcm1"], 2, "there is no preset 'rcm1'; did you mean 'rmc1'?\n"),
    ):
        assert cli.main(["plan", *words]) == status
        assert capsys.readouterr().err.startswith(f"tierstore: {said}")


def test_what_is_read_is_not_written_over(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "generate", "shop.toml", "shop.npz", "--samples", "2000"]) == 0
    capsys.readouterr()
    for words in (
        ["curve", "shop.npz", "--json", "shop.npz"],
        ["run", "plan.toml", "--json", "plan.toml"],
        ["run", "plan.toml", "--html", "shop.toml"],
        ["run", "plan.toml", "--json", "box.json"],
    ):
        before = Path(words[-1]).read_bytes()
        assert cli.main(["plan", *words, "--force"]) == 1
        assert capsys.readouterr().err == f"tierstore: {words[-1]} is read; choose another name to write to\n"
        assert Path(words[-1]).read_bytes() == before
