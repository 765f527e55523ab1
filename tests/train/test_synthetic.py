"""Generated clicks: in the format, from the model they claim, with the best AUC they claim; and the demonstration."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pytest

from tierstore.cli import main
from tierstore.train import demo, synthetic
from tierstore.train.readers import CriteoReader
from tierstore.train.synthetic import write_synthetic

from .readers.rows import matrix


def test_labels_are_drawn_with_the_chances_that_the_best_auc_is_of():
    rows = synthetic._Source(5).draw(50_000)
    chances = 1 / (1 + np.exp(-rows.logits))
    order = np.argsort(chances)
    for part in np.array_split(order, 10):
        # 5,000 draws: three standard deviations are at most 0.021.
        assert rows.labels[part].mean() == pytest.approx(chances[part].mean(), abs=0.021)


def test_the_seed_decides_every_byte(tmp_path):
    made = [write_synthetic(tmp_path / str(n), train_rows=50, test_rows=20, seed=n // 2) for n in range(3)]
    texts = [each.path.read_bytes() for each in made]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="test_rows=0"):
        write_synthetic(tmp_path / "a", train_rows=1, test_rows=0)


@pytest.mark.kernel
def test_every_row_is_read_back(tmp_path):
    data = write_synthetic(tmp_path / "clicks.tsv", train_rows=6_000, test_rows=1_000, seed=3)
    (rows,) = CriteoReader(data.path).read_chunks(0, None, 9_000)
    drawn = synthetic._Source(3).draw(7_000)
    assert (data.train_rows, data.test_rows, data.best.rows) == (6_000, 1_000, 1_000)
    assert rows.labels.tolist() == drawn.labels.tolist()
    assert rows.dense.tolist() == drawn.dense.tolist()
    assert matrix(rows.categories).tolist() == np.where(drawn.hashes, drawn.hashes, np.int64(-1)).tolist()
    missing = (drawn.hashes == 0).mean(axis=0)
    assert (missing[0::2] == 0).all()
    assert ((missing[1::2] > 0.03) & (missing[1::2] < 0.05)).all()


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
