"""The ranking model against the trainer's own evaluation of the same rows."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tierstore
from tests.serve.models.stores import Counted, asked, require_refused, tensor
from tests.train.readers.rows import matrix
from tests.train.runs import TRAIN_ROWS, config_of
from tierstore.serve.messages import InferTensor, ServeError, Status
from tierstore.serve.models import Models
from tierstore.train import train
from tierstore.train.build import build_run, open_data, open_run_store
from tierstore.train.checkpoint import restore_run
from tierstore.train.config import RunConfig

BATCH = 48
RUNS: dict[str, dict[str, Any]] = {
    "dlrm": {},
    "dcn": {"model__interaction": "dcn", "data__log_dense": False},
    "towers": {"model__towers": [[f"C{i}" for i in range(k, 27, 2)] for k in (2, 1)]},
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


def test_it_gives_the_bits_of_the_trainers_own_evaluation(trained: Trained, store: tierstore.Store) -> None:
    """Also of several requests in a batch, which are told apart."""
    model: Any = Models(store).by_name["ranking"]
    assert (trained.categories < 0).any()
    assert trained.probabilities.std() > 0.001
    for bounds in ([0, BATCH], [0, 1, 20, 21, BATCH]):
        parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
        found = asked(model, *(query(trained.dense[part], trained.categories[part]) for part in parts))
        assert np.concatenate([each["probabilities"] for each in found]).tobytes() == trained.probabilities.tobytes()
        assert [len(each["probabilities"]) for each in found] == list(np.diff(bounds))


def wrong_queries(good: dict[str, InferTensor]) -> dict[str, dict[str, InferTensor]]:
    nan = np.array(good["dense"].data)
    nan[3, 2] = np.nan
    negative = np.array(good["values"].data)
    negative[7] = -5
    return {
        "'dense' is nan at [3, 2]; send finite numbers, 0 where one is missing": good | {"dense": tensor("FP32", nan)},
        f"'dense' has {BATCH - 1} samples; 'lengths' has {BATCH}": good
        | {"dense": tensor("FP32", good["dense"].data[1:])},
        "'values' has -5 at position 7 of feature 'C1': categories are 0 or more": good
        | {"values": tensor("INT64", negative)},
        "'lengths' has shape [25, 48]": good | {"lengths": tensor("INT32", good["lengths"].data[:25])},
    }


def test_wrong_inputs_are_named(trained: Trained, store: tierstore.Store) -> None:
    model: Any = Models(store).by_name["ranking"]
    for message, inputs in wrong_queries(query(trained.dense, trained.categories)).items():
        require_refused(model, inputs, message)


def test_negative_categories_can_count_as_missing(trained: Trained, store: tierstore.Store) -> None:
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


def test_weights_that_overflow_are_an_error_and_no_answer(trained: Trained, store: tierstore.Store) -> None:
    model: Any = Models(store).by_name["ranking"]
    model.load({name: torch.full_like(each, torch.inf) if each.dtype == torch.float32 else each
                for name, each in store.tensors().items()})  # fmt: skip
    (answer,) = model.run([model.parse(query(trained.dense, trained.categories))])
    assert isinstance(answer, ServeError)
    assert answer.status is Status.INTERNAL
    assert "no number" in str(answer)


def test_weights_are_required_whole(trained: Trained, store: tierstore.Store) -> None:
    ranking: Any = Models(store).by_name["ranking"]
    tensors = store.tensors()
    ranking.require(tensors)
    name = next(name for name in tensors if name.startswith("model."))
    with pytest.raises(tierstore.errors.DamagedError, match=f"{name} of the newest commit is missing"):
        ranking.require({key: each for key, each in tensors.items() if key != name})
    with pytest.raises(tierstore.errors.DamagedError, match="has shape"):
        ranking.require(tensors | {name: tensors[name].reshape(-1)[:0]})
