"""The tables' optimizers as torch has them, over ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..store import Store
from ..store.optimizer import TieredOptimizer
from .ranks import Ranks


class ShardedOptimizer(TieredOptimizer):
    """``TieredOptimizer`` of this rank's rows; ``clip_grad_norm_`` takes the norm over the rows of all ranks.

    Args:
        is_replicated: whether all ranks have the rows of the table of that name.
    """

    def __init__(
        self, store: Store, dense: torch.optim.Optimizer | None, ranks: Ranks, is_replicated: Callable[[str], bool]
    ) -> None:
        self._ranks = ranks
        self._is_replicated = is_replicated
        super().__init__(store, dense)

    def _total_norm(self, others: Sequence[Tensor], norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Others, and rows that all ranks have, count once. Collective."""
        shared = [*others, *self._row_gradients(self._is_replicated)]
        own = self._row_gradients(lambda name: not self._is_replicated(name))
        with self._ranks.telling():
            norm = float(torch.nn.utils.get_total_norm(own, norm_type))
        norms = self._ranks.gather(norm, "clip_grad_norm_")
        norms.append(float(torch.nn.utils.get_total_norm(shared, norm_type)))
        return torch.nn.utils.get_total_norm([torch.tensor(norms)], norm_type, error_if_nonfinite)
