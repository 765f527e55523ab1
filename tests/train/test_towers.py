"""Runs with towers: trained to the bits of a model made by hand, resumed, and partitioned by what they trained."""

import itertools
import json

import numpy as np
import pytest
import torch

import tierstore
from tierstore.models import DCNTower, DLRMTower
from tierstore.settings.sections import to_toml
from tierstore.train import trainer
from tierstore.train.build import build_model, open_data
from tierstore.train.config import ConfigError, RunConfig, load
from tierstore.train.partition import partition_run

from .runs import config_of

TOWERS = [[f"C{i}" for i in range(start, 27, 3)] for start in (1, 2, 3)]


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_a_killed_run_ends_in_the_bits_of_one_that_was_not(run, monkeypatch, interaction):
    settings = {"model__towers": TOWERS, "model__interaction": interaction, "train__commit_every": 4}
    whole, flat = run("whole", **settings), run("flat", model__interaction=interaction)
    steps, real = iter(range(100)), trainer.train_step

    def step(*arguments):
        if next(steps) == 10:
            raise KeyError
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", step)
        with pytest.raises(KeyError):
            run(**settings)
    resumed = run(resume=True, **settings)
    assert (resumed.bits, resumed.test) == (whole.bits, whole.test)
    assert whole.bits != flat.bits
    with tierstore.open(whole.store, mode="r", ddr="8MiB") as store:
        trained = [name for name in store.tensors() if name.startswith("model.embeddings.towers.")]
    assert len(trained) == 3 * (2 if interaction == "dot" else 4)
    with pytest.raises(ValueError, match=r"model\.towers"):
        run("whole", resume=True, **settings | {"model__towers": TOWERS[::-1]})


class Tables(torch.nn.Module):
    """What towers ask of tables."""

    def embedding_bag_configs(self):
        return [tierstore.TableConfig(name=f"C{i}", num_embeddings=9, embedding_dim=4) for i in range(1, 27)]


@pytest.mark.parametrize("compression", [1.0, 4.0, 1000.0])
def test_keys_decide_the_modules(folder, compression):
    keys = {"model__towers": TOWERS, "model__tower_compression": compression, "model__tower_per_feature": 1}
    model = build_model(config_of(folder, "x", **keys, model__tower_flat=1), Tables())
    dim = max(1, round(26 * 4 / (compression * (26 + 3))))
    assert [type(each) for each in model.embeddings.towers] == [DLRMTower] * 3
    assert model.embeddings.widths == [dim * (size + 1) for size in (9, 9, 8)]
    assert model.interaction.out_features == dim + 30 * 29 // 2
    model = build_model(config_of(folder, "x", **keys, model__interaction="dcn"), Tables())
    assert [type(each) for each in model.embeddings.towers] == [DCNTower] * 3
    assert model.embeddings.widths == [max(1, round(size * 4 / compression)) for size in (9, 9, 8)]
    assert model.interaction.out_features == 4 + model.embeddings.out_features


def test_a_file_of_towers_is_part_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "towers.json").write_text(json.dumps({"towers": TOWERS}))
    (tmp_path / "run.toml").write_text('[model]\ntowers = "towers.json"\n')
    config = load("run.toml")
    assert config.model.towers == tuple(map(tuple, TOWERS))
    (tmp_path / "towers.json").unlink()
    (tmp_path / "again.toml").write_text(to_toml(config))
    assert load("again.toml") == config
    assert RunConfig().model.towers == ()
    with pytest.raises(ConfigError, match=r"model\.towers = 'towers\.json'"):
        load("run.toml")
    for wrong in ("{}", "[]", '{"towers": [1]}', '{"towers": [[1]]}', "{"):
        (tmp_path / "towers.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"model\.towers"):
            load("run.toml")


def test_towers_are_of_the_vectors_of_the_runs_last_commit(folder, run):
    summary = run(data__train_rows=300)
    config = config_of(folder, "none", store__path=summary.store)
    plan = partition_run(config, 3, rows=40)
    columns = list(config.data.sparse_columns)
    reader, hasher = open_data(config)
    total, pairs = np.zeros((26, 26)), np.zeros((26, 26))
    with tierstore.open(summary.store, mode="r", ddr="8MiB") as store:
        for batch in reader.batches(hasher, batch_size=1, stop_row=40):
            vectors = [
                store[name].read(ids.values()).sum(0).double().numpy() for name, ids in batch.sparse.to_dict().items()
            ]
            for i, one in enumerate(vectors):
                for j, other in enumerate(vectors):
                    if one.any() and other.any():
                        total[i, j] += abs(one @ other) / (np.linalg.norm(one) * np.linalg.norm(other))
                        pairs[i, j] += 1
    similarity = total / np.maximum(pairs, 1)
    members = [[columns.index(name) for name in tower] for tower in plan.towers]
    assert sorted(itertools.chain(*members)) == list(range(26))
    for first, own in enumerate(members):
        for second, others in enumerate(members):
            alike = [similarity[i, j] for i in own for j in others if i != j]
            assert plan.alike[first, second] == pytest.approx(np.mean(alike), rel=1e-6)
    assert plan.shares[:, 1] == pytest.approx([3 * len(own) / 26 for own in members])
