"""DLRM, its interactions and towers, against the papers' formulas, written with loops."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tierstore
from tierstore.models import DLRM, CrossNetwork, DCNTower, DLRMTower, DotInteraction, Towers
from tierstore.nn.collection import TieredEmbeddingBagCollection
from tierstore.nn.jagged import KeyedJaggedTensor

B, C, F, D = 5, 13, 4, 3


class PlainEmbeddings(nn.Module):
    """What a collection answers, from one plain table per feature; the ids are int64 [B, F]."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, D) for _ in range(F))

    def forward(self, ids):
        pooled = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        return SimpleNamespace(values=lambda: pooled)


def test_dot_interaction_is_all_pairs_below_the_diagonal():
    dense, sparse = torch.randn(B, D), torch.randn(B, F, D)
    interaction = DotInteraction(num_features=F, dim=D)
    for found, own, others in zip(interaction(dense, sparse), dense, sparse, strict=True):
        vectors = [own, *others]
        pairs = [sum(vectors[i] * vectors[j]) for i in range(len(vectors)) for j in range(i)]
        torch.testing.assert_close(found, torch.stack([*own, *pairs]))
        assert found.shape == (interaction.out_features,)


@pytest.mark.parametrize("rank", [0, 2])
def test_cross_network_is_the_papers_recurrence(rank):
    dense, sparse = torch.randn(B, D), torch.randn(B, F, D)
    network = CrossNetwork(num_features=F, dim=D, layers=3, rank=rank)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    for found, own, others in zip(network(dense, sparse), dense, sparse, strict=True):
        x = first = torch.cat([own, *others])
        for layer in network.layers:
            if rank:
                inner, outer = layer
                x = first * (outer.weight @ (inner.weight @ x) + outer.bias) + x
            else:
                x = first * (layer.weight @ x + layer.bias) + x
        torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_forward_joins_the_parts(interaction):
    model = DLRM(
        PlainEmbeddings(), num_features=F, embedding_dim=D, bottom_mlp=(8, 6), top_mlp=(7,), interaction=interaction
    )
    dense, ids = torch.randn(B, C), torch.randint(0, 10, (B, F))
    logits = model(dense, ids)

    def dense_layer(linear, x):
        return x @ linear.weight.T + linear.bias

    x = dense
    for linear in (model.bottom[0], model.bottom[2], model.bottom[4]):
        x = dense_layer(linear, x).clamp(min=0)
    sparse = torch.stack([table.weight[ids[:, i]] for i, table in enumerate(model.embeddings.tables)], dim=1)
    joined = model.interaction(x, sparse)
    expected = dense_layer(model.top[2], dense_layer(model.top[0], joined).clamp(min=0))[:, 0]
    torch.testing.assert_close(logits, expected)
    without = DLRM(PlainEmbeddings(), num_features=F, embedding_dim=D, num_dense=0, interaction=interaction)
    assert torch.equal(without(None, ids), without(torch.empty(B, 0), ids))


def test_wrong_arguments_are_named():
    for wrong, message in (
        ({"interaction": "cat"}, "interaction='cat'"),
        ({"interaction": "dcn", "cross_layers": 0}, "cross_layers=0"),
        ({"bottom_mlp": (0,)}, "at least 1"),
        ({"dense_dim": 8}, "dense_dim=8"),
    ):
        with pytest.raises(ValueError, match=message):
            DLRM(PlainEmbeddings(), num_features=F, embedding_dim=D, **wrong)


# torch's compiler looks at the gradient of every input; it hides the warning, but not from a filter that raises it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_dense_part_compiled_or_captured_in_a_graph_gives_the_same(device):
    torch.manual_seed(0)
    model = DLRM(nn.Identity(), num_features=F, embedding_dim=D, bottom_mlp=(8,), top_mlp=(8,)).to(device)
    dense, pooled = torch.rand(B, C, device=device), torch.rand(B, F * D, device=device, requires_grad=True)
    if device == "cpu":
        other = torch.compile(model.dense_part, backend="aot_eager", fullgraph=True)
    else:
        other = nn.Module()
        other.model, other.forward = model, model.dense_part  # whose parameters are the model's
        other = torch.cuda.make_graphed_callables(other, (dense.clone(), pooled.detach().requires_grad_()))
    found = []
    for part in (model.dense_part, other):
        logits = part(dense, pooled)
        gradients = torch.autograd.grad(logits.square().sum(), [pooled, *model.dense_parameters().values()])
        found.append([logits.detach(), *(each.clone() for each in gradients)])
    torch.testing.assert_close(*found, **({"rtol": 0, "atol": 0} if device == "cpu" else {}))


TOWERS = [["d", "a"], ["b"], ["c", "e"]]


def by_hand(tower, of_sample):
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    pooled = torch.randn(B, 4 * D)
    weights = {name: each.detach().double().numpy() for name, each in tower.named_parameters()}
    expected = np.stack([of_sample(sample, weights) for sample in pooled.double().numpy()])
    assert expected.shape == (B, tower.out_features)
    np.testing.assert_allclose(tower(pooled).detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("per_feature", "flat"), [(2, 3), (2, 0), (0, 3)])
def test_a_dlrm_tower_projects_each_feature_and_all_together(per_feature, flat):
    def of_sample(sample, weights):
        inputs = [("per_feature", each) for each in np.split(sample, 4)] if per_feature else []
        inputs += [("flat", sample)] if flat else []
        return np.concatenate([weights[f"{name}.weight"] @ x + weights[f"{name}.bias"] for name, x in inputs])

    tower = DLRMTower(num_features=4, dim=D, out_dim=5, per_feature=per_feature, flat=flat)
    assert tower.out_features == 5 * tower.num_vectors == 5 * (4 * per_feature + flat)
    by_hand(tower, of_sample)


def test_a_dcn_tower_crosses_then_projects():
    def of_sample(first, weights):
        x = first
        for layer in ("cross.layers.0", "cross.layers.1"):
            x = first * (weights[f"{layer}.weight"] @ x + weights[f"{layer}.bias"]) + x
        return weights["projection.weight"] @ x + weights["projection.bias"]

    by_hand(DCNTower(num_features=4, dim=D, out_features=7, layers=2), of_sample)


@pytest.fixture
def embeddings(store_dir):
    with tierstore.open(store_dir, ddr="4MiB") as store:
        for name, dim in {"a": D, "b": 2 * D, "c": D, "d": D}.items():
            features = ("c", "e") if name == "c" else (name,)
            store.create_table(
                tierstore.TableConfig(name=name, num_embeddings=20, embedding_dim=dim, feature_names=features)
            )
        yield TieredEmbeddingBagCollection(store)


def batch():
    ids = torch.randint(0, 20, (5 * B,), generator=torch.Generator().manual_seed(1))
    return KeyedJaggedTensor(list("ebadc"), ids, lengths=torch.ones(5 * B, dtype=torch.int64))


def test_towers_get_their_features_in_the_collections_order(embeddings):
    modules = [nn.Linear(2 * D, width) for width in (4, 2, 3)]
    towers = Towers(embeddings, TOWERS, modules)
    columns = embeddings(batch()).to_dict()
    inputs = (torch.cat([columns[name] for name in tower], dim=1) for tower in ("ad", "b", "ce"))
    expected = [module(each) for module, each in zip(modules, inputs, strict=True)]
    found = towers(batch()).to_dict()
    assert all(map(torch.equal, found.values(), expected))
    assert (list(found), towers.widths) == (["tower0", "tower1", "tower2"], [4, 2, 3])
    assert torch.equal(towers.compressed(embeddings(batch()).values()), torch.cat(expected, dim=1))


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_a_dlrm_over_towers_trains_all_its_parts(embeddings, interaction):
    torch.manual_seed(0)
    if interaction == "dot":
        modules = [DLRMTower(num_features=2, dim=D, out_dim=4, per_feature=1) for _ in TOWERS]
        shape = {"num_features": 9, "embedding_dim": 4}
    else:
        modules = [DCNTower(num_features=2, dim=D, out_features=n) for n in (4, 5, 2)]
        shape = {"num_features": 11, "embedding_dim": 1, "dense_dim": 6}
    model = DLRM(Towers(embeddings, TOWERS, modules), num_dense=2, **shape, interaction=interaction)
    dense, before = torch.rand(B, 2), embeddings.store["a"].read(torch.arange(20))
    logits = model(dense, batch())
    vectors = model.embeddings(batch()).values().view(B, -1, shape["embedding_dim"])
    torch.testing.assert_close(logits, model.top(model.interaction(model.bottom(dense), vectors))[:, 0])
    logits.sum().backward()
    parameters = model.dense_parameters()
    assert {name for name, _ in model.named_parameters()} - set(parameters) == {"embeddings.embeddings.rows"}
    assert sum(name.startswith("embeddings.towers.") for name in parameters) == 3 * 4
    assert all(each.grad.abs().sum() > 0 for name, each in parameters.items() if "bias" not in name)
    assert not torch.equal(before, embeddings.store["a"].read(torch.arange(20)))


def test_what_is_no_partition_is_refused(embeddings):
    for towers, message in {
        "ab cd x": "'e' 0 times", "abe cd a": "'a' 2 times", "abe cd x": "'x' 1 times", "abcd e ": "no features",
        "abc de": "3 modules",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Towers(embeddings, towers.split(" "), [DCNTower(num_features=1, dim=1, out_features=1)] * 3)
    with pytest.raises(ValueError, match="at least"):
        DLRMTower(num_features=2, dim=3, out_dim=4, flat=0)
