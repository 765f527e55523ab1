"""The first snippet of each page of the documentation runs as a newcomer would run it."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sysconfig
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import tierstore
from bench.data import ROOT, examples
from tierstore.cli import main

PAGES = sorted((ROOT / "docs").rglob("*.md"))
_LAST_LINE = 12
_OF_THE_SHELL = set("|&;<>$`*")  # commands with one of these are for sh, not for ``main``


def first_block(page: Path) -> tuple[str, str]:
    """Language and text of a page's first fenced block, which begins within its first lines."""
    found = re.search(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "no fenced block"
    begins = found.string.count("\n", 0, found.start()) + 1
    assert begins <= _LAST_LINE, f"the first block begins in line {begins}; a reader wants it within {_LAST_LINE}"
    return found[1], found[2]


def commands(text: str) -> str:
    """The indented commands of ours."""
    return "\n".join(re.findall(r"^    (tierstore .*)$", text, re.MULTILINE))


def run_python(block: str, name: str, **names: Any) -> None:
    exec(compile(block, name, "exec"), {"__name__": "__main__", **names})


def test_the_run_from_the_command_line_follows_the_one_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "data.md"
    text = page.read_text().partition("\n## ")[0]
    (toml,) = re.findall(r"^```toml\n# (.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    run_python(first_block(page)[1], page.name)
    Path(toml[0]).write_text(toml[1])
    first, resumed = commands(text).splitlines()
    run_shell(first)
    with tierstore.open("visits", mode="r") as python, tierstore.open("visits-2", mode="r") as shell:
        assert torch.equal(*(store["city"].read(torch.arange(1_000)) for store in (python, shell)))
    run_shell(resumed)
    with tierstore.open("visits-2", mode="r") as shell:
        assert shell.version == 2


@pytest.mark.parametrize("rule", [torch.optim.SparseAdam, torch.optim.Adam])
def test_adams_state_moves_as_the_page_says(
    rule: type[torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bag = torch.nn.EmbeddingBag(10, 4, sparse=rule is torch.optim.SparseAdam)
    optimizer = rule(bag.parameters(), lr=0.01)  # type: ignore[call-arg]
    bag(torch.tensor([[3, 9]])).square().sum().backward()
    optimizer.step()
    text = (ROOT / "docs" / "coming-from-embedding-bag.md").read_text()
    snippet = examples("docs/coming-from-embedding-bag.md")[1]
    run_python(snippet, "Adam", torch=torch, bag=bag, optimizer=optimizer)
    run_shell("\n".join(line for line in commands(text).splitlines() if "-of-ada" in line))
    with tierstore.open("bags-of-adam", ddr="8MiB") as store:
        optimizer.zero_grad()
        for each in (bag, tierstore.TieredEmbeddingBag(store["item"])):
            each(torch.tensor([[3, 9]])).square().sum().backward()
        optimizer.step()
        touched = torch.tensor([3, 9])
        torch.testing.assert_close(store["item"].read(touched), bag.weight.detach()[touched])
    with tierstore.open("bags-of-adagrad", mode="r") as store:
        assert store["item"].config.optimizer == tierstore.optim.RowWiseAdagrad(lr=0.05)
        assert store["item"].config.pooling == "mean"


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
def test_a_checkpoint_of_torchrec_with_a_prefix_loads_as_the_page_says(tmp_path: Path) -> None:
    weight = torch.rand(10, 4)
    saved = {"model": {"sparse.ebc.embedding_bags.product.weight": weight, "over.weight": torch.rand(2)}}
    dcp.save(saved, checkpoint_id=tmp_path)
    text = (ROOT / "docs" / "coming-from-torchrec.md").read_text()
    (snippet,) = re.findall(r"^  ```python\n(.*?)^  ```$", text, re.MULTILINE | re.DOTALL)
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        table = tierstore.TableConfig(name="product", num_embeddings=10, embedding_dim=4)
        store.create_table(table)
        run_python(textwrap.dedent(snippet), "prefix", tierstore=tierstore, dcp=dcp, store=store, path=tmp_path)
        assert torch.equal(store["product"].read(torch.arange(10)), weight)


def run_shell(block: str) -> None:
    """Commands of ours alone run in this process: to start one takes longer than most of them do."""
    commands = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    commands = [words for words in commands if words]
    if all(words[0] == "tierstore" and not _OF_THE_SHELL & set("".join(words)) for words in commands):
        for words in commands:
            assert main(words[1:]) == 0, shlex.join(words)
        return
    found = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = os.environ | {"PATH": found, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shell = subprocess.Popen(
        ["sh", "-e", "-c", block], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        assert shell.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # a server that a failed block left
            os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_first_snippet_runs_in_an_empty_folder(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages on planning and sweeps: where the checkout's examples/ is, and run.toml of docs/train.md."""
    language, block = first_block(page)
    assert language in {"sh", "python"}
    monkeypatch.chdir(tmp_path)
    if page.name in ("planning.md", "sweep.md") or page.parent.name == "planning":
        Path("examples").symlink_to(ROOT / "examples")
        if " run.toml" in block:
            run_shell(first_block(ROOT / "docs" / "train.md")[1].partition("tierstore train")[0])
    if language == "sh":
        run_shell(block)
    else:
        run_python(block, page.name)


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.name != "index.md"]
    assert sorted(set(re.findall(r"\]\(([a-z/-]+\.md)\)", index))) == sorted(pages)
