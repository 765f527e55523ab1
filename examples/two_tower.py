"""A two-tower model, a class of its own, trained by a run file: users and items meet in a dot product alone, so the
items nearest to a user are found without running the model for each."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

import tierstore

USERS, ITEMS, GROUPS, ROWS = 800, 400, 8, 40_000
RUN = """
[store]
path = "tower-store"
ddr = "64MiB"
[data]
path = "tower-data"
dense_columns = []
sparse_columns = ["user", "history", "item"]
hashing = "mod"                    # users and items are numbers of rows
train_rows = 32_000
test_rows = 8_000
shuffle_rows = 8_192
[embedding]
dim = 16
num_embeddings = [800, 400, 400]
tables.user.dim = 8
init_range = 0.1
tables.history.pooling = "mean"    # of the items that a user has seen
[model]
class = "two_tower:TwoTower"       # this file
args.width = 16
[optimizer]
sparse = "adagrad"
sparse_lr = 0.05
dense = "adam"
dense_lr = 0.003
[train]
batch_size = 256
epochs = 9
test_each_epoch = true
patience = 2
keep_best = true
"""


class TwoTower(nn.Module):
    def __init__(self, embeddings: nn.Module, *, num_dense: int, width: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        dims = {each.name: each.embedding_dim for each in embeddings.embedding_bag_configs()}
        self.user = nn.Sequential(nn.Linear(num_dense + dims["user"] + dims["history"], 64), nn.ReLU())
        self.user.append(nn.Linear(64, width))
        self.item = nn.Linear(dims["item"], width)

    def forward(self, dense: torch.Tensor, sparse: tierstore.KeyedJaggedTensor) -> torch.Tensor:
        rows = self.embeddings(sparse)
        users = self.user(torch.cat([dense, rows["user"], rows["history"]], dim=1))
        return (users * self.item(rows["item"])).sum(dim=1)


def write_visits(folder: Path) -> None:
    """Users like items of their own group, which only their visits show."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(1)
    user, own = random.integers(0, USERS, ROWS), random.integers(0, ITEMS // GROUPS, (ROWS, 6)) * GROUPS
    own += (user % GROUPS)[:, None]  # items of the user's group
    item = np.where(random.random(ROWS) < 0.5, own[:, 0], random.integers(0, ITEMS, ROWS))
    label = random.random(ROWS) < np.where(item % GROUPS == user % GROUPS, 0.9, 0.1)
    for name, array in {"user": user, "item": item, "history": own[:, 1:], "label": label}.items():
        np.save(folder / f"{name}.npy", array)


if __name__ == "__main__":
    write_visits(Path("tower-data"))
    Path("tower.toml").write_text(RUN)
    summary = tierstore.train.train(tierstore.train.load("tower.toml"), resume=True)
    print(f"AUC {summary.test.auc:.3f} at step {summary.step:,}")
    with tierstore.open("tower-store", mode="r") as store:
        tables = ["user", "history", "item"]
        model = TwoTower(tierstore.TieredEmbeddingBagCollection(store, tables=tables), num_dense=0, width=16)
        weights = {name.removeprefix("model."): each for name, each in store.tensors().items() if name[:6] == "model."}
        model.load_state_dict(weights)
        with torch.no_grad():
            items = model.item(store["item"].read(torch.arange(ITEMS)))  # of an index of nearest neighbours
            user, history = store["user"].read(torch.tensor([3])), store["history"].read(torch.arange(3, 43, GROUPS))
            nearest = (items @ model.user(torch.cat([user, history.mean(0, keepdim=True)], dim=1))[0]).topk(10).indices
    print(f"of the 10 items nearest to user 3, {int((nearest % GROUPS == 3).sum())} are of the user's group")
