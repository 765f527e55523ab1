"""What a table's optimizer is: frozen, hashable, JSON-able. The arithmetic is in ``rules``.

Rows that a batch touched are updated, once per backward, with a row's gradients merged in id-list order (see
``rules.RUN``). ``weight_decay`` reaches those rows only. It adds ``weight_decay * row`` to the merged gradient, as
torch.optim does. With ``decoupled`` the row is multiplied by ``1 - lr * weight_decay`` instead, as by
torch.optim.AdamW, FBGEMM's ADAM and its ``WeightDecayMode.DECOUPLE``.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, Literal

import numpy as np

from ..kernels.arrays import Floats, Int64s
from ..system.checks import by_kind

NUM_HYPER: Final = 8
Hyper = tuple[float, float, float, float, float, float, float, float]
"""A table's row in the kernel's matrix of hyper-parameters, float32 [T, NUM_HYPER]: learning rate, L2 weight decay,
eps, beta1, beta2, step size, root of the bias correction, and the factor of the row that the step is subtracted from. A
tuple is made and compared in a tenth of numpy's time."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Base. ``lr``: ``Table.learning_rate`` changes it while training. ``weight_decay``: of touched rows; 0 is none.
    ``decoupled``: weight decay is no part of the gradient; see the module's docstring."""

    lr: float = 0.01
    weight_decay: float = 0.0
    decoupled: bool = False
    kind: ClassVar[str] = ""
    code: ClassVar[int] = -1
    goes_by_step: ClassVar[bool] = True  # whether the number of an update tells, besides the rate

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if not isinstance(number, (int, float, np.number)):
                    raise TypeError(f"{type(self).__name__}: {name} must be a number, not {type(number).__name__}")
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"{type(self).__name__}: {name}={value} must be finite and not negative")
            plain = np.asarray(value).tolist()  # Python's numbers, of numpy's
            object.__setattr__(self, name, tuple(plain) if isinstance(plain, list) else plain)
        if not isinstance(self.decoupled, bool):
            raise TypeError(f"{type(self).__name__}: decoupled must be True or False, not {self.decoupled}")

    def state_dim(self, dim: int) -> int:
        """float32 columns of state kept with a row of ``dim`` columns."""
        raise NotImplementedError

    @property
    def initial_state(self) -> float:
        """First value of every state column."""
        return 0.0

    def hyper(self, learning_rate: float, step: int) -> Hyper:
        """What the kernels go by at this learning rate, in the table's update number ``step``, from 1."""
        decay = self.weight_decay
        if self.decoupled:
            return learning_rate, 0.0, *self._own(learning_rate, step), 1.0 - learning_rate * decay
        return learning_rate, decay, *self._own(learning_rate, step), 1.0

    def _own(self, _learning_rate: float, _step: int) -> tuple[float, float, float, float, float]:
        """eps, beta1, beta2, step size, root of the bias correction, as far as the rule has them."""
        return 0.0, 0.0, 0.0, 0.0, 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` reads it back. Without ``decoupled`` where it is False: releases that do not
        know it read all other tables."""
        fields = asdict(self)
        decoupled = {"decoupled": True} if fields.pop("decoupled") else {}
        return {"kind": self.kind, **fields, **decoupled}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """``row -= lr * gradient``; no state."""

    kind: ClassVar[str] = "sgd"
    code: ClassVar[int] = 0
    goes_by_step: ClassVar[bool] = False

    def state_dim(self, dim: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Optimizer):
    """One accumulator a row: ``s += mean(g**2); row -= lr * g / (sqrt(s) + eps)``, as FBGEMM's exact row-wise Adagrad.
    ``initial_accumulator_value``: first value of ``s``."""

    eps: float = 1e-8
    initial_accumulator_value: float = 0.0
    kind: ClassVar[str] = "rowwise_adagrad"
    code: ClassVar[int] = 1
    goes_by_step: ClassVar[bool] = False

    def state_dim(self, dim: int) -> int:
        return 1

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    def _own(self, _learning_rate: float, _step: int) -> tuple[float, float, float, float, float]:
        return self.eps, 0.0, 0.0, 0.0, 0.0


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagradOfColumns(RowWiseAdagrad):
    """``RowWiseAdagrad`` of a range of a row's columns, by the whole row's mean square, which is given behind the
    gradients, see ``rules.merge_and_update``."""

    kind: ClassVar[str] = "rowwise_adagrad_of_columns"
    code: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_decay and not self.decoupled:
            raise ValueError(
                f"weight_decay={self.weight_decay}: the mean square of a row's columns would need the whole row; "
                "shard the table by rows, give decoupled=True, or leave weight_decay 0"
            )


@dataclass(frozen=True, kw_only=True)
class Adagrad(RowWiseAdagrad):
    """``s += g**2; row -= lr * g / (sqrt(s) + eps)``, column by column, as torch.optim.Adagrad without lr_decay."""

    eps: float = 1e-10
    kind: ClassVar[str] = "adagrad"
    code: ClassVar[int] = 2

    def state_dim(self, dim: int) -> int:
        return dim


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) on touched rows, bias-corrected by the table's update count.

    ``betas``: decay of the first and the second moment, each below 1. ``eps`` is added to the root after the
    correction, as by torch.optim.Adam; torch.optim.SparseAdam adds it before.
    """

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    kind: ClassVar[str] = "adam"
    code: ClassVar[int] = 3
    goes_by_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        super().__post_init__()
        if len(self.betas) != 2 or max(self.betas) >= 1:
            raise ValueError(f"Adam: betas={self.betas} must be two numbers in [0, 1)")

    def state_dim(self, dim: int) -> int:
        return 2 * dim

    def _own(self, learning_rate: float, step: int) -> tuple[float, float, float, float, float]:
        beta1, beta2 = self.betas
        return self.eps, beta1, beta2, learning_rate / (1 - beta1**step), math.sqrt(1 - beta2**step)


RuleName = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]
RULES: Final[dict[str, type[Optimizer]]] = {each.kind: each for each in (SGD, RowWiseAdagrad, Adagrad, Adam)}


def from_dict(fields: dict[str, Any]) -> Optimizer:
    """Inverse of ``Optimizer.to_dict``. ValueError for an unknown kind."""
    return by_kind(fields, {**RULES, RowWiseAdagradOfColumns.kind: RowWiseAdagradOfColumns}, "optimizer")


def adding(num_tables: int) -> tuple[Int64s, Floats]:
    """Codes, int64 [T], and hyper, float32 [T, NUM_HYPER], of an update that adds gradients to rows: SGD at rate -1."""
    hyper = np.zeros((num_tables, NUM_HYPER), np.float32)
    hyper[:, 0], hyper[:, -1] = -1, 1
    return np.full(num_tables, SGD.code, np.int64), hyper
