"""The first snippet of each page of the documentation runs as a newcomer would run it."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from bench.data import ROOT, examples
from tierstore.cli import main
from tierstore.settings.sections import to_toml
from tierstore.train import train
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, RunConfig, StoreSection, TrainSection
from tierstore.train.synthetic import write_synthetic

PAGES = sorted((ROOT / "docs").rglob("*.md"))
_LAST_LINE = 12
_TRAINED, _TESTED = 2000, 200
_OF_THE_SHELL = set("|&;<>$`*")
"""Commands with one of these are for sh, not for ``main``."""


def first_block(page: Path) -> tuple[str, str]:
    """Language and text of a page's first fenced block, which begins within its first lines."""
    found = re.search(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, "no fenced block"
    begins = found.string.count("\n", 0, found.start()) + 1
    assert begins <= _LAST_LINE, f"the first block begins in line {begins}; a reader wants it within {_LAST_LINE}"
    return found[1], found[2]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pages may rest on: shop/ of README's example, clicks.tsv, run.toml and run/ trained of them, examples/."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(examples("README.md")[0], "README.md", "exec"), {})
        write_synthetic("clicks.tsv", train_rows=_TRAINED, test_rows=_TESTED)
        config = RunConfig(
            data=DataSection(path="clicks.tsv", train_rows=_TRAINED, test_rows=_TESTED),
            embedding=EmbeddingSection(dim=16, num_embeddings=1000),
            model=ModelSection(bottom_mlp=(16,), top_mlp=(16,)),
            store=StoreSection(path="run", ddr="1MiB"),
            train=TrainSection(batch_size=100),
        )
        Path("run.toml").write_text(to_toml(config))
        train(config)
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


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
def test_first_snippet_runs(page: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language, block = first_block(page)
    assert language in {"sh", "python"}
    shutil.copytree(prepared, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if language == "sh":
        run_shell(block)
    else:
        exec(compile(block, page.name, "exec"), {"__name__": "__main__"})
