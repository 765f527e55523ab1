"""The ranking model against the evaluation of the trainer, and in fewer bits against a reference."""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierstore
from tests.serve.clients import Client
from tests.serve.loops import wait_for
from tests.serve.models.stores import Counted, asked, make_store, require_refused, save_two_tables, tensor
from tests.serve.whole import FREE_PORTS, serving
from tests.train.readers.rows import matrix
from tests.train.runs import TRAIN_ROWS, commit_scaled, config_of
from tierstore.cli import entry as cli
from tierstore.serve.messages import InferTensor, ServeError, Status
from tierstore.serve.models import Models
from tierstore.serve.models.dense import LOW
from tierstore.serve.models.ranking import Ranking
from tierstore.train import train
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.checkpoint import restore_run
from tierstore.train.config import RunConfig

BATCH = 48
RUNS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "towers": {"model__towers": [[f"C{i}" for i in range(k, 27, 2)] for k in (2, 1)], "data__log_dense": False},
}


class Trained(NamedTuple):
    """A run; rows of its data as they were in the file, and what the trainer's model gives for them."""

    config: RunConfig
    dense: Any
    categories: Any
    probabilities: Any


def evaluated(config: RunConfig) -> Trained:
    reader, hasher = open_data(config)
    stop = TRAIN_ROWS + BATCH
    raw = next(iter(reader.read_chunks(TRAIN_ROWS, stop, BATCH)))
    dense, categories = raw.dense.copy(), matrix(raw.categories)
    log = config.data.log_dense
    batch = next(iter(reader.batches(hasher, batch_size=BATCH, start_row=TRAIN_ROWS, stop_row=stop, log_dense=log)))
    with open_run_store(config) as store:
        run = build_run(config, store)
        restore_run(run)
        run.model.eval()
        with torch.no_grad():
            probabilities = torch.sigmoid(run.model(batch.dense, batch.sparse)).numpy()
    return Trained(config, dense, categories, probabilities)


@pytest.fixture(scope="module", params=RUNS)
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    if request.param == "dlrm":
        return evaluated(request.getfixturevalue("run"))
    config = config_of(tmp_path_factory.mktemp("ranking"), "store", train__epochs=1, **RUNS[request.param])
    train(config)
    return evaluated(config)


@pytest.fixture
def store(trained: Trained) -> Iterator[tierstore.Store]:
    with tierstore.open(trained.config.store.path, mode="r", ddr="8MiB") as opened:
        yield opened


def query(dense: Any, categories: Any) -> dict[str, InferTensor]:
    """What a client sends: zeros for dense values that are missing, nothing for such categories."""
    by_feature = categories.T
    has = by_feature >= 0
    return {
        "dense": tensor("FP32", np.nan_to_num(dense, nan=0.0)),
        "values": tensor("INT64", by_feature[has]),
        "lengths": tensor("INT32", has.astype(np.int32)),
    }


def test_it_gives_the_bits_of_the_trainers_own_evaluation(trained, store):
    """Also of several requests in a batch, which are told apart."""
    model: Any = Models(store).by_name["ranking"]
    assert (trained.categories < 0).any()
    assert trained.probabilities.std() > 0.001
    for bounds in ([0, BATCH], [0, 1, 20, 21, BATCH]):
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        found = asked(model, *(query(trained.dense[part], trained.categories[part]) for part in parts))
        assert np.concatenate([each["probabilities"] for each in found]).tobytes() == trained.probabilities.tobytes()
        assert [len(each["probabilities"]) for each in found] == list(np.diff(bounds))


def test_lists_are_cut_to_the_length_that_the_run_cut_them_to(trained, store):
    """To one category, with others in front of it, more than a sample may have."""
    config = replace(trained.config, data=replace(trained.config.data, max_list_length=1))
    one = query(trained.dense, trained.categories)
    others = np.full((len(one["values"].data), 500), 7)
    many = np.concatenate([others, one["values"].data[:, None]], 1).reshape(-1)
    inputs = one | {"values": tensor("INT64", many), "lengths": tensor("INT32", 501 * one["lengths"].data)}
    (found,) = asked(Ranking(store, config, None), inputs)
    assert found["probabilities"].tobytes() == trained.probabilities.tobytes()


def test_wrong_inputs_are_named(trained, store):
    model: Any = Models(store).by_name["ranking"]
    good = query(trained.dense, trained.categories)
    dense, values, lengths = (each.data.copy() for each in good.values())
    dense[3, 2], values[7] = np.nan, -5
    for message, wrong in {
        "'dense' is nan at [3, 2]; send finite numbers, 0 where one is missing": {"dense": tensor("FP32", dense)},
        f"'dense' has {BATCH - 1} samples; 'lengths' has {BATCH}": {"dense": tensor("FP32", good["dense"].data[1:])},
        "'values' has -5 at position 7 of feature 'C1': categories are 0 or more": {"values": tensor("INT64", values)},
        "'lengths' has shape [25, 48]": {"lengths": tensor("INT32", lengths[:25])},
        "'lengths' is BYTES": {"lengths": InferTensor("BYTES", lengths.astype(str).astype("S").astype(object))},
    }.items():
        require_refused(model, good | wrong, message)


def test_negative_categories_can_count_as_missing(trained, store):
    counted = Counted()
    model: Any = Models(store, dropped=counted).by_name["ranking"]
    by_feature = trained.categories.T
    inputs = query(trained.dense, trained.categories) | {
        "values": tensor("INT64", by_feature.reshape(-1)),
        "lengths": tensor("INT32", np.ones(by_feature.shape)),
    }
    (found,) = asked(model, inputs)
    assert found["probabilities"].tobytes() == trained.probabilities.tobytes()
    assert counted == {"ranking": int((trained.categories < 0).sum())}


def test_weights_that_overflow_are_an_error_and_no_answer(trained, store):
    model: Any = Models(store).by_name["ranking"]
    model.load({name: torch.full_like(each, torch.inf) if each.dtype == torch.float32 else each
                for name, each in store.tensors().items()})  # fmt: skip
    (answer,) = model.run([model.parse(query(trained.dense, trained.categories))])
    assert isinstance(answer, ServeError)
    assert answer.status is Status.INTERNAL
    assert "no number" in str(answer)


def test_weights_are_required_whole(trained, store):
    ranking: Any = Models(store).by_name["ranking"]
    tensors = store.tensors()
    ranking.require(tensors)
    name = next(name for name in tensors if name.startswith("model."))
    with pytest.raises(tierstore.errors.DamagedError, match=f"{name} of the newest commit is missing"):
        ranking.require({key: each for key, each in tensors.items() if key != name})
    with pytest.raises(tierstore.errors.DamagedError, match="has shape"):
        ranking.require(tensors | {name: tensors[name].reshape(-1)[:0]})


@pytest.fixture(autouse=True)
def on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the instructions the arithmetic is the same, and slow."""
    for each in LOW.values():
        monkeypatch.setattr(each, "is_fast", staticmethod(lambda: True))


class Rounded(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = copy.deepcopy(linear).bfloat16()

    def forward(self, inputs: Tensor) -> Any:
        return self.linear(inputs.bfloat16()).float()


class Quantized(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.levels, self.scales = quantized(linear.weight.detach().numpy())
        self.bias = np.float32(0) if linear.bias is None else linear.bias.detach().numpy()

    def forward(self, inputs: Tensor) -> Tensor:
        levels, scales = quantized(inputs.numpy())
        sums = (levels @ self.levels.T).astype(np.float32)
        return torch.from_numpy(sums * (scales[:, None] * self.scales) + self.bias)


def quantized(rows: Any) -> tuple[Any, Any]:
    largest = np.abs(rows).max(1)
    largest[largest == 0] = 1
    return np.rint(rows * (np.float32(127) / largest)[:, None]).astype(np.int64), largest / np.float32(127)


REFERENCES: dict[Any, type[nn.Module]] = {"bfloat16": Rounded, "int8": Quantized}
either = pytest.mark.parametrize("dense", REFERENCES)


def with_reference(model: nn.Module, dense: str) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child.weight.numel() >= 16_384:
                setattr(parent, name, REFERENCES[dense](child))
    return model


@either
@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(2, 128, 128), (7, 513, 33), (40, 367, 128)])
def test_a_layer_computes_as_its_format_says(samples, inputs, outputs, dense):
    torch.manual_seed(samples)
    layer, rows = nn.Linear(inputs, outputs, bias=samples != 7), torch.randn(samples, inputs)
    rows *= torch.logspace(-6, 6, samples).unsqueeze(1)
    rows[samples // 2] = 0
    packed = LOW[dense](layer.weight, layer.bias)
    with torch.inference_mode():
        found = packed(rows)
        assert torch.equal(found, REFERENCES[dense](layer)(rows))
        assert torch.equal(packed(rows.reshape(samples, 1, -1))[:, 0], found)
        off = (found - layer(rows)).abs().amax(1)
        assert (off <= 0.02 * rows.abs().amax(1) * inputs**0.5 + 0.001).all()
        rows[0, 5] = torch.nan
        assert packed(rows)[0].isnan().all()
        assert torch.equal(packed(rows)[1:], found[1:]), "other samples change no bit"


@pytest.mark.parametrize(("dense", "interaction"), [("int8", "dcn"), ("bfloat16", "dot")])
def test_a_server_predicts_in_fewer_bits_and_follows_commits(dense, interaction, tmp_path):
    model = {"interaction": interaction, "bottom_mlp": [128, 128], "top_mlp": [48, 32], "cross_rank": 48}
    changes = {f"model__{name}": value for name, value in model.items()}
    config = config_of(tmp_path, "store", train__epochs=1, embedding__dim=16, **changes)
    train(config)
    of_data = evaluated(config)
    inputs = {name: each.data for name, each in query(of_data.dense, of_data.categories).items()}
    reader, hasher = open_data(config)
    batch = next(iter(reader.batches(hasher, batch_size=BATCH, start_row=TRAIN_ROWS, stop_row=TRAIN_ROWS + BATCH)))

    def predict(model: nn.Module) -> Any:
        return torch.sigmoid(with_reference(model, dense)(batch.dense, batch.sparse)).numpy()

    with serving(Path(config.store.path), dense=dense) as server, Client(server.url) as client:
        for factor in (1.0, 1.5):
            version, want = commit_scaled(config, factor, predict)
            wait_for(lambda version=version: server.engine.version == version)
            assert client.rank(**inputs).tobytes() == want.tobytes()


@either
def test_what_cannot_be_in_fewer_bits_is_refused(tmp_path, monkeypatch, capsys, dense):
    make_store(tmp_path / "store")
    small = save_two_tables(tmp_path / "small.pt2")
    without = pytest.raises(ValueError, match=rf"dense='{dense}': .*store has no model; serve it with --dense float32")
    with tierstore.open(tmp_path / "store", mode="r", ddr="4MiB") as store, without:
        Models(store, dense=dense)
    words = ["serve", "--store", str(tmp_path / "store"), "--model", str(small), "--dense", dense, *FREE_PORTS]
    assert cli.main(words) == 2
    no_layer = f"small.pt2: dense='{dense}': the model has no linear layer of at least 16,384 weights"
    assert no_layer in capsys.readouterr().err
    monkeypatch.setattr(LOW[dense], "is_fast", staticmethod(lambda: False))
    assert cli.main(words) == 2
    instructions = {"bfloat16": "AVX512_BF16", "int8": "AVX512_VNNI"}[dense]
    assert f"finds no {instructions} on this processor" in capsys.readouterr().err
