"""DLRM, its interactions and towers, against the papers' formulas; sharpness, against the Hessian formed whole."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierstore
from tierstore.models import (
    DLRM,
    CrossNetwork,
    DCNTower,
    DLRMTower,
    DotInteraction,
    Towers,
    box_sharpness,
    hessian_eigenvalues,
)
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


class Small:
    """A net of two weights with 9 elements, its loss in three parts, and the loss as a function of the elements."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.inputs = torch.randn(30, 2, dtype=torch.float64)
        self.targets = torch.sin(self.inputs.sum(1)) + torch.randn(30, dtype=torch.float64) / 5
        self.weights = [nn.Parameter(torch.randn(size, dtype=torch.float64)) for size in (6, 3)]
        optimizer = torch.optim.Adam(self.weights, lr=0.03)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss_at(torch.cat(self.weights)).backward()
            optimizer.step()
        self.at = torch.cat(self.weights).detach()

    def errors_at(self, weights: Tensor) -> Tensor:
        return (torch.tanh(self.inputs @ weights[:6].view(2, 3)) @ weights[6:] - self.targets).square()

    def loss_at(self, weights: Tensor) -> Any:
        return self.errors_at(weights).mean()

    def losses(self) -> list[Tensor]:
        return [each.sum() / 30 for each in self.errors_at(torch.cat(self.weights)).split(10)]

    def highest_corner(self, axes: Tensor, bound: Tensor) -> float:
        signs = torch.tensor(list(itertools.product((-1, 1), repeat=len(bound))), dtype=torch.float64)
        base = float(self.loss_at(self.at))
        return 100 * (max(float(self.loss_at(self.at + axes @ (bound * each))) for each in signs) - base) / (1 + base)


@pytest.mark.parametrize("steps", [0, 600])
def test_eigenvalues_are_those_of_the_whole_hessian(steps: int) -> None:
    small = Small(steps)
    whole = np.linalg.eigvalsh(torch.autograd.functional.hessian(small.loss_at, small.at).numpy())
    found = hessian_eigenvalues(small.losses, small.weights)
    np.testing.assert_allclose(found, whole[[0, -1]], atol=1e-4 * abs(whole).max())


@pytest.mark.parametrize(("steps", "epsilon", "iterations"), [(0, 1e-3, 1), (600, 5e-4, 20)])
def test_sharpness_is_the_rise_to_the_highest_corner(steps: int, epsilon: float, iterations: int) -> None:
    """On a slope, and at a minimum, around which other corners are local maxima; in the whole space and a subspace."""
    small, options = Small(steps), {"epsilon": epsilon, "iterations": iterations, "seed": 10}
    expected = small.highest_corner(torch.eye(9, dtype=torch.float64), epsilon * (small.at.abs() + 1))
    assert box_sharpness(small.losses, small.weights, **options) == pytest.approx(expected, rel=1e-4)
    drawn = torch.randn(9, 4, generator=torch.Generator().manual_seed(10), dtype=torch.float64)
    axes = drawn / drawn.norm(dim=0)
    place = torch.from_numpy(np.linalg.pinv(axes.numpy())) @ small.at
    expected = small.highest_corner(axes, epsilon * (place.abs() + 1))
    assert box_sharpness(small.losses, small.weights, dims=4, **options) == pytest.approx(expected, rel=1e-4)


def test_a_hill_inside_the_box_is_climbed() -> None:
    """By the curvature that L-BFGS learns: corners are lower. One coordinate's top is out of the box."""
    at = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    top, bends = torch.tensor([[0.2e-3, -0.5e-3, 0.7e-3, 2e-3], [1e3, 1e4, 1e5, 2e3]], dtype=torch.float64)

    def losses() -> list[Tensor]:
        return [1 - (bends * (at - top).square()).sum()]

    base, highest = losses()[0].item(), 1 - float(bends[3]) * 1e-6
    assert box_sharpness(losses, [at]) == pytest.approx(100 * (highest - base) / (1 + base), rel=1e-4)


def test_weights_come_back_after_an_error() -> None:
    small = Small(0)

    def losses() -> list[Tensor]:
        assert torch.equal(torch.cat(small.weights), small.at), "moved"
        return small.losses()

    with pytest.raises(AssertionError, match="moved"):
        box_sharpness(losses, small.weights)
    assert torch.equal(torch.cat(small.weights), small.at)


RULES = [
    tierstore.DynamicIds(eviction=tierstore.ids.TTL(steps=2), unseen="init"),
    tierstore.DynamicIds(admission=tierstore.ids.Frequency(2), eviction=tierstore.ids.LFU(half_life_steps=2)),
    None,
]
MEASURES: list[Any] = [
    lambda losses, dense, _: hessian_eigenvalues(losses, dense, iterations=3),
    lambda losses, dense, _: box_sharpness(losses, dense, iterations=2),
    lambda losses, dense, known: tierstore.optim.HessianFree(dense).step(known, lambda: losses()[0]),
]


@pytest.mark.parametrize("measure", MEASURES, ids=["eigenvalues", "box", "curvature"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_what_measures_trains_admits_counts_evicts_and_writes_nothing(rules: Any, measure: Any) -> None:
    """It is given the dense weights alone, and ids that were not trained; its lookups are those of modules with
    ``padding_idx``, too, which write that row where they train."""
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=8, embedding_dim=4, ids=rules))
        torch.manual_seed(0)
        bag, dense = tierstore.TieredEmbeddingBag(table), nn.Linear(4, 1)
        both = [bag, tierstore.TieredEmbedding(table, padding_idx=7)]

        def loss(ids: Tensor, modules: Any) -> Tensor:
            return sum(dense(module(ids)).square().mean() for module in modules)  # type: ignore[return-value]

        for _ in range(3):
            loss(torch.arange(6)[None], [bag]).backward()
        if table.ids is not None:
            store.commit()

        def state() -> list[Any]:
            own = [] if table.ids is None else [table.ids.words().tolist(), table.id_stats()]
            read = table.read(torch.arange(8)).tolist()
            return [own, read, [part.tolist() for part in table.written()], table.state, store.changed_tables]

        before, ids = state(), (torch.arange(6, 8) if table.ids is None else torch.arange(100, 108))[None]
        measure(lambda: [loss(ids, both)], list(dense.parameters()), lambda: dense(torch.ones(1, 4)).sum())
        assert state() == before
        loss(ids, both).backward()
        assert state() != before, "rows are trained again"


def test_measures_of_no_loss_are_errors_and_of_nan_are_nan() -> None:
    weight = nn.Parameter(torch.ones(3))
    wrong: list[tuple[Any, Any, str]] = [
        (lambda: [weight.sum().item()], [weight], "a loss must be a tensor .*not float"),
        (lambda: [weight], [weight], r"one element .* not a tensor \[3\]"),
        (lambda: [weight.detach().sum()], [weight], "no_grad"),
        (lambda: [weight.sum()], [], "none that is trained"),
        (lambda: [weight.sum()], weight, "a list of tensors"),
    ]
    for losses, parameters, match in wrong:
        for measure in (box_sharpness, hessian_eigenvalues):
            with pytest.raises((TypeError, ValueError), match=match):
                measure(losses, parameters)
    with pytest.raises(ValueError, match="iterations"):
        hessian_eigenvalues(lambda: [weight.sum()], [weight], iterations=0)
    for losses in (lambda: [weight.square().sum() * np.nan], lambda: [weight.square().sum() * np.inf]):
        assert np.isnan([*hessian_eigenvalues(losses, [weight]), box_sharpness(losses, [weight])]).all()
    assert np.isnan(box_sharpness(lambda: [(weight - 1).sum().sqrt() + weight.sum()], [weight])), "NaN beside it"
