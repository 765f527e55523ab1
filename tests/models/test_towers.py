"""Tower modules and what joins them, against loops over samples and features in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

import tierstore
from tierstore.models import DLRM, DCNTower, DLRMTower, Towers
from tierstore.nn import KeyedJaggedTensor, TieredEmbeddingBagCollection

B, D = 5, 3
TOWERS = [["d", "a"], ["b"], ["c", "e"]]
IN_ORDER = [["a", "d"], ["b"], ["c", "e"]]


def arrays(module):
    return {name: each.detach().double().numpy() for name, each in module.named_parameters()}


@pytest.mark.parametrize(("per_feature", "flat"), [(2, 3), (2, 0), (0, 3)])
def test_a_dlrm_tower_projects_each_feature_and_all_together(per_feature, flat):
    tower = DLRMTower(num_features=4, dim=D, out_dim=5, per_feature=per_feature, flat=flat)
    pooled, weights = torch.randn(B, 4 * D), arrays(tower)
    found = tower(pooled)
    assert found.shape == (B, tower.out_features) == (B, (4 * per_feature + flat) * 5)
    assert tower.num_vectors == 4 * per_feature + flat
    for sample, row in zip(pooled.double().numpy(), found, strict=True):
        vectors = np.split(sample, 4) if per_feature else []
        expected = [weights["per_feature.weight"] @ vector + weights["per_feature.bias"] for vector in vectors]
        if flat:
            expected.append(weights["flat.weight"] @ sample + weights["flat.bias"])
        np.testing.assert_allclose(row.detach(), np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_a_dcn_tower_crosses_then_projects():
    tower = DCNTower(num_features=4, dim=D, out_features=7, layers=2)
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    pooled, weights = torch.randn(B, 4 * D), arrays(tower)
    found = tower(pooled)
    assert found.shape == (B, tower.out_features) == (B, 7)
    for first, row in zip(pooled.double().numpy(), found, strict=True):
        x = first
        for layer in range(2):
            x = first * (weights[f"cross.layers.{layer}.weight"] @ x + weights[f"cross.layers.{layer}.bias"]) + x
        expected = weights["projection.weight"] @ x + weights["projection.bias"]
        np.testing.assert_allclose(row.detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def embeddings(store_dir):
    with tierstore.open(store_dir, ddr="4MiB") as store:
        for name in ("a", "b", "c"):
            features = ("c", "e") if name == "c" else (name,)
            dim = 2 * D if name == "b" else D
            table = tierstore.TableConfig(name=name, num_embeddings=20, embedding_dim=dim, feature_names=features)
            store.create_table(table)
        store.create_table(tierstore.TableConfig(name="d", num_embeddings=20, embedding_dim=D))
        yield TieredEmbeddingBagCollection(store)


def batch():
    ids = torch.randint(0, 20, (5 * B,), generator=torch.Generator().manual_seed(1))
    return KeyedJaggedTensor(list("ebadc"), ids, lengths=torch.ones(5 * B, dtype=torch.int64))


def test_towers_get_their_features_in_the_collections_order(embeddings):
    assert embeddings.feature_names == list("abced")
    given = [nn.Linear(2 * D, 4), nn.Linear(2 * D, 2), nn.Identity()]
    for module, width in zip(given, (4, 2, 2 * D), strict=True):
        module.out_features = width
    towers = Towers(embeddings, TOWERS, given)
    assert (towers.widths, towers.out_features) == ([4, 2, 2 * D], 6 + 2 * D)
    columns = embeddings(batch()).to_dict()
    inputs = [torch.cat([columns[name] for name in tower], dim=1) for tower in IN_ORDER]
    found = towers(batch())
    torch.testing.assert_close(found.values(), torch.cat([m(x) for m, x in zip(given, inputs, strict=True)], dim=1))
    assert torch.equal(found.to_dict()["tower2"], torch.cat([columns["c"], columns["e"]], dim=1))
    assert torch.equal(found.values(), towers.compressed(embeddings(batch()).values()))


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_a_dlrm_over_towers_trains_all_its_parts(embeddings, interaction):
    if interaction == "dot":
        modules = [DLRMTower(num_features=2, dim=D, out_dim=4, per_feature=1) for _ in TOWERS]
        shape = {"num_features": 9, "embedding_dim": 4}
    else:
        modules = [DCNTower(num_features=2, dim=D, out_features=n) for n in (4, 5, 2)]
        shape = {"num_features": 11, "embedding_dim": 1, "dense_dim": 6}
    torch.manual_seed(0)
    towers = Towers(embeddings, TOWERS, modules)
    model = DLRM(towers, num_dense=2, **shape, interaction=interaction)
    dense = torch.rand(B, 2)
    before = embeddings.store["a"].read(torch.arange(20))
    logits = model(dense, batch())
    x, vectors = model.bottom(dense), towers(batch()).values()
    assert x.shape == (B, 4 if interaction == "dot" else 6)
    crossed = model.interaction(x, vectors.view(B, -1, shape["embedding_dim"]))
    torch.testing.assert_close(logits, model.top(crossed)[:, 0])
    logits.sum().backward()
    names = model.dense_parameters()
    own = {name for name, _ in model.named_parameters() if name.startswith("embeddings.towers.")}
    assert own <= set(names)
    assert "embeddings.towers.2.flat.weight" in own or "embeddings.towers.2.projection.weight" in own
    assert all(
        each.grad is not None and each.grad.abs().sum() > 0 for name, each in names.items() if "bias" not in name
    )
    assert not any("rows" in name for name in names)
    assert not torch.equal(before, embeddings.store["a"].read(torch.arange(20)))


@pytest.mark.parametrize(
    ("towers", "count", "message"),
    [
        ([["a", "b"], ["c", "d"]], 2, "'e'"),
        ([["a", "b", "e"], ["c", "d", "a"]], 2, "'a'"),
        ([["a", "b", "e"], ["c", "d", "x"]], 2, "'x'"),
        ([["a", "b", "c", "d", "e"], []], 2, "no features"),
        ([["a", "b", "c"], ["d", "e"]], 1, "modules"),
    ],
)
def test_what_is_no_partition_is_refused(embeddings, towers, count, message):
    modules = [DCNTower(num_features=1, dim=1, out_features=1)] * count
    with pytest.raises(ValueError, match=message):
        Towers(embeddings, towers, modules)


def test_sizes_that_give_nothing_are_refused():
    with pytest.raises(ValueError, match="at least"):
        DLRMTower(num_features=2, dim=3, out_dim=4, flat=0)
    with pytest.raises(ValueError, match="dense_dim=8"):
        DLRM(nn.Identity(), num_features=2, embedding_dim=4, dense_dim=8)
