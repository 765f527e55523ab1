"""The examples of docs/exchange.md run."""

import re
import shlex
from typing import Any

import pytest
import torch

import tierstore
from bench.data import ROOT, examples
from tierstore.cli import entry as cli

from .support import OPTIMIZERS, config, contents, make_store

PAGE = (ROOT / "docs" / "exchange.md").read_text()


@pytest.fixture
def shop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_store(tmp_path / "shop", config(optimizer=OPTIMIZERS["adam"]), config("user", 40, 3))


def test_commands(shop, tmp_path, capsys):
    commands = re.findall(r"^    tierstore (.*?)(?:\s+#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        assert cli.main(shlex.split(command)) == 0, command
    said = capsys.readouterr().out
    assert "other: new (sum, RowWiseAdagrad lr 0.05), 500 rows" in said
    assert contents(tmp_path / "shop-compact") == contents(shop)
    copied = contents(tmp_path / "copy")
    assert copied["item"] == contents(shop)["item"]
    assert copied["other"][0].optimizer == tierstore.optim.RowWiseAdagrad(lr=0.05)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = "".join(examples("docs/exchange.md"))
    names: dict[str, Any] = {}
    exec(compile(example, "exchange.md", "exec"), names)
    assert names["state"]["embedding_bags.item.exp_avg"].shape == (1000, 8)
    assert names["report"].version == 2
    with tierstore.open("small", mode="r", ddr="8MiB") as store:
        assert torch.equal(store["bag"].read(torch.arange(1000)), names["bag"].weight.detach())
