"""``--model``: a program of torch.export behind a whole server, asked by the protocol's own clients."""

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.serve.clients import Client
from tests.serve.fronts import refused
from tests.serve.loops import wait_for
from tests.serve.models.programs import save
from tests.serve.whole import serving
from tests.updates.support import SMALL, change
from tierstore.serve.messages import Status


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


def test_dense_weights_are_those_of_the_version_if_it_has_them_and_without_its_table_there_is_no_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they are the file's, also after another version had them; the metadata and the log tell which."""
    directory, model = tmp_path / "store", Trained()
    program = save(model.part, tmp_path / "scored.pt2", torch.zeros(2, 6))
    of_file = copy.deepcopy(model.part)

    def commit(scale: float, way: str) -> None:
        with torch.no_grad():
            model.part.out.weight.fill_(scale)
        with tierstore.open(directory, **SMALL) as store:
            if way == "no table":
                store.change_table("item", name="gone")
            elif "gone" in store.tables:
                store.change_table("gone", name="item")
            if way != "no table":
                store["item"].write(torch.arange(2), torch.full((2, 6), scale))
            if way == "checkpoint":
                tierstore.checkpoint.save(store, model)
            else:
                weights = {f"model.{name}": each for name, each in model.state_dict().items()}
                store.commit(tensors=weights if way == "tensors" else {})

    caplog.set_level(logging.INFO, "tierstore")
    change(directory, 1, names=("item",))
    inputs = {"values": np.array([0, 1]), "lengths": np.array([[1, 1]], np.int32)}
    with serving(directory, model=str(program)) as server, Client(server.url) as client:
        for version, way in enumerate(("checkpoint", "tensors", "", "no table", "checkpoint"), 2):
            commit(float(version), way)
            wait_for(lambda version=version: server.engine.version == version)
            if way == "no table":
                with refused(Status.NOT_FOUND, "no model 'scored'"):
                    client.infer("scored", inputs)
                assert f"version {version} is served without the model of" in caplog.text
                continue
            answer = client.infer("scored", inputs)
            with torch.no_grad():
                want = (model.part if way else of_file)(torch.full((2, 6), float(version)))
            assert answer.outputs["output"].tobytes() == want.numpy().tobytes(), way
            assert answer.version == str(version)
            told = "of the version" if way else "of the file"
            assert client.get("/v2/models/scored").json()["parameters"]["dense_weights"] == told
            where = "the version" if way else "its file"
            assert f"model scored: version {version} with the dense weights of {where}" in caplog.text
