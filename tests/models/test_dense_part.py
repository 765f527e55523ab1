"""The dense part of DLRM alone: compiled, or captured in a CUDA graph, it trains to the same weights."""

import pytest
import torch
from torch import nn

import tierstore
from tierstore.models import DLRM
from tierstore.nn import KeyedJaggedTensor, TieredEmbeddingBagCollection

B, F, D, STEPS = 16, 4, 8, 6
FEATURES = [f"f{i}" for i in range(F)]
ROWS = 50


def build(directory, interaction, *, device="cpu"):
    """A store of one table a feature, and a model over it with the same first weights every time."""
    options = {} if device == "cpu" else {"device": device, "hbm": "1MiB"}
    store = tierstore.open(directory, ddr="4MiB", **options)
    for name in FEATURES:
        store.create_table(
            tierstore.TableConfig(
                name=name, num_embeddings=ROWS, embedding_dim=D, optimizer=tierstore.optim.Adagrad(lr=0.1)
            )
        )
    torch.manual_seed(0)
    embeddings = TieredEmbeddingBagCollection(store)
    sizes = {"num_features": F, "embedding_dim": D, "num_dense": 3, "bottom_mlp": (8,), "top_mlp": (8,)}
    return store, DLRM(embeddings, **sizes, interaction=interaction).to(device)


def batches(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        dense, labels = torch.rand(B, 3, generator=generator), torch.rand(B, generator=generator).round()
        lengths = torch.randint(0, 3, (F * B,), generator=generator)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        yield dense.to(device), KeyedJaggedTensor(FEATURES, ids, lengths=lengths), labels.to(device)


def train(store, model, dense_part, device="cpu"):
    """Every loss, every weight and every row after a few steps, with ``dense_part`` in the model's place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, first = [], model.top[-1].weight.detach().clone()
    for dense, sparse, labels in batches(device):
        logits = dense_part(dense, model.embeddings(sparse).values())
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert not torch.equal(first, model.top[-1].weight)
    rows = [store[name].read(torch.arange(ROWS)).cpu() for name in FEATURES]
    return [torch.stack(losses).cpu(), *(each.detach().cpu() for each in model.parameters()), *rows]


def assert_same_bits(ends, others):
    assert all(torch.equal(one, other) for one, other in zip(ends, others, strict=True))


# torch's compiler looks at the gradient of every input; it hides the warning, but not from a filter that raises it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_compiled_it_trains_to_the_same_bits(tmp_path, interaction):
    ends = []
    for name in ("plain", "compiled"):
        store, model = build(tmp_path / name, interaction)
        part = model.dense_part
        if name == "compiled":
            part = torch.compile(part, backend="aot_eager", fullgraph=True)
        with store:
            ends.append(train(store, model, part))
    assert_same_bits(*ends)


class DensePart(nn.Module):
    """The dense part as a module, whose parameters ``make_graphed_callables`` asks for; they are the model's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, dense, pooled):
        return self.model.dense_part(dense, pooled)


@pytest.mark.gpu
@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_captured_in_a_cuda_graph_it_trains_the_same(tmp_path, interaction):
    ends = []
    for name in ("plain", "graphed"):
        store, model = build(tmp_path / name, interaction, device="cuda")
        part = model.dense_part
        if name == "graphed":
            samples = torch.rand(B, 3, device="cuda"), torch.rand(B, F * D, device="cuda", requires_grad=True)
            part = torch.cuda.make_graphed_callables(DensePart(model), samples)
        with store:
            ends.append(train(store, model, part, "cuda"))
    torch.testing.assert_close(*ends)
