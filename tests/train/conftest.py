"""Runs that begin cold: what the warm-up loads is loaded once for all. Runs in processes of their own have one."""

import pytest

from tests.train.runs import config_of
from tierstore.train import trainer


@pytest.fixture(autouse=True)
def without_warm_up(monkeypatch):
    monkeypatch.setattr(trainer, "warm_up", lambda _: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(folder, request):

    def run_it(name="run", *, resume=False, **changes):
        store = f"{abs(hash(request.node.nodeid))}-{name}"
        return trainer.train(config_of(folder, store, **changes), resume=resume, bits=True)

    return run_it
