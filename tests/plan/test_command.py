"""The commands of ``tierstore plan``: each runs, and its errors are one line."""

import json
from pathlib import Path

import pytest

from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.cli import entry as cli
from tierstore.plan import planning
from tierstore.plan.parts import write_host
from tierstore.plan.presets import workload_toml


@pytest.fixture
def plan_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file that can be answered, in a folder of its own with what it names."""
    monkeypatch.chdir(tmp_path)
    write_host(SHOP_HOST, tmp_path / "box.json")
    (tmp_path / "shop.toml").write_text(workload_toml(shop_workload()))
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nfile = "shop.toml"\n[host]\nfile = "box.json"\n[setup]\nddr = "8MiB"\n')
    return path


def test_a_plan_is_printed_and_written(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "run", "plan.toml", "--html", "plan.html", "--json", "plan.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Asked\n  shop: 2 tables")
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
        for force in ([], ["--force"]):
            assert cli.main(["plan", *words, *force]) == 1
            assert capsys.readouterr().err == f"tierstore: {Path(words[-1])} is read; choose another name to write to\n"
            assert Path(words[-1]).read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run"], 2, "tierstore: give a plan file: tierstore plan run FILE.toml; --keys prints one with all keys\n"),
        (["run", "nosuch.toml"], 2, "tierstore: nosuch.toml: there is no such plan file\n"),
        (["run", "plan.toml", "--set", "setup.dr=1"], 2, 'tierstore: --set setup.dr=1: unknown key "dr" in [setup]'),
        (["run", "plan.toml", "--html", "nosuch/a"], 1, "tierstore: nosuch is not a directory; make it first\n"),
        (["presets", "rcm1"], 2, "tierstore: there is no preset 'rcm1'; did you mean 'rmc1'?\n"),
    ],
)
def test_errors_are_one_line_with_a_status(
    plan_path: Path, arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == status
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert errors.count("\n") == 1


def test_a_plan_of_a_generated_trace(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", "generate", "shop.toml", "shop.npz", "--samples", "5000"]) == 0
    assert cli.main(["plan", "plan.toml", "--set", "trace.path=shop.npz"]) == 0
    assert "accesses: shop.npz, 40,000 in 20 batches" in " ".join(capsys.readouterr().out.split())
