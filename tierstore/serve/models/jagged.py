"""Jagged ids of requests: read from inputs, checked against their tables, and laid end to end as one batch.

Shapes: F features, B samples, N ids; ids lie feature by feature, sample by sample, as in a KeyedJaggedTensor.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ...kernels.jit import kernel
from ...settings.sections import nearest
from ...system.checks import excerpt
from ...train.readers.categories import last_of
from ..base import LONG_IDS, Pause
from ..messages import InferTensor, ServeError, Status, TensorSpec

Dropped = Callable[[str, int], None]
"""Called with the model and how many ids of a request were dropped, as they are no rows."""
_BAG_IDS: Final = 64
"""Ids of a bag that count as one; of a longer one, so many count as another sample."""
PART_IDS: Final = 8192
"""Of a long query's first part, at whose end it pauses; and the most of one sample that is pooled."""
_GROWTH: Final = 4
_QUICK_SECONDS: Final = 0.002
"""Of a part, and of those who ran while it paused: then the next part is larger."""


class JaggedIds(NamedTuple):
    """Of one request or batch: values int64 [N], lengths int64 [F, B], weights float32 [N] or None for ones; ``dense``:
    a model's other inputs; ``outside``: which ids are no rows, bool [N], or None."""

    values: Any
    lengths: Any
    weights: Any = None
    dense: Any = None
    outside: Any = None
    ids_per_sample: int = 0

    @property
    def num_samples(self) -> int:
        """Those that there are; or one for as many ids as are due to it, if that is more."""
        due = self.ids_per_sample or _BAG_IDS * len(self.lengths)
        return max(int(self.lengths.shape[1]), -(-len(self.values) // due))

    @property
    def num_ids(self) -> int:
        return len(self.values)


class Features:
    """A model's jagged ids.

    Args:
        rows: of each feature's table, in order; ``1 << 63`` where ids are categories that are hashed later; None where
            any int64 is an id.
        dropped: None to refuse requests with ids that are no rows.
        ids: name of the input of ids.
    """

    def __init__(
        self, model: str, rows: Mapping[str, int | None], dropped: Dropped | None, *, ids: str = "values"
    ) -> None:
        self.names = list(rows)
        most = np.iinfo(np.int64)
        self._first = np.array([most.min if each is None else 0 for each in rows.values()], np.int64)
        self._last = np.array([most.max if each is None else each - 1 for each in rows.values()], np.int64)
        self._model = model
        self._dropped = dropped
        self._ids = ids

    def parse(self, inputs: Mapping[str, InferTensor], *, are_pooled: bool = True, longest: int = 0) -> JaggedIds:
        """The ids of a request, all of them rows, the last ``longest`` of a bag (0: all), and its weights; copies, as
        kernels are compiled again for read-only arrays. ServeError INVALID names the input."""
        given = inputs[self._ids].data
        lengths = lengths_of(inputs, len(given), self._ids).reshape(len(self.names), -1)
        if not lengths.shape[1]:
            raise invalid("lengths", "is empty: send at least one sample")
        ids = np.array(given, np.int64)
        weights = None
        if "weights" in inputs:
            weights = np.array(inputs["weights"].data, np.float32)
            if weights.shape != ids.shape:
                raise invalid("weights", f"has {len(weights)} elements; {self._ids!r} has {len(ids)}")
            require_finite("weights", weights)
        outside = self.outside(ids, lengths)
        if outside is not None:
            bags = np.repeat(np.arange(lengths.size), lengths.reshape(-1))
            lengths = np.bincount(bags[~outside], minlength=lengths.size).reshape(lengths.shape)
            ids, weights = ids[~outside], None if weights is None else weights[~outside]
        if longest:
            ids, lengths = last_of(ids, lengths.reshape(-1), longest), np.minimum(lengths, longest)
        if (
            are_pooled and len(ids) > PART_IDS and (counts := lengths.sum(0)).max() > PART_IDS
        ):  # no sum of rows is made in parts
            many = f"gives sample {counts.argmax()} {counts.max()} ids"
            raise invalid(lengths_name(inputs), f"{many}; a sample has at most {PART_IDS}: send fewer")
        return JaggedIds(ids, lengths, weights)

    def outside(self, ids: Any, lengths: Any) -> Any:
        """Which ids are no rows, bool [N], counted; None if all are rows. ServeError INVALID if they are refused."""
        first = int(_first_outside(ids, lengths, self._first, self._last))
        if first < 0:
            return None
        ends = np.cumsum(lengths.sum(1))
        if self._dropped is None:
            feature = int(np.searchsorted(ends, first, side="right"))
            of = f" of feature {self.names[feature]!r}" if len(self.names) > 1 else ""
            rows = int(self._last[feature]) + 1
            taken = "categories are 0 or more" if rows == 1 << 63 else f"ids are in [0, {rows})"
            raise invalid(self._ids, f"has {int(ids[first])} at position {first}{of}: {taken}")
        counts = np.diff(ends, prepend=0)
        outside = (ids < np.repeat(self._first, counts)) | (ids > np.repeat(self._last, counts))
        self._dropped(self._model, int(np.count_nonzero(outside)))
        return outside


@kernel
def _first_outside(values: Any, lengths: Any, first: Any, last: Any) -> int:
    """-1, or the first position whose id is not in [first, last] of its feature."""
    position = 0
    for feature in range(lengths.shape[0]):
        end = position
        for sample in range(lengths.shape[1]):
            end += lengths[feature, sample]
        for i in range(position, end):
            if values[i] < first[feature] or values[i] > last[feature]:
                return i
        position = end
    return -1


class Merged(NamedTuple):
    """A batch: values int64 [N], offsets int64 [F * B + 1], weights float32 [N] or None, and where each request's
    samples begin, int64 [requests + 1]."""

    values: Any
    offsets: Any
    weights: Any
    samples: Any


def part_sizes() -> Iterator[int]:
    """How many ids each part of a long query has, given how long the ones before took: each costs some 0.4 ms besides
    its rows, and rows on SSD take a hundred times as long as those in memory."""
    size = PART_IDS
    while True:
        begun = time.perf_counter()
        yield size
        is_quick = time.perf_counter() - begun < _QUICK_SECONDS
        size = min(_GROWTH * size, LONG_IDS) if is_quick else PART_IDS


def parts_of(batch: Merged, pause: Pause | None) -> Iterator[Merged]:
    """The batch; or, with a pause, its samples in order, in parts of ``part_sizes``, and a pause between two."""
    if pause is None:
        yield batch
        return
    lengths = np.diff(batch.offsets).reshape(-1, int(batch.samples[-1]))
    ends = np.cumsum(lengths.sum(0))
    starts, first, done = batch.offsets[:-1].reshape(lengths.shape), 0, 0
    for size in part_sizes():
        last = max(first + 1, int(np.searchsorted(ends, done + size, side="right")))
        sizes = lengths[:, first:last].sum(1)
        spans = [slice(begin, begin + size) for begin, size in zip(starts[:, first], sizes, strict=True)]
        values, weights = (
            each if each is None else np.concatenate([each[span] for span in spans])
            for each in (batch.values, batch.weights)
        )
        yield merge([JaggedIds(values, lengths[:, first:last], weights)])
        if last >= len(ends):
            return
        pause()
        first, done = last, ends[last - 1]


_NO_WEIGHTS: Final = np.empty(0, np.float32)


def merge(parts: Sequence[JaggedIds]) -> Merged:
    """The ids of some requests as one batch: sample after sample, request after request."""
    samples = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([part.lengths.shape[1] for part in parts], out=samples[1:])
    has_weights = any(part.weights is not None for part in parts)
    if len(parts) == 1:
        offsets = np.zeros(parts[0].lengths.size + 1, np.int64)
        np.cumsum(parts[0].lengths.reshape(-1), out=offsets[1:])
        return Merged(parts[0].values, offsets, parts[0].weights, samples)
    values = np.concatenate([part.values for part in parts])
    lengths = np.concatenate([part.lengths.reshape(-1) for part in parts])
    weights = _NO_WEIGHTS
    if has_weights:
        ones = [np.ones(len(part.values), np.float32) if part.weights is None else part.weights for part in parts]
        weights = np.concatenate(ones)
    num_features = parts[0].lengths.shape[0]
    offsets = np.zeros(num_features * int(samples[-1]) + 1, np.int64)
    merged, merged_weights = np.empty_like(values), np.empty_like(weights)
    _interleave(num_features, samples, values, lengths, weights, offsets, merged, merged_weights)
    return Merged(merged, offsets, merged_weights if has_weights else None, samples)


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


_INTEGERS: Final = ("INT64", "INT32")


def invalid(name: str, what: str) -> ServeError:
    return ServeError(Status.INVALID, f"input {name!r} {what}")


def check_inputs(
    inputs: Mapping[str, InferTensor], required: Sequence[TensorSpec], optional: Sequence[TensorSpec] = (), *,
    texts: bool = False,
) -> Mapping[str, InferTensor]:  # fmt: skip
    """The inputs, with lengths of offsets. ServeError unless all required ones are there and no others but
    optional ones; INT32 is taken for INT64, and with ``texts`` BYTES for values."""
    inputs = _with_lengths(inputs, required)
    known = {spec.name: spec for spec in (*required, *optional)}
    given = {name: each for name, each in inputs.items() if name != "offsets" or "lengths" not in known}
    for name in given:
        if name not in known:
            hint = nearest(name, known, all_are="the model takes")
            raise ServeError(Status.INVALID, f"there is no input {excerpt(name)}; {hint}")
    for spec in required:
        if spec.name not in inputs:
            raise invalid(spec.name, f"is missing: {spec.datatype} {list(spec.shape)}")
    for name, tensor in given.items():
        spec, shape = known[name], tensor.data.shape
        allowed: tuple[str, ...] = _INTEGERS if spec.datatype in _INTEGERS else (spec.datatype,)
        allowed += ("BYTES",) if texts and name == "values" else ()
        if tensor.datatype not in allowed:
            raise invalid(name, f"is {tensor.datatype}; the model takes {' or '.join(allowed)}")
        if len(shape) != len(spec.shape) or any(
            want not in (-1, have) for have, want in zip(shape, spec.shape, strict=True)
        ):
            raise invalid(name, f"has shape {list(shape)}; the model takes {list(spec.shape)}, -1 being any length")
    return inputs


def _with_lengths(inputs: Mapping[str, InferTensor], required: Sequence[TensorSpec]) -> Mapping[str, InferTensor]:
    spec = next((spec for spec in required if spec.name == "lengths"), None)
    ids = next((inputs[spec.name] for spec in required if spec.name in ("ids", "values") and spec.name in inputs), None)
    if spec is None or ids is None or "offsets" not in inputs:
        return inputs
    if "lengths" in inputs:
        raise ServeError(Status.INVALID, "give offsets or lengths, not both")
    given, num_ids, num_features = inputs["offsets"], ids.data.size, max(spec.shape[0], 1)
    if given.datatype not in _INTEGERS:
        raise invalid("offsets", f"is {given.datatype}; the model takes {' or '.join(_INTEGERS)}")
    is_open, ends = given.data.ndim == 2 and len(given.data) == num_features, np.array(given.data.reshape(-1), np.int64)
    ends = np.append(ends, num_ids) if is_open else ends
    is_good = (is_open or given.data.ndim == 1) and len(ends) > 1 and ends[0] == 0 and ends[-1] == num_ids
    if not is_good or (ends[1:] < ends[:-1]).any() or (len(ends) - 1) % num_features:
        form = f"INT64 or INT32 [{num_features} * B + 1], from 0 to {num_ids}, the number of ids, never descending"
        raise invalid("offsets", f"must be {form}; or [{num_features}, B], without the end")
    return {**inputs, "lengths": InferTensor("INT64", np.diff(ends).reshape(spec.shape))}


def lengths_name(inputs: Mapping[str, InferTensor]) -> str:
    """What a client calls lengths that ``check_inputs`` gave."""
    return "offsets" if "offsets" in inputs else "lengths"


def lengths_of(inputs: Mapping[str, InferTensor], num_values: int, values_name: str) -> Any:
    """int64, of the input's shape, a copy: lengths of bags that together take ``num_values`` values."""
    lengths = np.array(inputs["lengths"].data, np.int64)
    flat = lengths.reshape(-1)
    least, most = int(flat.min(initial=0)), int(flat.max(initial=0))
    if least < 0:
        raise invalid("lengths", f"has the length {least} at position {int(flat.argmin())}; lengths are 0 or more")
    if most > num_values:  # so that the sum cannot overflow
        raise invalid("lengths", f"has the length {most}; {values_name!r} has {num_values} values in all")
    if int(flat.sum()) != num_values:
        raise invalid("lengths", f"adds up to {int(flat.sum())}; {values_name!r} has {num_values} values")
    return lengths


def require_finite(name: str, array: Any, advice: str = "send finite numbers") -> None:
    """ServeError, with the position and the advice, if an element is NaN or infinite."""
    is_finite = np.isfinite(array)
    if not is_finite.all():
        position = np.unravel_index(int(is_finite.argmin()), array.shape)
        raise invalid(name, f"is {array[position]} at {[int(place) for place in position]}; {advice}")
