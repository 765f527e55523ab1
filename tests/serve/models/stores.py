"""Stores with tables of every kind, what they answer by plain torch, and programs of torch.export to serve."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.serve.messages import InferTensor, ServeError, Status

ROWS = {"sums": 40, "means": 30, "peaks": 20, "half": 25}
DIMS = {"sums": 4, "means": 6, "peaks": 4, "half": 8}
POOLINGS = {"sums": "sum", "means": "mean", "peaks": "max", "half": "sum"}


def make_store(directory: Path, names: Sequence[str] = tuple(ROWS)) -> None:
    """Tables of these names, some of their rows written, and one commit."""
    generator = torch.Generator().manual_seed(3)
    with tierstore.open(directory, ddr="4MiB") as store:
        for name in names:
            table = store.create_table(
                tierstore.TableConfig(
                    name=name,
                    num_embeddings=ROWS[name],
                    embedding_dim=DIMS[name],
                    pooling=POOLINGS[name],
                    dtype="float16" if name == "half" else "float32",
                    feature_names=(name, f"{name}.again"),
                    init=tierstore.init.Uniform(-1, 1, seed=5),
                )
            )
            rows = torch.randn(ROWS[name] // 2, DIMS[name], generator=generator).to(table.layout.torch_dtype)
            table.write(torch.arange(ROWS[name] // 2), rows)
        store.commit()


class Counted(dict[str, int]):
    """What models told of ids that are no rows."""

    def __call__(self, model: str, count: int) -> None:
        self[model] = self.get(model, 0) + count


def tensor(datatype: str, values: Any, shape: Sequence[int] | None = None) -> InferTensor:
    """As the fronts hand them over: not to be written to."""
    dtype = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "FP64": np.float64}[datatype]
    array = np.array(values, dtype)
    array = array if shape is None else array.reshape(shape)
    array.flags.writeable = False
    return InferTensor(datatype, array)


def require_refused(model: Any, inputs: Mapping[str, InferTensor], says: str) -> None:
    with pytest.raises(ServeError) as caught:
        model.parse(inputs)
    assert caught.value.status is Status.INVALID
    assert says in str(caught.value)


def asked(model: Any, *requests: Mapping[str, InferTensor]) -> list[dict[str, Any]]:
    """The outputs of requests that are one batch, as arrays."""
    found = model.run([model.parse(inputs) for inputs in requests])
    assert len(found) == len(requests)
    for outputs in found:
        for each in outputs.values():
            assert each.datatype == "FP32"
            assert each.data.dtype == np.float32
            assert each.data.flags.c_contiguous
    return [{name: each.data for name, each in outputs.items()} for outputs in found]


class TwoTables(torch.nn.Module):
    """Takes pooled rows of "sums", up to 3 rows of "peaks", and from requests ``Dense`` [B, 3] and ``position`` [B]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(11, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, Dense: Tensor, sums: Tensor, peaks: Tensor, *, position: Tensor) -> dict[str, Tensor]:
        order = torch.arange(1, 4).reshape(1, 3, 1)
        score = self.layers(torch.cat([Dense, sums, (peaks * order).sum(1)], 1)).squeeze(1)
        return {"score": torch.sigmoid(score), "next": position + 1}


class Both(torch.nn.Module):
    def forward(self, dense: Tensor, item: Tensor, user: Tensor) -> Tensor:
        return torch.cat([dense, item * 2, user], 1).cumsum(1)


class OfDict(torch.nn.Module):
    """Takes a dict of features, whose names may be anything."""

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return torch.cat(list(features.values()), 1) * 2


def save(
    module: torch.nn.Module, path: Path, *arguments: Any, batch: Any = None, texts: str = "", **named: Any
) -> Path:
    """Exported with a dynamic batch; ``batch`` is another Dim for it, or "static" for none. ``texts``: the extra file
    "of_strings"."""
    dim = torch.export.Dim("batch") if batch is None else batch
    shapes = torch.utils._pytree.tree_map(
        lambda each: {0: dim} if isinstance(each, Tensor) else None, (arguments, named)
    )
    parameters = dict(zip(module.forward.__code__.co_varnames[1:], shapes[0], strict=False)) | shapes[1]
    exported = torch.export.export(
        module.eval(), arguments, named, dynamic_shapes=None if dim == "static" else parameters
    )
    torch.export.save(exported, path, extra_files={"of_strings": texts} if texts else None)
    return path


def save_two_tables(path: Path, **settings: Any) -> Path:
    inputs = (torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, 4))
    return save(TwoTables(), path, *inputs, position=torch.zeros(2, dtype=torch.int64), **settings)
