"""A source, and patience that is short; one process writes all replicas."""

from pathlib import Path

import pytest

from tests.updates.support import change
from tierstore.serve.admin import offer, updates
from tierstore.updates import fetch


@pytest.fixture(autouse=True)
def quick(warm_writer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PAUSE_SECONDS", 0.01), ("SILENT_SECONDS", 0.5), ("PATIENCE_SECONDS", 2.0)):
        monkeypatch.setattr(fetch, name, seconds)
    monkeypatch.setattr(offer, "_BEGIN_SECONDS", 0.1)
    monkeypatch.setattr(updates, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(updates, "_LISTS_SECONDS", 20.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    change(tmp_path / "source", 1, keep=4)
    return tmp_path / "source"
