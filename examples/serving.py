"""Rows of one's own, made anywhere, served by tierstore serve, asked for over REST and gRPC; it follows a commit."""

import subprocess
import sys
import time

import httpx
import numpy as np
import torch
from tritonclient.grpc import InferenceServerClient, InferInput

import tierstore

ITEMS, DIM = 10_000, 4
SERVE = "-m tierstore serve --store vectors --ddr 8MiB --port 0 --grpc-port 0 --admin-port -1 --log-level warning"


def ask_rest(url: str, ids: list[int]) -> tuple[str, list[float]]:
    """The version that answered, and the rows' numbers, one after the other. The protocol is Open Inference v2."""
    given = {"name": "ids", "datatype": "INT64", "shape": [len(ids)], "data": ids}
    reply = httpx.post(f"{url}/v2/models/rows.item/infer", json={"inputs": [given]}, timeout=10).raise_for_status()
    return reply.json()["model_version"], reply.json()["outputs"][0]["data"]


def ask_grpc(address: str, ids: list[int], lengths: list[int]) -> list[list[float]]:
    """The sum of the rows of each bag."""
    given = [InferInput("ids", [len(ids)], "INT64"), InferInput("lengths", [len(lengths)], "INT64")]
    for tensor, numbers in zip(given, (ids, lengths), strict=True):
        tensor.set_data_from_numpy(np.array(numbers))
    with InferenceServerClient(address) as client:
        return client.infer("pooled.item", given).as_numpy("embeddings").tolist()


with tierstore.open("vectors", ddr="8MiB") as store:
    # Without optimizer= a table has SGD with lr=0.01, which keeps no state; only training would use it.
    item = store.create_table(tierstore.TableConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM))
    item.write(torch.arange(ITEMS), torch.arange(ITEMS * DIM).reshape(ITEMS, DIM).float())
    store.commit()

    with subprocess.Popen([sys.executable, *SERVE.split()], stdout=subprocess.PIPE, text=True) as server:
        try:
            ready = server.stdout.readline()  # "ready: REST http://HOST:PORT, gRPC HOST:PORT"
            url, address = ready.replace(",", "").split()[2::2]
            version, rows = ask_rest(url, [3, 9_999])
            print(f"version {version}: rows 3 and 9999 are {rows}")
            print(f"the sums of rows 1 and 2, and of row 3 alone, are {ask_grpc(address, [1, 2, 3], [2, 1])}")

            item.write(torch.tensor([3]), torch.full((1, DIM), -1.0))
            second = store.commit()
            while version != str(second):  # it looks for new commits every 50 ms
                time.sleep(0.02)
                version, row = ask_rest(url, [3])
            print(f"version {version}: row 3 is {row}")
        finally:
            server.terminate()  # SIGTERM: requests under way are answered
    print(f"the server ended with status {server.returncode}")
