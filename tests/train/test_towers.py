"""Runs with towers: the modules that their keys say, towers by the vectors of a run."""

import json

import numpy as np
import pytest
import torch

import tierstore
from tierstore.dist.placement.towers import partition, similarity_of
from tierstore.models import DCNTower, DLRMTower
from tierstore.settings.sections import to_toml
from tierstore.train.build import build_model, open_data, partition_run
from tierstore.train.config import ConfigError, load

from .runs import TOWERS, config_of


class Tables(torch.nn.Module):
    """What towers ask of tables."""

    def embedding_bag_configs(self):
        return [tierstore.TableConfig(name=f"C{i}", num_embeddings=9, embedding_dim=4) for i in range(1, 27)]


@pytest.mark.parametrize("compression", [1.0, 4.0, 1000.0])
def test_keys_decide_the_modules(folder, compression):
    keys = {"model__towers": TOWERS, "model__tower_compression": compression, "model__tower_per_feature": 1}
    dim = max(1, round(26 * 4 / (compression * (26 + 3 * 2))))
    for kind, module, widths, out in (
        ("dot", DLRMTower, [dim * (size + 2) for size in (9, 9, 8)], dim + 33 * 32 // 2),
        ("dcn", DCNTower, own := [max(1, round(size * 4 / compression)) for size in (9, 9, 8)], 4 + sum(own)),
    ):
        model = build_model(config_of(folder, "x", **keys, model__tower_flat=2, model__interaction=kind), Tables())
        assert [type(each) for each in model.embeddings.towers] == [module] * 3
        assert (model.embeddings.widths, model.interaction.out_features) == (widths, out)


def test_a_file_of_towers_is_part_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "towers.json").write_text(json.dumps({"towers": TOWERS}))
    (tmp_path / "run.toml").write_text('[model]\ntowers = "towers.json"\n')
    config = load("run.toml")
    assert config.model.towers == tuple(map(tuple, TOWERS))
    (tmp_path / "again.toml").write_text(to_toml(config))
    for wrong in ("{}", "[]", '{"towers": [1]}', '{"towers": [], "x": 1}', "{"):
        (tmp_path / "towers.json").write_text(wrong)
        with pytest.raises(ConfigError, match=r"model\.towers"):
            load("run.toml")
    assert load("again.toml") == config


def test_towers_are_of_the_vectors_of_the_runs_last_commit(folder, run):
    summary = run()
    config = config_of(folder, "none", store__path=summary.store)
    columns, (reader, hasher) = list(config.data.sparse_columns), open_data(config)
    (batch,) = reader.batches(hasher, batch_size=40, stop_row=40)
    lookups = [len(ids.values()) for ids in batch.sparse.to_dict().values()]
    with tierstore.open(summary.store, mode="r", ddr="8MiB") as store:
        vectors = tierstore.TieredEmbeddingBagCollection(store, tables=columns)(batch.sparse).values()
    similarity = similarity_of([vectors.detach().view(40, 26, 4)], columns)
    expected = partition(columns, similarity, np.stack([lookups, np.ones(26)], axis=1), 3)
    found = partition_run(config, 3, rows=40)
    assert found.towers == expected.towers
    np.testing.assert_allclose(found.shares, expected.shares)
    np.testing.assert_allclose(found.alike, expected.alike, rtol=1e-5)
