"""Jagged inputs and keyed outputs in TorchRec's shape, without TorchRec."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class JaggedLike(Protocol):
    """What a collection asks of its input; TorchRec's KeyedJaggedTensor answers it too."""

    def keys(self) -> Iterable[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


class KeyedJaggedTensor:
    """Ids of several features, each with one bag of any length a sample.

    Args:
        keys: F feature names.
        values: int64 or int32 [N]; key-major: all ids of feature 0, sample by sample, then of feature 1, ...
        lengths: integer [F * B], length of each bag, key-major. Give this or ``offsets``.
        offsets: integer [F * B + 1], from 0 to N.
        weights: float32 [N], one an id.

    Raises:
        TypeError: no tensors. ValueError: shapes that do not fit together.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        given = {"values": values, "weights": weights, "lengths": lengths, "offsets": offsets}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) and (tensor is not None or name == "values"):
                raise TypeError(f"{name} must be a Tensor, not {type(tensor).__name__}")
        if (lengths is None) == (offsets is None):
            raise ValueError("give lengths or offsets, one of the two")
        if offsets is None:
            assert lengths is not None
            offsets = _offsets_of(lengths)
        bags = len(offsets) - 1
        if bags < 0 or (bags % len(keys) if keys else bags):
            raise ValueError(f"{bags} bags cannot be divided among {len(keys)} features")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"weights {tuple(weights.shape)} must have the shape of values {tuple(values.shape)}")
        self._keys = list(keys)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        if self._lengths is None:
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def stride(self) -> int:
        """Samples in the batch."""
        return (len(self._offsets) - 1) // len(self._keys) if self._keys else 0

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, samples={self.stride()}, ids={len(self._values)})"


def _offsets_of(lengths: Tensor) -> Tensor:
    if lengths.device.type != "cpu":
        return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    # numpy: torch's cumsum hands even a short tensor to its threads, and waits for them.
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths.detach().numpy(), out=offsets[1:])
    return torch.from_numpy(offsets)


class KeyedTensor:
    """Pooled rows of several features side by side.

    Args:
        keys: F feature names.
        dims: columns of each.
        values: float32 [B, sum(dims)].
    """

    def __init__(self, keys: Sequence[str], dims: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._dims = list(dims)
        self._values = values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        """float32 [B, sum(dims)], features in order of ``keys()``."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._dims

    def __getitem__(self, key: str) -> Tensor:
        """float32 [B, dim] of one feature, a view."""
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature's [B, dim], views."""
        return dict(zip(self._keys, torch.split(self._values, self._dims, dim=1), strict=True))
