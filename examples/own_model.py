"""A model of one's own behind tierstore serve: its rows come from the store, the rest from a file of torch.export."""

import json
import subprocess
import sys
from urllib.request import Request, urlopen

import torch

import tierstore

ITEMS, DIM = 10_000, 8
SERVE = "-m tierstore serve --store own --model score.pt2 --ddr 8MiB --port 0 --grpc-port -1 --admin-port -1"


class Score(torch.nn.Module):
    """All but the tables. An argument named like a table is its pooled rows [B, D], or up to K rows [B, K, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2 + DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, item: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": torch.sigmoid(self.layers(torch.cat([dense, item], 1)).squeeze(1))}


with tierstore.open("own", ddr="8MiB") as store:
    table = store.create_table(
        tierstore.TableConfig(
            name="item", num_embeddings=ITEMS, embedding_dim=DIM, init=tierstore.init.Normal(std=1.0, seed=1)
        )
    )
    table.write(torch.tensor([3]), torch.ones(1, DIM))
    store.commit()

    score = Score().eval()  # train it as any other; the table through tierstore.TieredEmbeddingBag(table)
    batch = torch.export.Dim("batch")
    inputs = (torch.zeros(2, 2), torch.zeros(2, DIM))
    program = torch.export.export(score, inputs, dynamic_shapes={"dense": {0: batch}, "item": {0: batch}})
    torch.export.save(program, "score.pt2")

    dense = torch.tensor([[0.5, 1.0], [0.25, -1.0]])
    ids, lengths = torch.tensor([3, 9_999, 17]), torch.tensor([[2, 1]])  # [features, batch]
    tensors = {"dense": ("FP32", dense), "values": ("INT64", ids), "lengths": ("INT32", lengths)}
    body = [
        {"name": name, "datatype": datatype, "shape": list(each.shape), "data": each.flatten().tolist()}
        for name, (datatype, each) in tensors.items()
    ]

    with subprocess.Popen([sys.executable, *SERVE.split()], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]  # "ready: REST http://127.0.0.1:PORT"
            asked = json.dumps({"inputs": body}).encode()
            with urlopen(Request(f"{url}/v2/models/score/infer", asked), timeout=10) as reply:
                (output,) = json.load(reply)["outputs"]
        finally:
            server.terminate()

    with torch.no_grad():
        here = program.module()(dense, table.pooled(ids, torch.tensor([0, 2, 3])))["score"]
    same = torch.equal(torch.tensor(output["data"]), here)
    print(f"{output['name']} of two samples: {here.tolist()}; the server's bits are the same: {same}")
