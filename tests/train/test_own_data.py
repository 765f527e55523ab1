"""Runs over one's own data, against a loop that reads one value at a time; generated clicks, the demonstration."""

import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import tierstore
from tests.serve.models.stores import asked
from tests.train.readers.rows import category_of
from tests.train.readers.test_hashing import splitmix64
from tierstore.cli import main
from tierstore.serve.messages import InferTensor, objects
from tierstore.serve.models import Models
from tierstore.train import demo, train
from tierstore.train.build import build_run, open_run_store
from tierstore.train.config import DataSection, EmbeddingSection, ModelSection, RunConfig, StoreSection, TrainSection
from tierstore.train.demo import write_synthetic
from tierstore.train.readers import CriteoReader
from tierstore.train.summary import digest_bits

from .readers.rows import matrix

ROWS, BATCH, TABLE = 90, 16, 40
COLUMNS = ("history", "city", "genres", "zip", "user", "member")


@pytest.fixture(scope="module")
def columns():
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
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
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


def test_labels_are_drawn_with_the_chances_that_the_best_auc_is_of():
    rows = demo._Source(5).draw(50_000)
    chances = 1 / (1 + np.exp(-rows.logits))
    order = np.argsort(chances)
    for part in np.array_split(order, 10):
        # 5,000 draws: three standard deviations are at most 0.021.
        assert rows.labels[part].mean() == pytest.approx(chances[part].mean(), abs=0.021)


@pytest.mark.kernel
def test_the_seed_decides_every_byte(tmp_path):
    for n in range(3):
        write_synthetic(tmp_path / str(n), train_rows=50, test_rows=20, seed=n // 2)
    texts = [(tmp_path / str(n)).read_bytes() for n in range(3)]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="test_rows=0"):
        write_synthetic(tmp_path / "a", train_rows=1, test_rows=0)


def test_every_row_is_read_back(tmp_path):
    best = write_synthetic(tmp_path / "clicks.tsv", train_rows=6_000, test_rows=1_000, seed=3)
    (rows,) = CriteoReader(tmp_path / "clicks.tsv").read_chunks(0, None, 9_000)
    drawn = demo._Source(3).draw(7_000)
    assert best.rows == 1_000
    assert rows.labels.tolist() == drawn.labels.tolist()
    assert rows.dense.tolist() == drawn.dense.tolist()
    assert matrix(rows.categories).tolist() == np.where(drawn.hashes, drawn.hashes, np.int64(-1)).tolist()
    missing = (drawn.hashes == 0).mean(axis=0)
    assert (missing[0::2] == 0).all()
    assert ((missing[1::2] > 0.03) & (missing[1::2] < 0.05)).all()


def in_process(command, **_):
    """What its processes do: to start one takes longer than to train these few rows."""
    assert command[:5] == [sys.executable, "-P", "-m", "tierstore", "train"]
    return SimpleNamespace(returncode=main(command[4:]))


def test_a_small_demonstration_ends_in_equal_bits_and_names_commands_that_work(tmp_path, capfd, monkeypatch):
    folder = tmp_path / "demo"
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=in_process))
    monkeypatch.setattr(demo, "_BUDGET_SHARE", 0.3)  # of few rows a tenth is no budget
    assert demo.run_demo(folder, rows=4_000)
    output = capfd.readouterr().out
    assert "best AUC anyone can reach on the test rows is 0." in output
    assert "Both ended in the same bits" in output
    tiered, in_memory = (json.loads((folder / f"{name}.json").read_text()) for name in ("tiered", "in-memory"))
    assert tiered["bits"] == in_memory["bits"]
    assert tiered["tiers"]["ddr"]["evictions"] > 0
    assert not in_memory["tiers"]["ddr"]["evictions"]
    commands = [line.strip() for line in output.partition("What to try next:")[2].splitlines()]
    commands = [shlex.split(line.partition("tierstore ")[2]) for line in commands if "tierstore " in line]
    assert [command[0] for command in commands] == ["inspect", "verify", "train", "train", "train"]
    for command in commands:
        assert main(command) == 0, command
    assert (folder / "demo.html").as_uri() in output
    page = (folder / "demo.html").read_text(encoding="utf-8")
    for run in (tiered, in_memory):
        assert f"{run['samples_per_second']:,.0f}" in page
        assert run["history"][-1]["bytes_read"] == run["tiers"]["ssd"]["bytes_read"]
    lfu = json.loads((folder / "lfu.json").read_text())
    assert lfu["bits"] == tiered["bits"]


def test_a_folder_of_another_kind_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("precious")
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ValueError, match="is no demonstration; choose another folder with --dir"):
            demo.run_demo(taken)
    assert (tmp_path / "mine").read_text() == "precious"
