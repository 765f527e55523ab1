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
from tierstore.train.config import load


def in_process(command, **_):
    """What its processes do: to start one takes longer than to train these few rows."""
    assert command[:4] == [sys.executable, "-m", "tierstore", "train"]
    return SimpleNamespace(returncode=main(command[3:]))


def test_a_small_demonstration_ends_in_equal_bits_and_names_commands_that_work(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=in_process))
    monkeypatch.setattr(demo, "_BUDGET_SHARE", 0.3)  # of few rows a tenth is no budget
    assert demo.run_demo(folder, rows=6_000)
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
    (opened,) = (shlex.split(line) for line in output.splitlines() if "-m webbrowser" in line)
    assert Path(url2pathname(urlsplit(opened[-1]).path)) == folder / "demo.html"
    page = (folder / "demo.html").read_text(encoding="utf-8")
    for run in (tiered, in_memory):
        assert f"{run['samples_per_second']:,.0f}" in page
        assert run["history"][-1]["bytes_read"] == run["tiers"]["ssd"]["bytes_read"]
    lfu = json.loads((folder / "lfu.json").read_text())
    assert lfu["bits"] == tiered["bits"]


def summary_of(hbm_hits):
    tier = {"bytes": 2048, "hit_rate": 0.5, "bytes_read": 1, "bytes_written": 1, "capacity_rows": 8}
    hbm = tier | {"hit_rate": hbm_hits, "capacity_rows": 4 if hbm_hits else 0}
    return {
        "tiers": {"hbm": hbm, "ddr": tier, "ssd": tier},
        "test": {"auc": 0.75, "log_loss": 0.5},
        "bits": "abc",
        "ranks": [],
        "history": [{"step": 0}],
        "device": "cpu",
        "interrupted": False,
        **dict.fromkeys(("end_bytes", "start_bytes", "samples_per_second", "seconds", "step", "rows"), 1),
    }


@pytest.mark.parametrize("hbm", ["1MiB", None])
def test_both_trainings_get_device_memory_and_show_it(tmp_path, capsys, monkeypatch, hbm):
    trained, order = [], []
    monkeypatch.setattr(demo, "warm_up", lambda config: order.append("kernels are compiled"))

    def train(folder, name, arguments, ranks):
        trained.append(arguments)
        order.append(name)
        (folder / name).mkdir(exist_ok=True)
        (folder / name / demo.ROW_FILE_NAME).touch()
        hits = {"tiered": 0.25, "in-memory": 0.75}[name]
        return summary_of(hits if hbm else 0.0) | {"store": str(folder / name)}

    monkeypatch.setattr(demo, "_train", train)
    assert demo.run_demo(tmp_path / "demo", rows=1000, hbm=hbm)
    assert order == ["kernels are compiled", "tiered", "in-memory"]
    config, everything = load(trained[0][0]), trained[1][trained[1].index("--ddr") + 1]
    assert (config.store.hbm, config.store.device) == (hbm or 0, "cpu")
    assert int(everything) > 10 * config.store.ddr
    assert trained[1][-2:] == (["--hbm", everything] if hbm else ["--ddr", everything])
    lines = capsys.readouterr().out.splitlines()
    assert " rows of 128 bytes, " in "".join(lines)
    assert "On SSD a row takes 144 bytes" in "".join(lines)
    assert any(line.startswith("A store takes up to 1.4 times its rows, and 48 MiB") for line in lines)
    assert [line.split()[-4:] for line in lines if "hit rate of the HBM" in line] == (
        [["25.0", "%", "75.0", "%"]] if hbm else []
    )
    assert [line.endswith(", and 1MiB of HBM on cpu.") for line in lines if "memory budget" in line] == [bool(hbm)]


def test_on_a_gpu_a_twentieth_of_what_is_touched_is_the_default():
    assert demo._hbm("cuda", None, 1001) == 51
    assert demo._hbm("cuda", "2GiB", 1001) == "2GiB"
    assert demo._hbm("cpu", None, 1001) == 0


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ValueError, match="is no demonstration; choose another folder with --dir"):
        demo.run_demo(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no demonstration"):
        demo.run_demo(tmp_path / "file")
    assert (tmp_path / "mine").read_text() == "precious"
