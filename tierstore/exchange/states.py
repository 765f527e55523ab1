"""Which tensors the state of an optimizer is: its columns, under the names that torch.optim gives them."""

from typing import NamedTuple

from ..optim import Optimizer

__all__ = ["StateTensor", "state_tensors"]


class StateTensor(NamedTuple):
    """Columns ``[first, last)`` of a row's state.

    One value a row is a tensor [rows], any other number a tensor [rows, last - first].
    """

    name: str
    first: int
    last: int
    per_row: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows,) if self.per_row else (rows, self.last - self.first)


def state_tensors(optimizer: Optimizer, dim: int) -> tuple[StateTensor, ...]:
    """The state tensors of a table with ``dim`` columns, in order of their columns; float32 all of them."""
    if optimizer.kind == "adam":
        return StateTensor("exp_avg", 0, dim, False), StateTensor("exp_avg_sq", dim, 2 * dim, False)
    columns = optimizer.state_dim(dim)
    if not columns:
        return ()
    return (StateTensor("sum", 0, columns, optimizer.kind == "rowwise_adagrad"),)
