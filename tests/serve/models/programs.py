"""Programs of torch.export to serve, and what they are of."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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
