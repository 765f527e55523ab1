"""Counter-based initialisers: the value of an untouched row is a pure function of (seed, table, row, column).

Nothing is stored and nothing is drawn in order, so a row has the same first value whenever and wherever it is first
read. Random bits come from the SplitMix64 output function (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014) applied to a counter: two rounds mix seed and row key, one more each column.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import numpy as np

from .kernels.arrays import Int32s, Int64s, Weights, Words
from .layout import KEY_ROW_BITS, ROW_MASK, RowLayout
from .system.checks import by_kind

__all__ = ["Constant", "Initializer", "Normal", "Uniform", "from_dict"]

_CHUNK_ROWS: Final = 1024


@dataclass(frozen=True)
class Initializer:
    """Base of the initialisers; subclasses give ``kind`` and two parameters to the kernel.

    Attributes:
        place: of the table whose first values these are, where rows were moved to another place in the store; None for
            the table's own. Two that differ in nothing else are equal.
    """

    place: int | None = field(default=None, kw_only=True, compare=False, repr=False)
    kind: ClassVar[str] = ""
    first_column = 0

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            if name == "kind":
                continue
            if not isinstance(value, (int, float, np.number)):
                raise TypeError(f"{type(self).__name__}: {name} must be a number, not {type(value).__name__}")
            if not math.isfinite(value):
                raise ValueError(f"{name}={value} must be finite")
            object.__setattr__(self, name, np.asarray(value).tolist())  # Python's number, of numpy's
        self._parameters()

    def _parameters(self) -> tuple[float, float, int]:
        """Two of the distribution, and the seed. ValueError: there is no such distribution."""
        raise NotImplementedError

    def fill(self, keys: Int64s, slots: Int32s, weights: Weights, dim: int, dtype_code: int) -> None:
        """Write the first value of row ``keys[i]`` into ``weights[slots[i], :dim]``. ValueError: one is too large for
        the format of quantized rows.

        Args:
            keys: int64 [n], row keys (table index and row).
            slots: int32 [n].
            weights: float32 or uint16 [capacity, >= dim]; columns from ``dim`` on become 0. Or quantized rows, of the
                first values in float32.
            dtype_code: ``floats.code_of_dtype`` of the dtype.
        """
        from .kernels.floats import FLOAT32, INT4, INT8  # numba takes a second to load
        from .kernels.quantized import pack_rows
        from .kernels.slots import FIRST_VALUES, fill_rows

        if dtype_code in (INT8, INT4):
            places = np.arange(min(len(keys), _CHUNK_ROWS), dtype=np.int32)
            values = np.empty((len(places), dim), np.float32)
            for start in range(0, len(keys), _CHUNK_ROWS):
                part = slice(start, start + _CHUNK_ROWS)
                count = len(keys[part])
                self.fill(keys[part], places[:count], values, dim, FLOAT32)
                if pack_rows(values[:count], slots[part], weights, dim, dtype_code) >= 0:
                    raise ValueError(f"first values of {self} are too large for the scale and bias of a quantized row")
            return
        first, second, seed = self._parameters()
        if self.place is not None:
            keys = keys & ROW_MASK | (self.place << KEY_ROW_BITS)
        bits, column = np.uint64(seed % 2**64), self.first_column
        fill_rows(FIRST_VALUES[self.kind], first, second, bits, column, keys, slots, weights, dim, dtype_code)

    def rows(self, keys: Int64s, layout: RowLayout) -> Words:
        """Weights of whole rows before anything is written to them, uint64 [n, weight words of the layout]."""
        from .kernels.floats import code_of_dtype

        words, slots = np.zeros((len(keys), layout.weight_words), np.uint64), np.arange(len(keys), dtype=np.int32)
        self.fill(keys, slots, words.view(layout.numpy_dtype), layout.dim, code_of_dtype(layout.dtype))
        return words

    @property
    def random_seed(self) -> int:
        """Of its random numbers; 0 if it draws none."""
        return self._parameters()[2]

    def of_place(self, place: int) -> Self:
        """The same first values for a table in any place, which was in this one."""
        return self if self.place is not None else replace(self, place=place)

    def from_column(self, first: int) -> Self:  # noqa: ARG002 - all are the same
        """Of a table whose columns are those from that one on of this one's."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back."""
        fields = {"kind": self.kind, **asdict(self)}
        if self.place is None:
            del fields["place"]  # releases that do not know it read all other tables
        return fields


@dataclass(frozen=True)
class Constant(Initializer):
    """Every column is ``value``."""

    value: float = 0.0
    kind: ClassVar[str] = "constant"

    def _parameters(self) -> tuple[float, float, int]:
        return self.value, 0.0, 0


@dataclass(frozen=True)
class _Random(Initializer):
    """``first_column``: the table has the columns from that one on of another, where a table is sharded by columns."""

    first_column: int = field(default=0, kw_only=True)

    def from_column(self, first: int) -> Self:
        return replace(self, first_column=first)


@dataclass(frozen=True)
class Uniform(_Random):
    """Independent uniform columns in [low, high)."""

    low: float = -0.01
    high: float = 0.01
    seed: int = 0
    kind: ClassVar[str] = "uniform"

    def _parameters(self) -> tuple[float, float, int]:
        if not self.low <= self.high:
            raise ValueError(f"Uniform: low={self.low} is above high={self.high}")
        return self.low, self.high, self.seed


@dataclass(frozen=True)
class Normal(_Random):
    """Independent normal columns (Box and Muller 1958, in float64)."""

    mean: float = 0.0
    std: float = 0.01
    seed: int = 0
    kind: ClassVar[str] = "normal"

    def _parameters(self) -> tuple[float, float, int]:
        if self.std < 0:
            raise ValueError(f"Normal: std={self.std} is negative")
        return self.mean, self.std, self.seed


_KINDS: Final[dict[str, type[Initializer]]] = {kind.kind: kind for kind in (Constant, Uniform, Normal)}


def from_dict(fields: dict[str, Any]) -> Initializer:
    """Inverse of ``Initializer.to_dict``. ValueError for an unknown kind."""
    return by_kind(fields, _KINDS, "initializer")
