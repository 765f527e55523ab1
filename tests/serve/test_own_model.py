"""``--model``: a program of torch.export behind a whole server, asked by the protocol's own clients."""

import copy
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.serve.clients import Client
from tests.serve.fronts import refused
from tests.serve.loops import wait_for
from tests.serve.models.programs import save
from tests.serve.replicas import publishing
from tests.serve.whole import ADMIN, serving
from tests.updates.support import SMALL, change
from tierstore.serve.messages import Status
from tierstore.updates import apply_update, write_update

DENSE = np.array([[0.5, -1], [2, 3]], np.float32)
VALUES, LENGTHS = np.array([3, 4, 5, 6, 7]), np.array([[2, 1], [0, 2]], np.int32)


class Both(torch.nn.Module):
    def forward(self, dense: Tensor, item: Tensor, user: Tensor) -> Tensor:
        return torch.cat([dense, item * 2, user], 1).cumsum(1)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "both.pt2"
    return save(Both(), path, torch.zeros(2, 2), torch.zeros(2, 6), torch.zeros(2, 5))


def test_a_version_without_one_of_its_tables_is_served_without_it(
    tmp_path: Path, program: Path, warm_writer: None, caplog: pytest.LogCaptureFixture, stack: ExitStack
) -> None:
    """Of a replica that goes back to before its source had the table."""
    source, replica = tmp_path / "source", tmp_path / "replica"
    change(source, 1, names=("item",))
    apply_update(replica, write_update(source, tmp_path / "first").path)
    change(source, 2)
    publisher = stack.enter_context(publishing(source))
    publisher.step()
    with serving(replica, sources=(publisher.url,)) as server:
        wait_for(lambda: server.engine.version == 2)
    inputs = {"dense": DENSE, "values": VALUES, "lengths": LENGTHS}
    flags: dict[str, Any] = {"sources": (publisher.url,), "model": str(program)}
    with serving(replica, **flags) as server, Client(server.url) as client:
        before = client.infer("both", inputs)
        back = httpx.post(f"{server.admin}/admin/rollback", headers=ADMIN, timeout=60)
        assert back.json() == {"version": 1}
        with refused(Status.NOT_FOUND, "no model 'both'"):
            client.infer("both", inputs)
        assert "version 1 is served without the model of" in caplog.text
        with tierstore.open(source, ddr="8MiB") as store:
            store.commit()
        publisher.step()
        wait_for(lambda: server.engine.version == 3)
        after = client.infer("both", inputs)
    assert (before.version, after.version) == ("2", "3")
    assert after.outputs["output"].tobytes() == before.outputs["output"].tobytes()


class Scored(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = torch.nn.Linear(6, 1)

    def forward(self, item: Tensor) -> Tensor:
        return self.out(item)


class Trained(torch.nn.Module):
    """Of which ``Scored`` is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scored()
        self.other = torch.nn.Linear(6, 1)


def test_dense_weights_are_those_of_the_version_if_it_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And else the file's, also after another version had them; the metadata and the log tell which."""
    directory, model = tmp_path / "store", Trained()
    program = save(model.part, tmp_path / "scored.pt2", torch.zeros(2, 6))
    of_file = copy.deepcopy(model.part)

    def commit(scale: float, way: str) -> None:
        with torch.no_grad():
            model.part.out.weight.fill_(scale)
        with tierstore.open(directory, **SMALL) as store:
            store["item"].write(torch.arange(2), torch.full((2, 6), scale))
            if way == "checkpoint":
                tierstore.checkpoint.save(store, model)
            else:
                store.commit(
                    tensors={f"model.{name}": each for name, each in model.state_dict().items()} if way else {}
                )

    caplog.set_level(logging.INFO, "tierstore")
    change(directory, 1, names=("item",))
    inputs = {"values": np.array([0, 1]), "lengths": np.array([[1, 1]], np.int32)}
    with serving(directory, model=str(program)) as server, Client(server.url) as client:
        for version, way in enumerate(("checkpoint", "tensors", "", "checkpoint"), 2):
            commit(float(version), way)
            wait_for(lambda version=version: server.engine.version == version)
            answer = client.infer("scored", inputs)
            with torch.no_grad():
                want = (model.part if way else of_file)(torch.full((2, 6), float(version)))
            assert answer.outputs["output"].tobytes() == want.numpy().tobytes(), way
            assert answer.version == str(version)
            told = "of the version" if way else "of the file"
            assert client.get("/v2/models/scored").json()["parameters"]["dense_weights"] == told
            where = "the version" if way else "its file"
            assert f"model scored: version {version} with the dense weights of {where}" in caplog.text
