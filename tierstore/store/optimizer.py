"""The tables' optimizers as torch has them: backward collects gradients, ``step`` applies them."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..lookup.joined import Jagged
from ..lookup.tables import RowGradients
from ..system.signals import shielded
from .table import Table

if TYPE_CHECKING:
    from .store import Store


class TieredOptimizer(torch.optim.Optimizer):
    """The optimizers of a store's tables; made by ``Store.optimizer``.

    While it exists, a backward pass changes no row. It adds the rows' gradients, each row's merged, to ``grad`` of the
    table's parameter, as ``torch.nn.EmbeddingBag(sparse=True)`` does; ``step`` applies them by the rule of the table's
    ``TableConfig.optimizer``. So schedulers, accumulation over micro-batches, ``torch.amp.GradScaler`` and
    ``zero_grad`` work as with any optimizer. A ``step`` after one backward pass gives the bits of an update fused with
    backward.

    Each table has one parameter group: its ``lr``, its ``name``, and one parameter that stands for the rows. The
    parameter has the table's shape and no content; its ``grad`` is None or sparse float32 [num_embeddings,
    embedding_dim], each row once. It takes ``embedding_dim * 4 + 8`` bytes for each row with a gradient.

    What ``state_dict`` holds is the learning rates: the rows' state is in the store.
    """

    def __init__(self, store: "Store") -> None:
        self._store = store
        self._tables: dict[Tensor, Table] = {}
        super().__init__([self._group(table) for table in store.tables.values()], {"lr": 0.01})

    def _group(self, table: Table) -> dict[str, Any]:
        shape = table.config.num_embeddings, table.layout.dim
        stand_in = torch.empty((), dtype=torch.float32, device=self._store.device).expand(shape).requires_grad_()
        self._tables[stand_in] = table
        return {"params": [stand_in], "lr": table.learning_rate, "name": table.name}

    def collect(self, gradients: RowGradients) -> None:
        """Add a pass's gradients to those that are there; called at its end."""
        table: Any = gradients.table
        known = next((stand_in for stand_in, owner in self._tables.items() if owner is table), None)
        if known is None:  # made since
            self.add_param_group(self._group(table))
            known = next(reversed(self._tables))
        added = torch.sparse_coo_tensor(
            gradients.rows[None], gradients.values, known.shape, device=known.device, check_invariants=False
        )
        known.grad = added if known.grad is None else (known.grad + added).coalesce()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients: one update of each table that has one, also if no row does.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; or None.

        Raises:
            ClosedError, DamagedError: a row could not be read; tables before it are updated.
            RuntimeError: another optimizer of the store was made since.
        """
        if self._store.optimizer_in_use is not self:
            raise RuntimeError("the store has another optimizer, made since; call the step of that one")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply()
        return loss

    @shielded
    def _apply(self) -> None:
        for group in self.param_groups:
            for stand_in in group["params"]:
                table = self._tables[stand_in]
                table.learning_rate = group["lr"]
                if stand_in.grad is not None:
                    _update(table, stand_in.grad)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor] = (),
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over the rows' gradients and those of other parameters, as one vector.

        torch's own function takes no sparse gradients.

        Args:
            parameters: others, as of ``model.parameters()``; sparse gradients of theirs are coalesced.

        Returns:
            the norm before, float32 [].
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for each in given:
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.coalesce()
        own = [stand_in for group in self.param_groups for stand_in in group["params"]]
        gradients = [each.grad for each in (*given, *own) if each.grad is not None]
        values = [each._values() if each.is_sparse else each for each in gradients]
        norm = torch.nn.utils.get_total_norm(values, norm_type, error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for each in values:
            each.mul_(factor.to(each.device))
        return norm


def _update(table: Table, gradient: Tensor) -> None:
    rows = gradient._indices()[0].cpu().numpy()
    jagged = Jagged(rows, np.arange(len(rows) + 1), len(rows), None)
    lookup = table.lookup(jagged, mode="sum")
    try:
        lookup.update(gradient._values().contiguous())
    finally:
        lookup.release()
