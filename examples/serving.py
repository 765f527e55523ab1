"""Rows of one's own, made anywhere, served by tierstore serve and asked for over REST; the server follows a commit."""

import json
import subprocess
import sys
import time
from urllib.request import Request, urlopen

import torch

import tierstore

ITEMS, DIM = 10_000, 4
SERVE = "-m tierstore serve --store vectors --ddr 8MiB --port 0 --grpc-port -1 --admin-port -1 --log-level warning"


def ask(url: str, model: str, **inputs: list[int]) -> tuple[str, list[list[float]]]:
    """The version that answered, and one row of floats for each id or bag. The protocol is Open Inference v2."""
    tensors = [{"name": n, "datatype": "INT64", "shape": [len(v)], "data": v} for n, v in inputs.items()]
    body = json.dumps({"inputs": tensors}).encode()
    request = Request(f"{url}/v2/models/{model}/infer", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as reply:
        answer = json.load(reply)
    numbers = torch.tensor(answer["outputs"][0]["data"]).reshape(answer["outputs"][0]["shape"])
    return answer["model_version"], numbers.tolist()


with tierstore.open("vectors", ddr="8MiB") as store:
    # Without optimizer= a table has SGD with lr=0.01, which keeps no state; only training would use it.
    item = store.create_table(tierstore.TableConfig(name="item", num_embeddings=ITEMS, embedding_dim=DIM))
    item.write(torch.arange(ITEMS), torch.arange(ITEMS * DIM).reshape(ITEMS, DIM).float())
    store.commit()

    with subprocess.Popen([sys.executable, *SERVE.split()], stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[-1]  # "ready: REST http://127.0.0.1:PORT"
            version, rows = ask(url, "rows.item", ids=[3, 9_999])
            print(f"version {version}: rows 3 and 9999 are {rows}")
            version, bags = ask(url, "pooled.item", ids=[1, 2, 3], lengths=[2, 1])
            print(f"version {version}: the sums of rows 1 and 2, and of row 3 alone, are {bags}")

            item.write(torch.tensor([3]), torch.full((1, DIM), -1.0))
            second = store.commit()
            while version != str(second):  # it looks for new commits every 50 ms
                time.sleep(0.02)
                version, rows = ask(url, "rows.item", ids=[3])
            print(f"version {version}: row 3 is {rows[0]}")
        finally:
            server.terminate()  # SIGTERM: requests under way are answered
    print(f"the server ended with status {server.returncode}")
