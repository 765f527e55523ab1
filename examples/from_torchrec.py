"""Code of TorchRec's EmbeddingBagCollection on tierstore. Where TorchRec is installed, its results are compared."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tierstore

TABLES = [  # the arguments of torchrec.EmbeddingBagConfig and of tierstore.TableConfig
    {"name": "product", "num_embeddings": 5_000, "embedding_dim": 16, "feature_names": ["viewed", "bought"]},
    {"name": "user", "num_embeddings": 20_000, "embedding_dim": 8, "feature_names": ["user"]},
]
FEATURES, WIDTH, BATCH = ["viewed", "bought", "user"], 16 + 16 + 8, 256


def batch(step: int) -> tuple[tierstore.KeyedJaggedTensor, Tensor]:
    """Up to three ids a sample and feature, and a label: has the user viewed two?

    TorchRec's own KeyedJaggedTensor is taken, too.
    """
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=random)
    ids = torch.randint(0, 5_000, (int(lengths.sum()),), generator=random)
    jagged = tierstore.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids, lengths)
    return jagged, (lengths[:BATCH] > 1).float()


def train(embeddings: Callable[..., Any]) -> list[float]:
    """Losses of 20 steps. Both libraries update the tables inside backward."""
    torch.manual_seed(0)
    dense, losses = nn.Linear(WIDTH, 1), []
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.01)
    for features, labels in map(batch, range(20)):
        pooled = embeddings(features)  # a KeyedTensor: pooled["user"] is [256, 8], pooled.values() all side by side
        loss = nn.functional.binary_cross_entropy_with_logits(dense(pooled.values()).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def torchrec_losses(weights: dict[str, Tensor]) -> list[float]:
    """The same by TorchRec, from the same first weights."""
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    configs = [torchrec.EmbeddingBagConfig(**table) for table in TABLES]
    theirs = torchrec.EmbeddingBagCollection(tables=configs)
    theirs.load_state_dict({f"embedding_bags.{name}.weight": weight for name, weight in weights.items()})
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, theirs.parameters(), {"lr": 0.05, "eps": 1e-8})
    jagged = torchrec.KeyedJaggedTensor.from_lengths_sync
    return train(lambda features: theirs(jagged(FEATURES, features.values(), features.lengths())))


with tierstore.open(cold="memory", ddr="4MiB") as store:  # or a directory: tierstore.open("shop", ddr="64MiB")
    rule = tierstore.optim.RowWiseAdagrad(lr=0.05, eps=1e-8)
    for table in TABLES:
        store.create_table(tierstore.TableConfig(**table, optimizer=rule))
    first = {name: table.read(torch.arange(table.config.num_embeddings)) for name, table in store.tables.items()}
    ours = train(tierstore.TieredEmbeddingBagCollection(store))
    store.commit()  # in a directory, what was not committed is gone after close()

print(f"tierstore: loss {ours[0]:.6f} to {ours[-1]:.6f}")
if importlib.util.find_spec("torchrec"):
    theirs = torchrec_losses(first)
    print(f"TorchRec:  loss {theirs[0]:.6f} to {theirs[-1]:.6f}")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
else:
    print("TorchRec is not installed: there is nothing to compare with")
