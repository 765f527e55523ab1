"""A process that writes a store which another follows, one that follows, and what the first table holds then."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch

import tierstore

ROWS, DIM = 3000, 8
EVERY = torch.arange(ROWS)
PROGRAM = """
import json, shutil, sys
import torch, tierstore
store = None
for line in sys.stdin:
    order, name, *given = [*json.loads(line), None, None]
    found = None
    if store is not None and order in ("open", "close"):
        store.close()
        store = None
    try:
        if order == "open":
            settings = {"mode": "r", "ddr": "440KiB"} if sys.argv[1] == "r" else {"ddr": "1MiB", "keep": given[0] or 3}
            store = tierstore.open(name, **settings)
        elif order == "create":
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=given[0], embedding_dim=given[1],
                dtype=given[2] or "float32",
                init=tierstore.init.Uniform(-1, 1, seed=4), optimizer=tierstore.optim.RowWiseAdagrad(lr=0.1)))
        elif order == "write":
            table = store[name]
            rows = torch.full((len(given[0]), table.config.embedding_dim), float(given[1]))
            table.write(torch.tensor(given[0]), rows.to(table.layout.torch_dtype))
        elif order == "commit":
            store.commit(extra={"step": name}, tensors={"w": torch.tensor([float(name)])})
        elif order == "rollback":
            store.rollback(name)
        elif order == "change":
            store.change_table(name, **given[0])
        elif order == "drop":
            store.drop_table(name)
        elif order == "copy":
            shutil.copytree(name, given[0])
        elif order == "refresh":
            found = store.refresh()
        elif order == "read":
            found = store[name].read(torch.arange(store[name].config.num_embeddings)).unique().tolist()
        if sys.argv[1] == "w":
            found = store.version if store else 0
    except tierstore.errors.TierstoreError as error:
        found = repr(error)
    print(json.dumps(found), flush=True)
"""
WRITER = """
import sys
from tierstore.updates.apply import answer
for line in sys.stdin:
    print(answer(line), flush=True)
"""
OWN_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Begins a process that is number 1, as in a container."""


class Child:
    def __init__(self, code: str, *arguments: str, before: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*before, sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def kill(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()

    def end(self) -> None:
        try:
            self._process.stdin.close()
            assert self._process.wait(60) == 0
        finally:
            self.kill()


class Writer(Child):
    def __init__(self, **options: Any) -> None:
        super().__init__(PROGRAM, "w", **options)

    def __call__(self, *order: Any) -> int:
        return int(self.ask(json.dumps(order)))


class Reader(Child):
    def __init__(self, **options: Any) -> None:
        super().__init__(PROGRAM, "r", **options)

    def __call__(self, *order: Any) -> Any:
        return json.loads(self.ask(json.dumps(order)))


def first_values() -> torch.Tensor:
    """What rows of the first table hold that nobody wrote, by the definition of the initializer."""
    out = np.empty((ROWS, DIM), np.float32)
    tierstore.init.Uniform(-1, 1, seed=4).fill(np.arange(ROWS), np.arange(ROWS, dtype=np.int32), out, DIM, 0)
    return torch.from_numpy(out)


def expected(**written: list[int]) -> torch.Tensor:
    """Rows after writes, given as ``_VALUE=ids``, in order."""
    rows = first_values()
    rows[::2] = 1
    for value, ids in written.items():
        rows[ids] = float(value.removeprefix("_"))
    return rows
