"""Tables inside DistributedDataParallel: refused where ranks would diverge."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")

RANK = """
import sys
import torch, tierstore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)


class Model(torch.nn.Module):
    def __init__(self, store):
        super().__init__()
        self.tables = tierstore.TieredEmbeddingBagCollection(store)
        self.dense = torch.nn.Linear(4, 1)

    def forward(self, features, factor=1.0):
        return self.dense(self.tables(features).values() * factor)


features = tierstore.KeyedJaggedTensor(["t"], torch.tensor([rank]), offsets=torch.tensor([0, 1]))
with tierstore.open(f"{folder}/{rank}", ddr="2MiB") as store:
    store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
    store.commit()
    model = DistributedDataParallel(Model(store))
    try:
        model(features).sum().backward()
        print("trained")
    except RuntimeError as error:
        print(error)
    for reentrant in (False, True):
        try:
            checkpoint(model, features, torch.ones(1, requires_grad=True), use_reentrant=reentrant).sum().backward()
            print("trained")
        except RuntimeError as error:
            print(str(error)[:90])
    with torch.no_grad():
        model(features)
    outside, inside = tierstore.TieredEmbeddingBagCollection(store), []

    class Dense(torch.nn.Linear):
        def forward(self, x):
            inside.append(outside(features).values().sum().backward())
            return super().forward(x)

    DistributedDataParallel(Dense(4, 1))(torch.ones(1, 4)).sum().backward()
    print("outside", len(inside))
    store["t"].pooled(features.values(), features.offsets())
with tierstore.open(f"{folder}/{rank}", mode="r", ddr="2MiB") as store:
    DistributedDataParallel(Model(store))(features).sum().backward()
    print("read")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_a_replicated_module_does_not_train_rows(tmp_path: Path, size: int) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(size), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        first, *checkpoints, outside, last = said.splitlines()
        if size == 1:
            assert [first, *checkpoints] == ["trained"] * 3
        else:
            assert "cannot be trained inside DistributedDataParallel by 2 processes" in first
            assert 'mode="r"' in first
            assert [each[: len("rows of the store")] for each in checkpoints] == ["rows of the store"] * 2
        assert (outside, last) == ("outside 1", "read")
