"""Jagged inputs and keyed outputs in TorchRec's shape, without TorchRec."""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..config import require_names
from ..layout import MAX_ROWS
from ..store.arguments import require_ids, require_tensor
from ..system.checks import require_int
from ..system.terminal import html_table


class JaggedLike(Protocol):
    """What a collection asks of its input; TorchRec's KeyedJaggedTensor answers it too."""

    def keys(self) -> Iterable[str]: ...
    def values(self) -> Tensor: ...
    def lengths(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


class JaggedTensor:
    """One feature's lists, sample by sample; in TorchRec's shape.

    Args:
        values: [N, ...].
        weights: float32 [N], or None.
        lengths: integer [B], of each list. Give this or ``offsets``; of both, offsets count.
        offsets: integer [B + 1], from 0 to N.

    Raises:
        TypeError: no tensors, or lengths or offsets that are neither int64 nor int32. ValueError: shapes that do not
            fit together.
    """

    def __init__(
        self, values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._values = require_tensor(values, "values")
        if weights is not None and require_tensor(weights, "weights").shape != values.shape[:1]:
            raise ValueError(f"weights {tuple(weights.shape)} must have the shape of values {tuple(values.shape)}")
        self._weights = weights
        if isinstance(lengths, Tensor) and lengths.dim() == 2:  # [features, samples]
            lengths = lengths.flatten()
        self._lengths = None if lengths is None else require_ids(lengths, "lengths")
        if offsets is not None:
            self._offsets, self._lengths = require_ids(offsets, "offsets"), None
        elif self._lengths is not None:
            self._offsets = _offsets_of(self._lengths)
        else:
            raise ValueError("give lengths or offsets, at least one of the two")

    def values(self) -> Tensor:
        """The ids, [N], sample by sample."""
        return self._values

    def lengths(self) -> Tensor:
        """Integer [B]: how many each sample has; of several features B for each, one after another."""
        if self._lengths is None:
            self._lengths = torch.diff(self._offsets)
        return self._lengths

    def offsets(self) -> Tensor:
        """Integers: list i is ``values()[offsets()[i]:offsets()[i + 1]]``."""
        return self._offsets

    def weights_or_none(self) -> Tensor | None:
        """float32 [N], or None."""
        return self._weights

    def weights(self) -> Tensor:
        """ValueError if there are none."""
        if self._weights is None:
            raise ValueError("there are no weights")
        return self._weights

    def to_dense(self) -> list[Tensor]:
        """Each list's values: views that autograd lets no one change in place."""
        return list(torch.split(self._values, self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, desired_length, ...]: each list cut to that length, or filled up; default: the longest list's."""
        lengths = self.lengths().to(self._values.device)
        width = int(lengths.max()) if desired_length is None and len(lengths) else desired_length or 0
        places = torch.arange(width, device=self._values.device)
        is_there = places < lengths[:, None]
        out = self._values.new_full((*is_there.shape, *self._values.shape[1:]), padding_value)
        sources = self._offsets[:-1].to(places.device)[:, None] + places
        out[is_there] = self._values[sources[is_there]]
        return out

    def last(self, count: int) -> Self:
        """The last ``count`` values of each list, and their weights. ValueError: not 1 or more."""
        lengths, made = self.lengths(), copy.copy(self)
        to_end = torch.repeat_interleave(self._offsets[1:], lengths) - torch.arange(len(self._values)).to(lengths)
        count = min(require_int(count, "count", 1, MAX_ROWS), torch.iinfo(lengths.dtype).max)
        is_kept = (to_end <= count).to(self._values.device)
        made._values, made._lengths = self._values[is_kept], lengths.clamp(max=count)
        made._weights = None if self._weights is None else self._weights[is_kept]
        made._offsets = _offsets_of(made._lengths)
        return made

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Its tensors on a device."""
        return self._changed(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Its tensors in page-locked memory."""
        return self._changed(torch.Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """``Tensor.record_stream`` of each tensor that a device has."""
        for each in (self._values, self._weights, self._lengths, self._offsets):
            if each is not None and not each.is_cpu:
                each.record_stream(stream)

    def _changed(self, change: Callable[[Tensor], Tensor]) -> Self:
        made = copy.copy(self)
        made._values, made._offsets = change(self._values), change(self._offsets)
        made._weights = None if self._weights is None else change(self._weights)
        made._lengths = None if self._lengths is None else change(self._lengths)
        return made

    def __repr__(self) -> str:
        return f"JaggedTensor(samples={len(self._offsets) - 1}, values={tuple(self._values.shape)})"


class KeyedJaggedTensor(JaggedTensor):
    """Ids of several features, each with one bag of any length a sample; in TorchRec's shape.

    Args:
        keys: F feature names.
        values: int64 or int32 [N]; key-major: all ids of feature 0, sample by sample, then of feature 1, ...
        weights: float32 [N], one an id.
        lengths: integer [F * B] or [F, B], length of each bag, key-major. Give this or ``offsets``.
        offsets: integer [F * B + 1], from 0 to N; or, with ``stride``, [F * B] without the end.
        stride: B, which is counted otherwise; without keys it is 0.

    Raises:
        TypeError: as ``JaggedTensor``, or ``keys`` is one str. ValueError: shapes that do not fit together.
    """

    def __init__(
        self, keys: Sequence[str], values: Tensor, weights: Tensor | None = None, lengths: Tensor | None = None,
        offsets: Tensor | None = None, stride: int | None = None,
    ) -> None:  # fmt: skip
        require_names(keys, "keys")
        if isinstance(offsets, Tensor) and stride is not None and len(offsets) == stride * len(keys):
            offsets = torch.cat([offsets, offsets.new_full((1,), len(values))])
        super().__init__(values, weights, lengths, offsets)
        bags = len(self._offsets) - 1
        self._keys, self._stride = list(keys), bags // max(len(keys), 1) if stride is None else stride
        if bags < 0 or bags != self._stride * len(keys):
            raise ValueError(
                f"{bags} bags cannot be divided among {len(keys)} features; each has one a sample. Offsets are [F * B "
                "+ 1], with the end, or with stride=B also [F * B]"
            )

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """As the constructor with ``lengths``."""
        return cls(keys, values, weights, lengths)

    def keys(self) -> list[str]:
        """The features, in order."""
        return self._keys

    def stride(self) -> int:
        """Samples in the batch."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """How many values each feature has."""
        return [stop - start for start, stop in itertools.pairwise(self.offset_per_key())]

    def offset_per_key(self) -> list[int]:
        """Where each feature's values begin, and where the last end."""
        return [int(self._offsets[feature * self._stride]) for feature in range(len(self._keys) + 1)]

    def split(self, segments: Sequence[int]) -> "list[KeyedJaggedTensor]":
        """Features in groups of so many each, in order; values are views. ValueError: that is not all features."""
        if sum(segments) != len(self._keys):
            raise ValueError(f"segments={list(segments)} are {sum(segments)} features, not {len(self._keys)}")
        starts, parts, first = self.offset_per_key(), [], 0
        for count in segments:
            own, last = slice(starts[first], starts[first + count]), first + count
            offsets = self._offsets[first * self._stride : last * self._stride + 1] - starts[first]
            weights = None if self._weights is None else self._weights[own]
            parts.append(
                KeyedJaggedTensor(self._keys[first:last], self._values[own], weights, None, offsets, self._stride)
            )
            first = last
        return parts

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each feature's lists; values are views."""
        parts = self.split([1] * len(self._keys))
        return {
            key: JaggedTensor(part.values(), part.weights_or_none(), offsets=part.offsets())
            for key, part in zip(self._keys, parts, strict=True)
        }

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, samples={self.stride()}, ids={len(self._values)})"


def _offsets_of(lengths: Tensor) -> Tensor:
    if lengths.device.type != "cpu":
        return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    # numpy: torch's cumsum hands even a short tensor to its threads, and waits for them.
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.numpy().cumsum(out=offsets[1:])
    return torch.from_numpy(offsets)


class KeyedTensor:
    """Pooled rows of several features side by side; in TorchRec's shape.

    Args:
        keys: F feature names.
        length_per_key: columns of each.
        values: float32 [B, sum(length_per_key)].
    """

    def __init__(self, keys: Iterable[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._dims, self._values = list(keys), list(length_per_key), values

    def keys(self) -> list[str]:
        """The features, in order."""
        return self._keys

    def values(self) -> Tensor:
        """float32 [B, sum(length_per_key())], features in order of ``keys()``."""
        return self._values

    def key_dim(self) -> int:
        """1: the axis along which features lie."""
        return 1

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Columns of each feature."""
        return self._dims

    def offset_per_key(self) -> list[int]:
        """Where each feature's columns begin, and where the last end."""
        return [0, *itertools.accumulate(self._dims)]

    def _key_indices(self) -> dict[str, int]:
        """Asked for by TorchRec's regroup."""
        return {key: index for index, key in enumerate(self._keys)}

    def __getitem__(self, key: str) -> Tensor:
        """float32 [B, dim] of one feature: a view that may be changed in place."""
        place = self._key_indices()[key]
        return self._values.narrow(1, self.offset_per_key()[place], self._dims[place])

    def to_dict(self) -> dict[str, Tensor]:
        """Each feature's [B, dim]: views that autograd lets no one change in place."""
        return dict(zip(self._keys, torch.split(self._values, self._dims, dim=1), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedTensor":
        """Its values on a device."""
        return KeyedTensor(self._keys, self._dims, self._values.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        """``Tensor.record_stream`` of values that a device has."""
        if not self._values.is_cpu:
            self._values.record_stream(stream)

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={self._keys}, length_per_key={self._dims}, samples={len(self._values)})"

    def _repr_html_(self) -> str:
        return html_table(("feature", *self._keys), ("columns", *self._dims), ("samples", len(self._values)))
