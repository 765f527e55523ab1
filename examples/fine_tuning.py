"""Fine-tuning as torch has it: a learning-rate schedule, clipping over rows and dense weights, and a frozen table."""

import torch
from torch import Tensor, nn

import tierstore

ROWS, DIM, STEPS, MICRO_BATCHES = 5_000, 16, 30, 2


def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """user ids [256], item ids [256, 3], and labels [256] that depend on the items."""
    random = torch.Generator().manual_seed(number)
    users = torch.randint(0, ROWS, (256, 1), generator=random)
    items = (ROWS * torch.rand(256, 3, generator=random) ** 4).long()
    return users, items, (items.float().sin().sum(1) > 0).float()


torch.manual_seed(0)
with tierstore.open(cold="memory", ddr="4MiB") as store:  # or the directory of a trained store
    for name in ("user", "item"):
        store.create_table(
            tierstore.TableConfig(
                name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.Adagrad(lr=0.1)
            )
        )
        store[name].learning_rate = 0.1  # a trained store has the rate that its last schedule ended with
    user, item = (tierstore.TieredEmbeddingBag(store[name]) for name in ("user", "item"))
    user.requires_grad_(False)  # frozen
    dense = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
    before = {name: table.read(torch.arange(ROWS)) for name, table in store.tables.items()}

    # From here on backward() only collects the rows' gradients; a group for each table, called by its name.
    row_optimizer, optimizer = store.optimizer(), torch.optim.AdamW(dense.parameters(), lr=0.01)
    optimizers = [row_optimizer, optimizer]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, STEPS, eta_min=0.001) for each in optimizers]
    for step in range(STEPS):
        mean_loss = 0.0
        for part in range(MICRO_BATCHES):
            users, items, labels = batch(step * MICRO_BATCHES + part)
            logits = dense(torch.cat([user(users), item(items)], dim=1)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels) / MICRO_BATCHES
            loss.backward()
            mean_loss += loss.item()
        norm = row_optimizer.clip_grad_norm_(dense.parameters(), max_norm=0.05)  # torch's own does not see the rows
        for each in (*optimizers, *schedulers):
            each.step()
        for each in optimizers:
            each.zero_grad()  # also of the rows, which model.zero_grad() does not reach
        if step % 10 == 0 or step == STEPS - 1:
            rate = store["item"].learning_rate
            print(
                f"step {step:2}: loss {mean_loss:.3f}, norm {norm:.3f} before clipping, rows' learning rate {rate:.4f}"
            )
    tierstore.checkpoint.save(store, dense, optimizers, schedulers, extra={"step": STEPS})
    changed = {
        name: int((table.read(torch.arange(ROWS)) != before[name]).any(1).sum()) for name, table in store.tables.items()
    }
    print(f"rows changed: {changed['user']} of user, which is frozen, {changed['item']} of item")
