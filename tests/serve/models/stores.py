"""Stores with tables of every kind, and what they answer by plain torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
