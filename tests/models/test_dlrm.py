"""DLRM and its interactions against the papers' formulas, written with loops."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tierstore.models import DLRM, CrossNetwork, DotInteraction

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
