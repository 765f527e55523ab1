"""Runs over one's own data: bags, texts, numbers with gaps, labels of -1 and 1, no dense columns.

Each is compared with a loop that reads one value at a time."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tests.serve.models.stores import asked
from tests.train.readers.rows import category_of
from tests.train.readers.test_hashing import splitmix64
from tierstore.serve.messages import InferTensor
from tierstore.serve.models import Models
from tierstore.serve.tensors import objects
from tierstore.train import train
from tierstore.train.build import build_run, open_run_store
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, RunConfig, StoreSection, TrainSection
from tierstore.train.summary import digest_bits

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, BATCH, TABLE = 90, 16, 40
COLUMNS = ("history", "city", "genres", "zip", "user", "member")


@pytest.fixture(scope="module")
def columns():
    """Columns of Python values, None where missing."""
    random = np.random.default_rng(5)

    def some(*values):
        return [None if random.random() < 0.2 else values[int(random.integers(len(values)))] for _ in range(ROWS)]

    return {
        "clicked": random.choice([-1, 1], ROWS).tolist(),
        "history": [random.integers(0, 2**40, int(random.integers(5))).tolist() for _ in range(ROWS)],
        "city": some("ab", "AB", "0ab", "F", "\u00e9t\u00e9"),
        "genres": some(["Drama"], ["Drama", "War"], [], ["War", None, "42"]),
        "zip": some("02134", "2134", "10115"),
        "user": [math.nan if each is None else each for each in some(*np.arange(1000.0).tolist())],
        "member": some(True, False),
    }


@pytest.fixture(scope="module", params=["fixed", "dynamic"])
def config(request, tmp_path_factory, columns):
    path, hashing = tmp_path_factory.mktemp("own") / "rows.parquet", {"fixed": "mix", "dynamic": "none"}
    pq.write_table(pa.table(columns), path, row_group_size=20)
    data = {"label_column": "clicked", "dense_columns": (), "sparse_columns": COLUMNS, "hash_seed": 3}
    return RunConfig(
        data=DataSection(path=str(path), hashing=hashing[request.param], **data),
        embedding=EmbeddingSection(dim=4, num_embeddings=TABLE, pooling="mean", ids=request.param),
        model=ModelSection(bottom_mlp=(8,), top_mlp=(8,)),
        train=TrainSection(batch_size=BATCH, epochs=2, commit_every=2),
    )


def stored_in(config: RunConfig, path: Path) -> RunConfig:
    return dataclasses.replace(config, store=StoreSection(path=str(path), ddr="8MiB"))


def jagged(columns, rule, rows):
    """Ids one value at a time."""
    values, lengths = [], []
    for number, name in enumerate(COLUMNS):
        for bag in columns[name][rows]:
            found = [category_of(each, rule=rule) for each in (bag if isinstance(bag, list) else [bag])]
            found = [each for each in found if each is not None]
            lengths.append(len(found))
            step = (number + 1) * 0x9E3779B97F4A7C15
            values += found if rule.are_ids else [splitmix64(each + step) % TABLE for each in found]
    ids = torch.tensor(values, dtype=torch.int64)
    return tierstore.KeyedJaggedTensor(COLUMNS, ids, lengths=torch.tensor(lengths, dtype=torch.int64))


@pytest.fixture(scope="module")
def by_hand(config, columns, tmp_path_factory):
    """The digest of a plain loop, and the probabilities that its model gives all rows."""
    config = stored_in(config, tmp_path_factory.mktemp("by hand") / "store")
    rule, targets = config.data.rule, torch.tensor([float(label == 1) for label in columns["clicked"]])
    with open_run_store(config) as store:
        run = build_run(config, store)
        for _ in range(2):
            for begin in range(0, ROWS, BATCH):
                rows = slice(begin, begin + BATCH)
                logits = run.model(torch.empty(len(targets[rows]), 0), jagged(columns, rule, rows))
                run.optimizer.zero_grad()
                binary_cross_entropy_with_logits(logits, targets[rows]).backward()
                run.optimizer.step()
        with torch.no_grad():
            probabilities = torch.sigmoid(run.model(torch.empty(ROWS, 0), jagged(columns, rule, slice(None))))
        return digest_bits(run), probabilities


def test_a_run_ends_in_the_bits_of_a_plain_loop(config, by_hand, tmp_path):
    assert train(stored_in(config, tmp_path / "store"), bits=True).bits == by_hand[0]


def test_a_server_takes_what_the_data_holds(config, by_hand, columns, tmp_path):
    config = stored_in(config, tmp_path / "store")
    train(config)
    texts = [
        [[str(int(each)) if not isinstance(each, str) else each for each in bag if category_of(each) is not None]]
        for name in COLUMNS
        for value in columns[name]
        for bag in [value if isinstance(value, list) else [value]]
    ]
    flat = [text.encode() for (bag,) in texts for text in bag]
    inputs = {
        "dense": InferTensor("FP32", np.empty((ROWS, 0), np.float32)),
        "values": InferTensor("BYTES", objects(flat)),
        "lengths": InferTensor("INT32", np.array([len(bag) for (bag,) in texts], np.int32).reshape(len(COLUMNS), ROWS)),
    }
    with tierstore.open(config.store.path, mode="r", ddr="8MiB") as store:
        (answer,) = asked(Models(store).by_name["ranking"], inputs)
    assert torch.equal(torch.tensor(answer["probabilities"]), by_hand[1])
