"""A model of plain torch modules, sharded as it stands: torchrun --nproc-per-node 2 examples/sharded_model.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tierstore
from tierstore.dist import open_sharded, shard

USERS, ITEMS, DIM, SAMPLES, STEPS = 1_000_000, 200_000, 16, 128, 60


class Model(nn.Module):
    """Does a user like an item, by the items seen before?"""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(
            USERS, DIM, mode="sum", device="meta"
        )  # takes no memory; TorchRec writes it so, too
        self.item = nn.Embedding(ITEMS, DIM, device="meta")
        self.seen = nn.EmbeddingBag(ITEMS, DIM, mode="sum", device="meta")
        self.seen.weight = self.item.weight  # one table
        self.top = nn.Sequential(nn.Linear(3 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user: Tensor, item: Tensor, seen: Tensor) -> Tensor:
        looked_up = self.user(user[:, None]), self.item(item), self.seen(seen)
        return self.top(torch.cat(looked_up, 1)).squeeze(1)


def batch(step: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """This rank's samples: users like items of their own parity."""
    random = torch.Generator().manual_seed(1_000 * step + dist.get_rank())
    user, item = (torch.randint(0, 2_000, (SAMPLES,), generator=random) for _ in range(2))
    seen = torch.randint(0, ITEMS, (SAMPLES, 5), generator=random)
    return (user, item, seen), (user % 2 == item % 2).float()


dist.init_process_group("gloo")
torch.manual_seed(0)
with open_sharded("sharded-store", ddr="256MiB") as store:
    init, rule = tierstore.init.Normal(std=0.1), tierstore.optim.RowWiseAdagrad(lr=0.1)
    model = shard(Model(), store, None, optimizer=rule, init=init)  # by rows; without None by a plan that it finds
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = tierstore.checkpoint.load(store, model.module, [optimizer])["step"] if store.version else 0
    for step in range(start, start + STEPS):
        features, labels = batch(step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(*features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    tierstore.checkpoint.save(store, model.module, [optimizer], extra={"step": start + STEPS})
    if dist.get_rank() == 0:
        print(f"{len(store.tables)} tables, rows of rank 0: {len(store['item'].rows):,} of item")
dist.destroy_process_group()
