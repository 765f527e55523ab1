"""A process that writes a store which another follows, and what its first table holds then."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch

import tierstore

__all__ = ["DIM", "EVERY", "OWN_NAMESPACE", "ROWS", "Child", "Reader", "Writer", "expected", "first_values"]

ROWS, DIM = 3000, 8
EVERY = torch.arange(ROWS)

WRITER = """
import json, shutil, sys
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
    elif order[0] == "change":
        store.change_table(order[1], **order[2])
    elif order[0] == "drop":
        store.drop_table(order[1])
    elif order[0] == "copy":
        shutil.copytree(order[1], order[2])
    print(json.dumps(store.version if store else 0), flush=True)
"""


READER = """
import json, shutil, sys
import torch, tierstore
from tierstore import errors
store = None
for line in sys.stdin:
    order = json.loads(line)
    if order[0] == "open":
        store = tierstore.open(order[1], mode="r", ddr="440KiB")
    elif order[0] == "copy":
        shutil.copytree(order[1], order[2])
    elif order[0] == "close":
        store.close()
    found = None
    try:
        if order[0] == "refresh":
            found = store.refresh()
        elif order[0] == "read":
            table = store[order[1]]
            found = table.read(torch.arange(table.config.num_embeddings)).unique().tolist()
    except errors.TierstoreError as error:
        found = repr(error)
    print(json.dumps(found), flush=True)
"""
OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Begins a process that is number 1, as in a container."""


class Child:
    """Another process that runs some code, which answers each line with a line."""

    def __init__(self, code: str, *arguments: str, before: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def kill(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()

    def end(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            assert self._process.wait(60) == 0
        finally:
            self.kill()


class Writer(Child):
    """It opens stores for writing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(WRITER, **options)

    def __call__(self, *order: Any) -> int:
        return int(self.ask(json.dumps(order)))


class Reader(Child):
    """It opens a store for reading."""

    def __init__(self, **options: Any) -> None:
        super().__init__(READER, **options)

    def __call__(self, *order: Any) -> Any:
        return json.loads(self.ask(json.dumps(order)))


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
