"""A store of two ranks after a step and a commit."""

import shutil
from pathlib import Path

import pytest

from .ranks import run
from .stores import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "store"
    run(train, 2, folder.parent, folder)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "store"))
