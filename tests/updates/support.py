"""Stores to publish from, and what their rows are by other means than the code under test."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.exchange.tensor_files import METADATA_KEY
from tierstore.updates import Update, origin_of, write_update
from tierstore.updates.publish import Head, open_source, source_in

SMALL: dict[str, Any] = {"ddr": "4MiB", "threads": 1}
ROWS = 900


def table_config(name: str, **fields: Any) -> tierstore.TableConfig:
    fields = {"num_embeddings": ROWS, "embedding_dim": 6, "optimizer": optim.RowWiseAdagrad(lr=0.1)} | fields
    return tierstore.TableConfig(name=name, init=tierstore.init.Normal(std=0.5, seed=7), **fields)


def change(folder: Path, seed: int, *, keep: int = 1, names: tuple[str, ...] = ("item", "user")) -> dict[str, set[int]]:
    """Write some rows, most of them new values, some the bits they had, and commit; the rows whose bits changed."""
    generator = torch.Generator().manual_seed(seed)
    changed: dict[str, set[int]] = {}
    with tierstore.open(folder, keep=keep, **SMALL) as store:
        for name in names:
            config = {"dtype": "bfloat16", "embedding_dim": 5} if name == "user" else {}
            table = store.create_table(table_config(name, **config))
            ids = torch.randperm(ROWS, generator=generator)[:60]
            rows = torch.randn(60, table.config.embedding_dim, generator=generator).to(table.layout.torch_dtype)
            table.write(ids, rows)
            changed[name] = set(ids.tolist())
        extra, tensors = {"step": seed}, {"model.w": torch.full((3,), float(seed)), "optimizer.w": torch.ones(500)}
        store.commit(extra=extra, tensors=tensors)
    return changed


def make(source: Path, since: int = 0, **settings: Any) -> Update:
    folder = source.with_name(f"{source.name} updates")
    folder.mkdir(exist_ok=True)
    return write_update(source, folder / str(len(list(folder.iterdir()))), since=since, **settings)


def source_of(directory: Path) -> Head:
    with open_source(directory) as (manifest, tier, _):
        return source_in(manifest, tier)


def contents(directory: Path) -> dict[str, Tensor]:
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return {name: table.read(torch.arange(ROWS)).view(torch.uint8) for name, table in store.tables.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def extra_of(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return store.extra, store.tensors()


def version_of(directory: Path) -> int:
    return origin_of(extra_of(directory)[0]).version


def edited(update: Update, path: Path, edit: Any) -> Path:
    """The update with another header; its chunks have the checksums that they should have."""
    data = update.path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    own = json.loads(header["__metadata__"][METADATA_KEY])
    places = [header[f"chunk.{number}"]["data_offsets"] for number in range(len(own["chunks"]))]
    parts = [data[8 + length :][slice(*place)] for place in places]
    edit(own, parts)
    starts = [0, *itertools.accumulate(map(len, parts))]
    tensors = {
        f"chunk.{number}": {"dtype": "U8", "shape": [len(part)], "data_offsets": starts[number : number + 2]}
        for number, part in enumerate(parts)
    }
    head = json.dumps({"__metadata__": {METADATA_KEY: json.dumps(own)}} | tensors).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))
    return path


def assign(*path: Any, value: Any) -> Any:
    def edit(own: Any, _parts: list[bytes]) -> None:
        for key in path[:-1]:
            own = own[key]
        own[path[-1]] = value

    return edit
