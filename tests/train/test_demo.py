"""The demonstration, small."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from tierstore.cli import main
from tierstore.train import demo


def in_process(command, **_):
    """What its processes do: to start one takes longer than to train these few rows."""
    assert command[:5] == [sys.executable, "-P", "-m", "tierstore", "train"]
    return SimpleNamespace(returncode=main(command[4:]))


def test_a_small_demonstration_ends_in_equal_bits_and_names_commands_that_work(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=in_process))
    monkeypatch.setattr(demo, "_BUDGET_SHARE", 0.3)  # of few rows a tenth is no budget
    assert demo.run_demo(folder, rows=4_000, hbm="1MiB")
    output = capfd.readouterr().out
    assert "best AUC anyone can reach on the test rows is 0." in output
    assert "Both ended in the same bits" in output
    assert ", and 1MiB of HBM on cpu." in output
    assert "hit rate of the HBM" in output
    tiered, in_memory = (json.loads((folder / f"{name}.json").read_text()) for name in ("tiered", "in-memory"))
    assert tiered["bits"] == in_memory["bits"]
    assert tiered["tiers"]["ddr"]["evictions"] > 0
    assert in_memory["tiers"]["hbm"]["evictions"] < tiered["tiers"]["hbm"]["evictions"] / 100
    commands = [line.strip() for line in output.partition("What to try next:")[2].splitlines()]
    commands = [shlex.split(line.partition("tierstore ")[2]) for line in commands if "tierstore " in line]
    assert [command[0] for command in commands] == ["inspect", "verify", "train", "train", "train"]
    for command in commands:
        assert main(command) == 0, command
    (opened,) = (shlex.split(line) for line in output.splitlines() if "-m webbrowser" in line)
    assert Path(url2pathname(urlsplit(opened[-1]).path)) == folder / "demo.html"
    page = (folder / "demo.html").read_text(encoding="utf-8")
    for run in (tiered, in_memory):
        assert f"{run['samples_per_second']:,.0f}" in page
        assert run["history"][-1]["bytes_read"] == run["tiers"]["ssd"]["bytes_read"]
    lfu = json.loads((folder / "lfu.json").read_text())
    assert lfu["bits"] == tiered["bits"]


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="is no demonstration; choose another folder with --dir"):
            demo.run_demo(taken)
    assert (tmp_path / "mine").read_text() == "precious"
