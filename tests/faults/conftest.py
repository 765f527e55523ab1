"""Places and models that the tests of this package share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .workload import Trained, copied, first_tables

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where the system has such a place: syncs are recorded, not waited for."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def _initial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return first_tables(tmp_path_factory.mktemp("first"))


@pytest.fixture
def initial(_initial: dict[str, Trained]) -> dict[str, Trained]:
    return copied(_initial)
