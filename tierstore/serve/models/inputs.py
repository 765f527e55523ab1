"""A request's inputs against what a model takes: names, datatypes, shapes, and numbers that are numbers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ...settings.names import nearest
from ...system.excerpt import excerpt
from ..messages import InferTensor, ServeError, Status, TensorSpec

_INTEGERS: Final = ("INT64", "INT32")


def invalid(name: str, what: str) -> ServeError:
    return ServeError(Status.INVALID, f"input {name!r} {what}")


def check_inputs(
    inputs: Mapping[str, InferTensor], required: Sequence[TensorSpec], optional: Sequence[TensorSpec] = ()
) -> None:
    """ServeError unless all required inputs are there and no others but optional ones; INT32 is taken for INT64."""
    known = {spec.name: spec for spec in (*required, *optional)}
    for name in inputs:
        if name not in known:
            hint = nearest(name, known, all_are="the model takes")
            raise ServeError(Status.INVALID, f"there is no input {excerpt(name)}; {hint}")
    for spec in required:
        if spec.name not in inputs:
            raise invalid(spec.name, f"is missing: {spec.datatype} {list(spec.shape)}")
    for name, tensor in inputs.items():
        spec, shape = known[name], tensor.data.shape
        allowed = _INTEGERS if spec.datatype in _INTEGERS else (spec.datatype,)
        if tensor.datatype not in allowed:
            raise invalid(name, f"is {tensor.datatype}; the model takes {' or '.join(allowed)}")
        if len(shape) != len(spec.shape) or any(
            want not in (-1, have) for have, want in zip(shape, spec.shape, strict=True)
        ):
            raise invalid(name, f"has shape {list(shape)}; the model takes {list(spec.shape)}, -1 being any length")


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
