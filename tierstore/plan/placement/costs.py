"""What a lookup takes, by its shape: the contract of cost models, and the linear one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ...settings.options import check_ranges, option
from .measurement import Measurement, require_measurements
from .shapes import LookupShape

__all__ = ["ID_BYTES", "CostModel", "LinearCost"]

ID_BYTES: Final = 8
_MOST: Final = 1e18


class CostModel(Protocol):
    """Seconds of lookups."""

    def seconds(self, shapes: Sequence[LookupShape]) -> NDArray[np.float64]:
        """float64 [len(shapes)]: of one batch each, above 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Bytes moved: of rows at one rate, of ids and pooled results at another, and a fixed time a table."""

    bytes_per_s: float = option(1e9, "of rows", low=1e-6, high=_MOST)
    table_s: float = option(0.0, "seconds of a table, whatever its ids", low=0)
    link_bytes_per_s: float = option(_MOST, "of ids to, and of pooled results from, the device", low=1e-6, high=_MOST)

    def __post_init__(self) -> None:
        check_ranges(self)

    def seconds(self, shapes: Sequence[LookupShape]) -> NDArray[np.float64]:
        """``lookups * row bytes / bytes_per_s + table_s + (8 * lookups + output bytes) / link_bytes_per_s``."""
        rows = np.array([shape.lookups * shape.weight_bytes for shape in shapes])
        link = np.array([ID_BYTES * shape.lookups + shape.output_bytes for shape in shapes])
        return rows / self.bytes_per_s + self.table_s + link / self.link_bytes_per_s

    @classmethod
    def fit(cls, measurements: Sequence[Measurement]) -> "LinearCost":
        """The rate and the fixed time with the least sum of squared relative errors.

        Times that are hardly above a call's own count less.

        Raises:
            ValueError: too few measurements.
        """
        require_measurements(measurements, 2)
        seconds = np.array([each.seconds for each in measurements])
        amounts = np.array([each.shape.lookups * each.shape.weight_bytes for each in measurements])
        trust = np.array([each.weight for each in measurements])
        columns = np.stack([amounts, np.ones(len(amounts))], axis=1) * (trust / seconds)[:, None]
        (per_byte, fixed), *_ = np.linalg.lstsq(columns, trust, rcond=None)
        if fixed < 0:
            slopes = trust * amounts / seconds
            per_byte, fixed = float(slopes @ trust) / float(slopes @ slopes), 0.0
        if per_byte <= 0:
            raise ValueError("the measured seconds do not grow with the bytes; measure more, and larger, tables")
        return cls(bytes_per_s=float(1 / per_byte), table_s=float(fixed))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"bytes_per_s": self.bytes_per_s, "table_s": self.table_s, "link_bytes_per_s": self.link_bytes_per_s}
