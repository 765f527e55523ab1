"""Jagged ids of requests: checked against their tables, and laid end to end as one batch.

Shapes: F features, B samples, N ids; ids lie feature by feature, sample by sample, as in a KeyedJaggedTensor.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.jit import kernel
from ..config import OutOfRange
from .inputs import invalid

__all__ = ["JaggedIds", "Merged", "RowBounds", "merge"]


class JaggedIds(NamedTuple):
    """Of one request or batch.

    Attributes:
        values: int64 [N].
        lengths: int64 [F, B].
        weights: float32 [N], or None for ones.
    """

    values: Any
    lengths: Any
    weights: Any = None

    @property
    def num_samples(self) -> int:
        return int(self.lengths.shape[1])

    @property
    def bags(self) -> Any:
        """int64 [N]: the bag of each value, of F * B."""
        return np.repeat(np.arange(self.lengths.size), self.lengths.reshape(-1))

    def chosen(self, which: Any) -> "JaggedIds":
        """Some of the values (bool [N]), in bags that are so much shorter."""
        lengths = np.bincount(self.bags[which], minlength=self.lengths.size).reshape(self.lengths.shape)
        return JaggedIds(self.values[which], lengths, None if self.weights is None else self.weights[which])


class RowBounds:
    """Sees to it that ids are rows.

    Args:
        names: of the features.
        num_rows: rows of the table of each feature.
        out_of_range: what becomes of other ids.
        count: told how many were dropped.
    """

    def __init__(
        self, names: Sequence[str], num_rows: Sequence[int], out_of_range: OutOfRange, count: Callable[[int], None]
    ) -> None:
        self._names = list(names)
        self._num_rows = np.array(num_rows, np.int64)
        self._drops = out_of_range == "zero"
        self._count = count

    def checked(self, jagged: JaggedIds, input_name: str) -> JaggedIds:
        """The same ids, or without those that are no rows.

        Raises:
            ServeError: INVALID, naming the id and its feature, if those are to be rejected.
        """
        return self._without_outside(jagged) if self._drops else self.required(jagged, input_name)

    def required(self, jagged: JaggedIds, input_name: str) -> JaggedIds:
        """The same ids; ServeError, INVALID, naming the first that is no row."""
        bad = self._first_outside(jagged)
        if bad < 0:
            return jagged
        ends = np.cumsum(jagged.lengths.sum(1))
        feature = int(np.searchsorted(ends, bad, side="right"))
        of = f" of feature {self._names[feature]!r}" if len(self._names) > 1 else ""
        raise invalid(
            input_name,
            f"has {int(jagged.values[bad])} at position {bad}{of}: ids are in [0, {int(self._num_rows[feature])})",
        )

    def _first_outside(self, jagged: JaggedIds) -> int:
        return int(_first_outside(jagged.values, jagged.lengths, self._num_rows))

    def _without_outside(self, jagged: JaggedIds) -> JaggedIds:
        if self._first_outside(jagged) < 0:
            return jagged
        most = self._num_rows[jagged.bags // max(1, jagged.num_samples)]
        good = (jagged.values >= 0) & (jagged.values < most)
        self._count(int(len(good) - np.count_nonzero(good)))
        return jagged.chosen(good)


@kernel
def _first_outside(values: Any, lengths: Any, num_rows: Any) -> int:
    """-1, or the first position whose id is not in [0, rows of its feature)."""
    position = 0
    for feature in range(lengths.shape[0]):
        end = position
        for sample in range(lengths.shape[1]):
            end += lengths[feature, sample]
        for i in range(position, end):
            if values[i] < 0 or values[i] >= num_rows[feature]:
                return i
        position = end
    return -1


class Merged(NamedTuple):
    """A batch of requests.

    Attributes:
        values: int64 [N].
        offsets: int64 [F * B + 1].
        weights: float32 [N], or None.
        samples: where each request's samples begin, and how many there are; int64 [requests + 1].
    """

    values: Any
    offsets: Any
    weights: Any
    samples: Any


_NO_WEIGHTS: Final = np.empty(0, np.float32)


def merge(parts: Sequence[JaggedIds]) -> Merged:
    """The ids of some requests as one batch: sample after sample, request after request."""
    samples = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.num_samples for part in parts], out=samples[1:])
    has_weights = any(part.weights is not None for part in parts)
    if len(parts) == 1:
        offsets = np.zeros(parts[0].lengths.size + 1, np.int64)
        np.cumsum(parts[0].lengths.reshape(-1), out=offsets[1:])
        return Merged(parts[0].values, offsets, parts[0].weights, samples)
    values = np.concatenate([part.values for part in parts])
    lengths = np.concatenate([part.lengths.reshape(-1) for part in parts])
    weights = np.concatenate([_weights_of(part) for part in parts]) if has_weights else _NO_WEIGHTS
    num_features = parts[0].lengths.shape[0]
    offsets = np.zeros(num_features * int(samples[-1]) + 1, np.int64)
    merged, merged_weights = np.empty_like(values), np.empty_like(weights)
    _interleave(num_features, samples, values, lengths, weights, offsets, merged, merged_weights)
    return Merged(merged, offsets, merged_weights if has_weights else None, samples)


def _weights_of(part: JaggedIds) -> Any:
    return np.ones(len(part.values), np.float32) if part.weights is None else part.weights


@kernel
def _interleave(
    num_features: int, samples: Any, values: Any, lengths: Any, weights: Any, offsets: Any, merged: Any,
    merged_weights: Any,
) -> None:  # fmt: skip
    """From request by request, within it feature by feature, to feature by feature."""
    batch = samples[-1]
    for part in range(samples.size - 1):
        count = samples[part + 1] - samples[part]
        for feature in range(num_features):
            first = samples[part] * num_features + feature * count
            for sample in range(count):
                offsets[feature * batch + samples[part] + sample + 1] = lengths[first + sample]
    for bag in range(offsets.size - 1):
        offsets[bag + 1] += offsets[bag]
    source = 0
    for part in range(samples.size - 1):
        for feature in range(num_features):
            start = offsets[feature * batch + samples[part]]
            stop = offsets[feature * batch + samples[part + 1]]
            for i in range(stop - start):
                merged[start + i] = values[source + i]
            if weights.size:
                for i in range(stop - start):
                    merged_weights[start + i] = weights[source + i]
            source += stop - start
