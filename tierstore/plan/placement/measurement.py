"""Measured lookups, and the file they are kept in."""

import math
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ...system.excerpt import excerpt
from ..json_file import read_json, write_json
from .shapes import LookupShape

__all__ = ["Measurement", "read_measurements", "require_measurements", "write_measurements"]

_KIND: Final = "measured lookups"
_LEAST_S: Final = 1e-6
_TIMES: Final = ("forward_s", "backward_s", "call_s")


class Measurement(NamedTuple):
    """Medians over batches.

    Attributes:
        forward_s: of the pooled lookup.
        backward_s: of merging the gradients of a row and updating it.
        call_s: of both for one id, timed in turns with it: what a call takes whatever its ids. Tables that are looked
            up together share it.
    """

    shape: LookupShape
    forward_s: float
    backward_s: float
    call_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Beyond a call's own, a microsecond at least."""
        return max(self.forward_s + self.backward_s - self.call_s, _LEAST_S)

    @property
    def weight(self) -> float:
        """From 0 to 1: of a lookup that takes little beyond a call, what it takes is not well known."""
        return self.seconds / (self.seconds + self.call_s)


def require_measurements(measurements: Sequence[Measurement], least: int) -> None:
    """ValueError unless there are so many, of times above 0."""
    if len(measurements) < least:
        raise ValueError(f"{len(measurements)} measurements; at least {least} are needed")
    wrong = next((each for each in measurements if not 0 < each.forward_s + each.backward_s < math.inf), None)
    if wrong is not None:
        raise ValueError(f"a measurement of {excerpt(wrong.forward_s + wrong.backward_s)} seconds; they are above 0")


def write_measurements(measurements: Sequence[Measurement], path: str | os.PathLike[str]) -> None:
    """Write as JSON, over what is there; whole or not at all."""
    rows = [[*each.shape, *each[1:]] for each in measurements]
    fields = [*LookupShape._fields, *_TIMES]
    write_json({"kind": _KIND, "fields": fields, "rows": rows}, path, force=True)


def read_measurements(path: str | os.PathLike[str]) -> tuple[Measurement, ...]:
    """What ``write_measurements`` wrote.

    Raises:
        ValueError: it is no such file; says why. FileNotFoundError.
    """
    found = read_json(path, _KIND)
    width = len(LookupShape._fields)
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(_is_row(row, width + len(_TIMES)) for row in rows):
        raise ValueError(f"{os.fspath(path)}: rows must be lists of {width + len(_TIMES)} numbers")
    return tuple(Measurement(_shape(row[:width]), *map(float, row[width:])) for row in rows)


def _is_row(row: Any, width: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == width
        and all(type(value) in (int, float) and math.isfinite(value) for value in row)
        and min(row[0], row[1], row[3]) >= 1
        and min(row) >= 0
    )


def _shape(row: list[Any]) -> LookupShape:
    rows, dim, pooling, batch, exponent, size = row
    return LookupShape(int(rows), int(dim), float(pooling), int(batch), float(exponent), int(size))
