"""A source, and patience that is short; one process writes all replicas."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.serve.replicas import Shown, following, publishing
from tests.updates.support import change
from tierstore.serve import replica as updates
from tierstore.updates import fetch


@pytest.fixture(autouse=True)
def quick(warm_writer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PAUSE_SECONDS", 0.01), ("SILENT_SECONDS", 0.5), ("PATIENCE_SECONDS", 2.0)):
        monkeypatch.setattr(fetch, name, seconds)
    monkeypatch.setattr(updates, "_LISTS_SECONDS", 20.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    change(tmp_path / "source", 1, keep=4)
    return tmp_path / "source"


@pytest.fixture
def publisher(source: Path, stack: ExitStack) -> Any:
    """Of the source; it looks where it is told to."""
    return stack.enter_context(publishing(source))


@pytest.fixture
def replica(publisher: Any, tmp_path: Path, stack: ExitStack) -> Shown:
    return stack.enter_context(following(tmp_path / "replica", [publisher.url]))
