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
from tests.serve.models.stores import asked, models_of
from tests.train.readers.test_hashing import splitmix64
from tests.train.readers.test_values import category_of
from tierstore.serve.messages import InferTensor
from tierstore.serve.tensors import objects
from tierstore.trace import read_trace
from tierstore.train import train, trainer
from tierstore.train.build import build_run, open_run_store
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, RunConfig, StoreSection, TrainSection
from tierstore.train.lookups import trace_run
from tierstore.train.readers import DataError
from tierstore.train.summary import digest_bits

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS, BATCH, TABLE = 90, 16, 40
COLUMNS = ("history", "city", "genres", "zip", "user", "member")


def draw_rows():
    """Columns of Python values, None where missing."""
    random = np.random.default_rng(5)

    def some(values, share=0.2):
        return [None if random.random() < share else values[int(random.integers(len(values)))] for _ in range(ROWS)]

    return {
        "history": [random.integers(0, 2**40, int(random.integers(5))).tolist() for _ in range(ROWS)],
        "city": some(["ab", "AB", "0ab", "F", "\u00e9t\u00e9"]),
        "genres": some([["Drama"], ["Drama", "War"], [], ["War", None, "42"]]),
        "zip": some(["02134", "2134", "10115"]),
        "user": [float(x) if x is not None else math.nan for x in some(list(range(1000)))],
        "member": some([True, False]),
    }


@pytest.fixture(scope="module")
def columns():
    return draw_rows()


@pytest.fixture(scope="module")
def labels():
    return np.random.default_rng(6).choice([-1, 1], ROWS).tolist()


@pytest.fixture(scope="module")
def config(tmp_path_factory, columns, labels):
    path = tmp_path_factory.mktemp("own") / "rows.parquet"
    pq.write_table(pa.table({"clicked": labels, **columns}), path, row_group_size=20)
    return RunConfig(
        data=DataSection(path=str(path), label_column="clicked", dense_columns=(), sparse_columns=COLUMNS),
        embedding=EmbeddingSection(dim=4, num_embeddings=TABLE, pooling="mean"),
        model=ModelSection(bottom_mlp=(8,), top_mlp=(8,)),
        train=TrainSection(batch_size=BATCH, epochs=2, commit_every=2),
    )


def stored_in(config: RunConfig, path: Path, **more) -> RunConfig:
    return dataclasses.replace(config, store=StoreSection(path=str(path), ddr="8MiB", **more))


def ids_by_hand(columns):
    """Of each column, the bags of row ids, one value at a time."""
    return [
        [
            [
                splitmix64(category + (number + 1) * 0x9E3779B97F4A7C15) % TABLE
                for category in map(category_of, bag if isinstance(bag, list) else [bag])
                if category is not None
            ]
            for bag in columns[name]
        ]
        for number, name in enumerate(COLUMNS)
    ]


def jagged(bags, rows):
    cut = [column[rows] for column in bags]
    values = [each for column in cut for bag in column for each in bag]
    lengths = [len(bag) for column in cut for bag in column]
    return tierstore.KeyedJaggedTensor(
        COLUMNS, torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=torch.int64)
    )


@pytest.fixture(scope="module")
def by_hand(config, columns, labels, tmp_path_factory):
    """The digest of a plain loop, and the probabilities that its model gives all rows."""
    config = stored_in(config, tmp_path_factory.mktemp("by hand") / "store")
    bags = ids_by_hand(columns)
    targets = torch.tensor([float(label == 1) for label in labels])
    with open_run_store(config) as store:
        run = build_run(config, store)
        for _ in range(2):
            for begin in range(0, ROWS, BATCH):
                rows = slice(begin, begin + BATCH)
                logits = run.model(torch.empty(len(targets[rows]), 0), jagged(bags, rows))
                run.optimizer.zero_grad()
                binary_cross_entropy_with_logits(logits, targets[rows]).backward()
                run.optimizer.step()
        with torch.no_grad():
            probabilities = torch.sigmoid(run.model(torch.empty(ROWS, 0), jagged(bags, slice(None))))
        return digest_bits(run), probabilities


def test_a_run_ends_in_the_bits_of_a_plain_loop(config, by_hand, tmp_path):
    assert train(stored_in(config, tmp_path / "store"), bits=True).bits == by_hand[0]


def test_a_run_that_broke_off_goes_on_to_the_same_bits(config, by_hand, tmp_path, monkeypatch):
    config = stored_in(config, tmp_path / "store")
    steps = 0

    def step(*arguments):
        nonlocal steps
        steps += 1
        if steps == 9:
            raise RuntimeError("a power cut")
        return train_step(*arguments)

    train_step = trainer.train_step
    monkeypatch.setattr(trainer, "train_step", step)
    with pytest.raises(RuntimeError, match="a power cut"):
        train(config)
    with tierstore.open(config.store.path, mode="r", ddr="8MiB") as store:
        assert 0 < store.extra["tierstore.train"]["position"]["row"] < ROWS
    assert train(config, resume=True, bits=True).bits == by_hand[0]


def test_a_run_is_traced_and_recorded(config, columns, tmp_path):
    bags = ids_by_hand(columns)
    traced = trace_run(config)
    for number, name in enumerate(COLUMNS):
        assert traced.tables[name].ids.tolist() == [each for bag in bags[number] for each in bag]
        assert np.diff(traced.tables[name].offsets).tolist() == [len(bag) for bag in bags[number]]
    train(stored_in(config, tmp_path / "store", record=str(tmp_path / "run.npz"), record_rate=1.0))
    recorded = read_trace(tmp_path / "run.npz")
    for number, name in enumerate(COLUMNS):
        looked_up = sorted(each for bag in bags[number] for each in bag)
        assert sorted(recorded.tables[name].ids.tolist()) == sorted(2 * looked_up)


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
        (answer,) = asked(models_of(store).by_name["ranking"], inputs)
    assert torch.equal(torch.tensor(answer["probabilities"]), by_hand[1])


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The same rows of row numbers in each format."""
    folder = tmp_path_factory.mktemp("formats")
    random = np.random.default_rng(7)
    label, ids = random.integers(0, 2, ROWS), random.integers(0, TABLE, ROWS)
    bags = [random.integers(0, TABLE, int(random.integers(4))) for _ in range(ROWS)]
    pq.write_table(pa.table({"label": label, "a": ids, "b": [bag.tolist() for bag in bags]}), folder / "x.parquet")
    (folder / "npy").mkdir()
    np.save(folder / "npy" / "label.npy", label * 2 - 1)
    np.save(folder / "npy" / "a.npy", ids.astype(np.float32))
    np.save(folder / "npy" / "b.npy", np.concatenate(bags))
    np.save(folder / "npy" / "b.offsets.npy", np.append(0, np.cumsum([len(bag) for bag in bags])))
    return folder


def test_bags_of_row_numbers_are_the_same_in_parquet_and_npy(config, formats, tmp_path):
    def run(path, rows=TABLE):
        data = DataSection(path=str(formats / path), hashing="mod", dense_columns=(), sparse_columns=("a", "b"))
        embedding = dataclasses.replace(config.embedding, num_embeddings=rows)
        with_data = dataclasses.replace(config, data=data, embedding=embedding)
        return train(stored_in(with_data, tmp_path / f"{path}-{rows}"), bits=True).bits

    assert run("x.parquet") == run("npy")
    with pytest.raises(DataError, match=r"npy, row \d+, column [ab]: category 39 has no row in a table of 39 rows"):
        run("npy", TABLE - 1)
