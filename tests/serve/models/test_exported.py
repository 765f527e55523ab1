"""A program of torch.export against calling it by hand, on rows that its tables' own reads give."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tests.serve.models.programs import OfDict, save, save_two_tables
from tests.serve.models.stores import Counted, make_store, require_refused, tensor
from tierstore.serve.messages import InferTensor
from tierstore.serve.models import Models, load_program

FEATURES = ("sums", "peaks")
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported")
    make_store(made / "store")
    save_two_tables(made / "mine.pt2")
    return made


@pytest.fixture
def store(folder: Path) -> Iterator[tierstore.Store]:
    with tierstore.open(folder / "store", mode="r", ddr="4MiB") as opened:
        yield opened


def served(store: tierstore.Store, path: Path, dropped: Counted | None = None) -> Any:
    return Models(store, dropped=dropped, program=load_program(path, max_samples=4096)).by_name[path.stem]


def query(seed: int, samples: int) -> tuple[dict[str, InferTensor], list[list[list[int]]]]:
    """A request, and its ids by feature and sample."""
    chance = np.random.default_rng(seed)
    bags = [[chance.integers(0, 20, chance.integers(0, 4)).tolist() for _ in range(samples)] for _ in FEATURES]
    inputs = {
        "Dense": tensor("FP32", chance.normal(size=(samples, 3))),
        "position": tensor("INT64", chance.integers(0, 9, samples)),
        "values": tensor("INT64", [each for feature in bags for bag in feature for each in bag]),
        "lengths": tensor("INT32", [[len(bag) for bag in feature] for feature in bags]),
    }
    return inputs, bags


def by_hand(store: tierstore.Store, path: Path, inputs: Mapping[str, InferTensor], bags: Any) -> Arrays:
    """The program as its author calls it."""
    sums, peaks = bags
    ids = torch.tensor([each for bag in sums for each in bag], dtype=torch.int64)
    offsets = torch.tensor(np.cumsum([0, *map(len, sums)]))
    padded = torch.zeros(len(peaks), 3, 4)
    for sample, bag in enumerate(peaks):
        for place, each in enumerate(bag):
            padded[sample, place] = store["peaks"].read(torch.tensor([each]))[0]
    dense, position = (torch.from_numpy(inputs[name].data.copy()) for name in ("Dense", "position"))
    module = torch.export.load(path).module()
    with torch.no_grad():
        found = module(dense, store["sums"].pooled(ids, offsets), padded, position=position)
    return {name: each.numpy() for name, each in found.items()}


@pytest.mark.parametrize("samples", [1, 33])
def test_its_outputs_are_those_of_the_program_called_by_hand(
    folder: Path, store: tierstore.Store, samples: int
) -> None:
    model = served(store, folder / "mine.pt2")
    inputs, bags = query(samples, samples)
    (found,) = model.run([model.parse(inputs)])
    want = by_hand(store, folder / "mine.pt2", inputs, bags)
    assert {name: each.datatype for name, each in found.items()} == {"score": "FP32", "next": "INT64"}
    assert all(found[name].data.tobytes() == want[name].tobytes() for name in want)
    other, other_bags = query(samples + 1, 3)
    for outputs, of, own in zip(
        model.run([model.parse(inputs), model.parse(other)]), (inputs, other), (bags, other_bags), strict=True
    ):
        want = by_hand(store, folder / "mine.pt2", of, own)
        assert outputs["next"].data.tolist() == want["next"].tolist()
        np.testing.assert_allclose(outputs["score"].data, want["score"], rtol=1e-5)


def test_names_of_a_dict_may_be_anything_and_other_features_of_their_tables_are_not_asked_for(
    folder: Path, store: tierstore.Store, tmp_path: Path
) -> None:
    path = save(OfDict(), tmp_path / "two.pt2", {"sums.again": torch.zeros(2, 4), "half": torch.zeros(2, 8)})
    model = served(store, path)
    assert model.metadata.parameters == {"features": "sums.again,half"}
    lengths = tensor("INT32", [[1, 0], [0, 2]])
    (found,) = model.run([model.parse({"values": tensor("INT64", [3, 5, 24]), "lengths": lengths})])
    want = torch.zeros(2, 12)
    want[0, :4] = store["sums"].read(torch.tensor([3]))[0]
    want[1, 4:] = store["half"].pooled(torch.tensor([5, 24]), torch.tensor([0, 2]))[0]
    assert found["output"].data.tobytes() == (want * 2).numpy().tobytes()


WRONG_REQUESTS: dict[str, dict[str, InferTensor]] = {
    "'Dense' has 1 samples; 'lengths' has 2": {"Dense": tensor("FP32", np.zeros((1, 3)))},
    "'position' is FP32; the model takes INT64": {"position": tensor("FP32", [0, 0])},
    "'lengths' has 4 at sample 1 of feature 'peaks'; the model takes up to 3 ids": {
        "values": tensor("INT64", [1, 2, 3, 4]), "lengths": tensor("INT32", [[0, 0], [0, 4]])
    },
    "'values' has 40 at position 0 of feature 'sums': ids are in [0, 40)": {
        "values": tensor("INT64", [40]), "lengths": tensor("INT32", [[1, 0], [0, 0]])
    },
}  # fmt: skip


def test_wrong_requests_are_told(folder: Path, store: tierstore.Store) -> None:
    model = served(store, folder / "mine.pt2")
    for message, inputs in WRONG_REQUESTS.items():
        require_refused(model, query(3, 2)[0] | inputs, message)


class Same(torch.nn.Module):
    def forward(self, sums: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        return sums + 1, dense


class Constant(torch.nn.Module):
    def forward(self, sums: Tensor) -> Tensor:
        return sums.sum()


class Values(torch.nn.Module):
    def forward(self, sums: Tensor, values: Tensor) -> Tensor:
        return sums + values


def zeros(*dims: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, dim) for dim in dims)


WRONG_PROGRAMS: dict[str, tuple[torch.nn.Module, tuple[Any, ...], Any]] = {
    "input 'sums' is float32 [2, 4]; its first dimension must be the dynamic batch": (Same(), zeros(4, 3), "static"),
    "it takes batches of 0 to 64 samples, and the server makes those of 1 to 4096": (
        Same(), zeros(4, 3), torch.export.Dim("batch", max=64)
    ),
    "input 'sums' is FP32 [-1, 5]; rows of table 'sums' have 4 numbers": (Same(), zeros(5, 3), None),
    "'pooled' is the name of another model": (Same(), zeros(4, 3), None),
    "output 'output' is float32 []; its first dimension": (Constant(), zeros(4), None),
    "input 'sumz' takes rows, and the store has no such feature; did you mean 'sums'?": (
        OfDict(), (dict(zip(("half", "sumz"), zeros(8, 1), strict=True)),), None
    ),
    "input 'values' is FP32 [-1, 1]; requests carry ids by the name": (Values(), zeros(4, 1), None),
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG_PROGRAMS, "there is no file", "is no program that torch"])
def test_programs_that_do_not_fit_are_told(store: tierstore.Store, tmp_path: Path, message: str) -> None:
    path = tmp_path / ("pooled.pt2" if "another model" in message else "x.pt2")
    if message in WRONG_PROGRAMS:
        module, inputs, batch = WRONG_PROGRAMS[message]
        save(module, path, *inputs, batch=batch)
    elif message == "is no program that torch":
        path.write_bytes(b"PK no program")
    with pytest.raises(ValueError) as caught:
        served(store, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
