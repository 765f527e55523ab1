"""Runs that begin cold: what the warm-up loads is loaded once for all. Runs in processes of their own have one."""

import pytest

from tierstore.train import trainer


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch):
    monkeypatch.setattr(trainer, "warm_up", lambda _: None)
