"""Traces: drawn, described, recorded; what is read is not written over."""

import json
from pathlib import Path

import pytest

from tests.plan.hosts import shop_workload
from tierstore.cli import main
from tierstore.plan.presets import workload_toml


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.toml").write_text(workload_toml(shop_workload()))
    return tmp_path


def test_traces_are_drawn_and_described(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "shop.toml", "shop.npz", "--samples", "500", "--scale", "0.1"]
    assert main(["trace", *words]) == 0
    assert capsys.readouterr().out == "shop.npz: 4,000 lookups of 2 tables in 500 samples\n"
    assert main(["trace", *words]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["trace", *words, "--force"]) == 0
    assert main(["trace", "describe", "shop.npz", "--json", "found.json"]) == 0
    assert "4,000 accesses of " in capsys.readouterr().out
    assert json.loads((folder / "found.json").read_text())["batches"] == 2


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["generate", "shop.toml", "shop.toml", "--samples", "5", "--force"], 1),
        (["generate", "shop.toml", "x.npz", "--samples", "0"], 2),
        (["describe", "shop.toml", "--json", "shop.toml", "--force"], 1),
        (["describe", "shop.toml"], 2),
        (["describe", "no.npz"], 1),
        (["x"], 2),
    ],
)
def test_what_cannot_be_changes_nothing(words: list[str], status: int, folder: Path) -> None:
    before = (folder / "shop.toml").read_bytes()
    assert main(["trace", *words]) == status
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"shop.toml": before}
