"""The demonstration, small."""

import json
import shlex

import pytest

from tierstore.cli import main
from tierstore.train import demo


@pytest.mark.slow
def test_a_small_demonstration_ends_in_equal_bits_and_names_commands_that_work(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "demo"
    assert demo.run_demo(folder, rows=14_000)
    output = capfd.readouterr().out
    assert "best AUC anyone can reach on the test rows is 0." in output
    assert "Both ended in the same bits" in output
    tiered, in_memory = (json.loads((folder / f"{name}.json").read_text()) for name in ("tiered", "in-memory"))
    assert tiered["bits"] == in_memory["bits"]
    assert tiered["tiers"]["ddr"]["evictions"] > 0
    assert in_memory["tiers"]["ddr"]["evictions"] == 0
    assert tiered["tiers"]["ddr"]["bytes"] < in_memory["tiers"]["ddr"]["bytes"] / 5
    commands = [line.strip() for line in output.partition("What to try next:")[2].splitlines()]
    commands = [shlex.split(line)[1:] for line in commands if line.startswith("tierstore ")]
    assert [command[0] for command in commands] == ["inspect", "verify", "train", "train", "train"]
    for command in commands:
        assert main(command) == 0, command
    lfu = json.loads((folder / "lfu.json").read_text())
    assert lfu["bits"] == tiered["bits"]


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="is no demonstration; choose another folder with --dir"):
        demo.run_demo(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no demonstration"):
        demo.run_demo(tmp_path / "file")
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_earlier_demonstration_is_overwritten_with_notice(tmp_path, capsys):
    folder = tmp_path / "demo"
    demo._empty(folder)
    (folder / "old").write_text("")
    demo._empty(folder)
    assert "Overwriting the demonstration" in capsys.readouterr().out
    assert not (folder / "old").exists()


def test_unequal_bits_are_said_loudly():
    assert "DIFFERENT bits" in demo._verdict(False, {}, None)
