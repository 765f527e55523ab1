"""A trained model moves from nn.EmbeddingBag to tierstore and trains on: the same losses, step by step."""

import copy
import shutil

import torch
from torch import Tensor, nn

import tierstore
from tierstore.exchange import import_files

ROWS, DIM = 10_000, 16


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids [n], offsets [256], targets [256]."""
    random = torch.Generator().manual_seed(step)
    lengths = torch.randint(1, 5, (256,), generator=random)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=random)
    return ids, lengths.cumsum(0) - lengths, torch.rand(256, generator=random)


def train(bag: nn.Module, dense: nn.Linear, optimizers: list[torch.optim.Optimizer], steps: range) -> list[float]:
    losses = []
    for ids, offsets, targets in map(batch, steps):
        loss = (dense(bag(ids, offsets)).squeeze(1) - targets).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


# Before: every row is a torch parameter, in memory.
torch.manual_seed(0)
bag, dense = nn.EmbeddingBag(ROWS, DIM), nn.Linear(DIM, 1)
bag_optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.1)
train(bag, dense, [bag_optimizer, torch.optim.SGD(dense.parameters(), lr=0.1)], range(20))

# The move: weights and optimizer state in one file, which becomes a table. The optimizer's settings are given again.
state = bag_optimizer.state[bag.weight]["sum"]
torch.save({"embedding_bags.item.weight": bag.weight.detach(), "embedding_bags.item.sum": state}, "bag.pt")
shutil.rmtree("bag-store", ignore_errors=True)
import_files("bag-store", ["bag.pt"], optimizer=tierstore.optim.Adagrad(lr=0.1), pooling=bag.mode)

# After: the same loop without an optimizer of the rows, which train in backward().
with tierstore.open("bag-store", ddr="1MiB") as store:
    tiered, tiered_dense = tierstore.TieredEmbeddingBag(store["item"]), copy.deepcopy(dense)
    after = train(tiered, tiered_dense, [torch.optim.SGD(tiered_dense.parameters(), lr=0.1)], range(20, 40))
    store.commit()
    before = train(bag, dense, [bag_optimizer, torch.optim.SGD(dense.parameters(), lr=0.1)], range(20, 40))
    rows = store["item"].read(torch.arange(ROWS))

for step in (20, 30, 39):
    print(f"step {step}: loss {before[step - 20]:.6f} with nn.EmbeddingBag, {after[step - 20]:.6f} with tierstore")
print(f"largest difference of a weight: {(rows - bag.weight.detach()).abs().max():.1e}")
torch.testing.assert_close(after, before)
