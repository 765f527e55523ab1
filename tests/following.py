"""A process that writes a store which another follows, and what its first table holds then."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch

import tierstore

__all__ = ["DIM", "EVERY", "ROWS", "Child", "Writer", "expected", "first_values"]

ROWS, DIM = 3000, 8
EVERY = torch.arange(ROWS)

WRITER = """
import json, sys
import torch, tierstore
store = None
for line in sys.stdin:
    order = json.loads(line)
    if store is not None and order[0] in ("open", "close"):
        store.close()
        store = None
    if order[0] == "open":
        store = tierstore.open(order[1], ddr="1MiB", keep=order[2] if order[2:] else 3)
    elif order[0] == "create":
        store.create_table(tierstore.TableConfig(name=order[1], num_embeddings=order[2], embedding_dim=order[3],
            dtype=order[4] if order[4:] else "float32",
            init=tierstore.init.Uniform(-1, 1, seed=4), optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)))
    elif order[0] == "write":
        ids = torch.tensor(order[2])
        table = store[order[1]]
        rows = torch.full((len(ids), table.config.embedding_dim), float(order[3]), dtype=table.layout.torch_dtype)
        table.write(ids, rows)
    elif order[0] == "commit":
        store.commit(extra={"step": order[1]}, tensors={"w": torch.tensor([float(order[1])])})
    elif order[0] == "rollback":
        store.rollback(order[1])
    print(json.dumps(store.version if store else 0), flush=True)
"""


class Child:
    """Another process that runs some code, which answers each line with a line."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0
        self._process.stdout.close()


class Writer(Child):
    """It opens stores for writing."""

    def __init__(self) -> None:
        super().__init__(WRITER)

    def __call__(self, *order: Any) -> int:
        return int(self.ask(json.dumps(order)))


def first_values(table: int = 0) -> torch.Tensor:
    """What rows hold that nobody wrote, by the definition of the initializer."""
    out = np.empty((ROWS, DIM), np.float32)
    tierstore.init.Uniform(-1, 1, seed=4).fill(
        np.arange(ROWS) + (table << 40), np.arange(ROWS, dtype=np.int32), out, DIM, 0
    )
    return torch.from_numpy(out)


def expected(**written: list[int]) -> torch.Tensor:
    """Rows after writes, given as ``_VALUE=ids``, in order."""
    rows = first_values()
    rows[::2] = 1
    for value, ids in written.items():
        rows[ids] = float(value.removeprefix("_"))
    return rows
