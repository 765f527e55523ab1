"""The tables' optimizers as torch has them: backward collects gradients, ``step`` applies them."""

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..layout import KEY_ROW_BITS
from ..lookup.base import AnyLookup, Hold, LookupTable
from ..lookup.gradients import train
from ..lookup.lookup import make_lookup
from ..pool.joined import Joined
from ..system.checks import Unpicklable
from ..system.signals import shielded
from .table import Table

_LOG: Final = logging.getLogger("tierstore")
_KEPT: Final = (
    "a backward pass adds to gradients of rows that step applied before: call zero_grad() of store.optimizer() at "
    "each step, as model.zero_grad() and the zero_grad() of other optimizers do not reach rows"
)
_LOOKS_UP: Final = "torch.distributed.checkpoint.state_dict"
_MOVED: Final = (
    "step would apply gradients that it applied before, and some ids have lost their rows since to others: call "
    "zero_grad() of store.optimizer() at each step; no row was trained"
)
_GRAD: Final[Any] = Tensor.grad  # torch's property, to which mypy knows no setter


@dataclass(eq=False)
class _Waiting:
    """The gradients of a backward pass's rows, not merged yet; the rows are pinned. Most are never merged: ``step``
    runs the update that fuses merging and the optimizer's rule."""

    rows: "Sequence[_GradAnchor]"  # of each table of the lookup, in order
    lookup: AnyLookup
    grad_out: Tensor  # of the lookup's output

    @shielded
    def merge(self) -> None:
        holds, found = self.lookup.holds, self.lookup.gradients(self.grad_out)
        for rows in self.rows:
            if rows.waiting is self:
                rows.waiting = None
            rows.holds.extend(holds)
            for each in (each for each in found if each.table is rows.table):
                added = torch.sparse_coo_tensor(
                    each.rows[None], each.values, rows.shape, device=rows.device, check_invariants=False
                )
                known = rows.grad
                rows.grad = added if known is None else known + added.coalesce()


class _GradAnchor(torch.nn.Parameter):
    """Stands for a table's rows: of their shape, without content. Its ``grad`` is merged when it is first read."""

    table: Table
    waiting: _Waiting | None  # of the pass that has its gradient, if that is not merged yet
    is_applied: bool  # ``step`` has applied the gradient
    holds: list[Hold]  # what keeps the ids of the rows that have a merged gradient, until that is applied

    @property
    def grad(self) -> Tensor | None:
        """None, or sparse float32 [num_embeddings, embedding_dim], coalesced: a norm has the same bits in every tier. A
        dense one may be assigned, and is a gradient of every row."""
        if self.waiting is not None:
            self.waiting.merge()
        return super().grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        if self.waiting is not None:
            self.waiting.merge()
        if gradient is not None:
            if not gradient.is_sparse:
                rows = torch.arange(len(gradient), device=gradient.device)[None]
                gradient = torch.sparse_coo_tensor(
                    rows, gradient, gradient.shape, is_coalesced=True, check_invariants=False
                )
            gradient = gradient.coalesce()
        _GRAD.__set__(self, gradient)

    @property
    def has_grad(self) -> bool:
        return self.waiting is not None or super().grad is not None

    @property
    def all_holds(self) -> list[Hold]:
        return self.holds if self.waiting is None else [*self.holds, *self.waiting.lookup.holds]


class TieredOptimizer(Unpicklable, torch.optim.Optimizer):
    """The optimizers of a store's tables; made by ``Store.optimizer``.

    While it exists, a backward pass changes no row. It adds the rows' gradients to ``grad`` of the table's parameter,
    as ``torch.nn.EmbeddingBag(sparse=True)`` does; ``step`` applies them by the rule of the table's
    ``TableConfig.optimizer``. So schedulers, accumulation over micro-batches, ``torch.amp.GradScaler`` and
    ``zero_grad`` work as with any optimizer. A ``step`` after one backward pass gives the bits of an update fused with
    backward, and takes as long: gradients are merged only when ``grad`` is read or a second pass adds to it.

    Each table has one parameter group: its ``lr``, its ``name``, and one parameter that stands for the rows, of the
    table's shape and without content. Its ``grad`` is None or sparse float32 [num_embeddings, embedding_dim], each row
    once; merged, it takes ``embedding_dim * 4 + 8`` bytes for each row with a gradient.

    ``state_dict`` holds the learning rates, loaded by the tables' names: the rows' state is in the store.
    ``torch.distributed.checkpoint.state_dict`` gets and sets those of an optimizer that it is given alone.

    ``dense``: steps with this one, whose groups and state then are those of both, its own first.
    """

    def __init__(self, store: Any, dense: torch.optim.Optimizer | None = None) -> None:
        if not isinstance(dense, torch.optim.Optimizer | None):
            raise TypeError(f"dense must be a torch.optim.Optimizer, not {type(dense).__name__}")
        self._store = store
        self._dense = dense
        self._resumed: set[str] = set()  # tables that are trained, or whose rates were loaded
        super().__init__([_group(table) for table in store.tables.values()], {"lr": 0.01})
        self._by_table: dict[LookupTable, _GradAnchor] = {rows.table: rows for rows in self._rows}
        self._join()

    def _join(self) -> None:
        if self._dense is not None:
            self.param_groups[:] = [*self._dense.param_groups, *self._row_groups]
            self.state = self._dense.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of both. torch's tool that looks each parameter up in a model sees the dense ones."""
        caller = sys._getframe(1)
        if caller.f_globals["__name__"] == _LOOKS_UP and caller.f_code.co_name != "_init_optim_state":
            return self._groups[: self._num_dense]
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    @property
    def _num_dense(self) -> int:
        return 0 if self._dense is None else len(self._dense.param_groups)

    @property
    def _row_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if _is_of_rows(group)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of dense parameters to the dense optimizer; ValueError if there is none."""
        if _is_of_rows(param_group):
            super().add_param_group(param_group)
            return
        if self._dense is None:
            raise ValueError(
                "store.optimizer() trains rows alone, so it takes no group of other parameters: give it their "
                "optimizer, as store.optimizer(torch.optim.Adam(model.parameters())), and it is one of both"
            )
        self._dense.add_param_group(param_group)
        self._join()

    def state_dict(self) -> dict[str, Any]:
        """Groups and state of the dense optimizer, and a group without parameters for each table."""
        made = super().state_dict()
        dense, rows = made["param_groups"][: self._num_dense], made["param_groups"][self._num_dense :]
        for group in rows:
            group["params"] = []
        if dense and sys._getframe(1).f_globals["__name__"] == _LOOKS_UP:
            dense[0]["rows"] = rows  # it would leave them out when they are set
        return made

    def of_own_tables(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What a commit of this store has, without tables that were dropped since, by the names that the others have
        now. Of a state without the places of tables, those of other names are left out."""
        names = {table.index: table.name for table in self._store.tables.values()}
        groups, count = state_dict["param_groups"], self._num_dense
        rows = [{**each, "name": names.get(each["place"])} if "place" in each else each for each in groups[count:]]
        own = [each for each in rows if "name" not in each or each["name"] in names.values()]
        return {**state_dict, "param_groups": [*groups[:count], *own]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, each table's by its name; tables that it does not have keep what they have.
        ValueError, nothing loaded: it has groups of other tables, or is of no such optimizer. Others: as of the dense
        optimizer."""
        dense, num_dense = self._dense, self._num_dense
        groups = [dict(group) for group in state_dict["param_groups"]]
        rows = [*groups[num_dense:], *(each for group in groups[:num_dense] for each in group.pop("rows", ()))]
        own = {group["name"]: group for group in self._row_groups}
        saved = {group.get("name"): group for group in rows}
        if unknown := [name for name in saved if name not in own]:
            raise ValueError(
                f"the state has a group of the name {unknown[0]!r}, none of the tables {list(own)}: give what "
                "state_dict() of a store.optimizer() with no other tables was, which had as many groups of a dense "
                f"optimizer ({num_dense} here)"
            )
        if dense is not None:
            dense.load_state_dict({**state_dict, "param_groups": groups[:num_dense]})
            self._join()
        for name, group in saved.items():
            kept = {key: copy.deepcopy(each) for key, each in group.items() if key not in ("params", "place")}
            own[name].update(kept)
            self._resumed.add(name)

    @property
    def _rows(self) -> Iterator[_GradAnchor]:
        return (rows for group in self._row_groups for rows in group["params"])

    @property
    def has_grad(self) -> bool:
        return any(rows.has_grad for rows in self._rows)

    def collect(self, lookup: AnyLookup, grad_out: Tensor) -> None:
        """Add a pass's gradients to those that are there; called at its end."""
        for table in lookup.tables:
            if table not in self._by_table:  # made since
                self.add_param_group(group := _group(table))
                self._by_table[table] = group["params"][0]
        rows = [self._by_table[table] for table in lookup.tables]
        made = _Waiting(rows, lookup, grad_out.clone())
        known = [each for each in rows if each.has_grad]
        if any(each.is_applied for each in known):
            warnings.warn(_KEPT, RuntimeWarning, stacklevel=2)
        if known:
            made.merge()
            return
        for each in rows:
            each.waiting, each.is_applied = made, False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros, but forget those of dynamic ids, as rows may get other ids.
        ``model.zero_grad()`` does not reach those of rows."""
        for rows in self._rows:
            rows.is_applied = False
            if set_to_none or rows.table.ids is not None:
                for hold in rows.all_holds:
                    hold.let_go()
                if rows.waiting is not None:
                    rows.waiting.lookup.release()  # its rows will not be trained
                rows.waiting = rows.grad = None
                rows.holds.clear()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients: one update of each table that has one, also if no row does. Then ``dense`` steps.
        ``closure``, or None, evaluates the model again and returns the loss, which is returned.

        Raises:
            DiskFullError, DamagedError, BudgetError, MemoryError: rows could not be fetched; none was trained, and
                ``step`` can be called again.
            PartlyTrainedError: so too, but rows that do not fit in memory together were trained in parts. ClosedError.
            RuntimeError: another optimizer of the store was made since; or gradients were applied before, and ids have
                lost their rows since. No row was trained.
        """
        if self._store.optimizer_in_use is not self:
            raise RuntimeError("the store has another optimizer, made since; call the step of that one")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.has_grad:  # else the rates in force stay those of the last update
            self._apply()
        if self._dense is not None:
            self._dense.step()
        return loss

    @shielded
    def _apply(self) -> None:
        for rows in self._rows:
            for hold in rows.all_holds:
                hold.require(_MOVED)
        self._set_rates()
        passes = dict.fromkeys(rows.waiting for rows in self._rows if rows.waiting is not None)
        updates = [(each.lookup, each.grad_out) for each in passes]
        for rows in self._rows:
            if rows.waiting is None and (gradient := rows.grad) is not None:
                keys = gradient._indices()[0].cpu().numpy() | (rows.table.index << KEY_ROW_BITS)
                lookup = make_lookup(Joined.of_keys([rows.table], keys), mode="sum")
                updates.append((lookup, gradient._values().contiguous().view(1, -1)))
        train(updates)
        for rows in self._rows:
            rows.is_applied = True
            for hold in rows.holds:
                hold.let_go()

    def _set_rates(self) -> None:
        for group in self._row_groups:
            table, rate = group["params"][0].table, group["lr"]
            if table.name not in self._resumed and table.learning_rate != rate and table.state.step:
                _LOG.warning(
                    "table %r was last trained at learning rate %s, and this optimizer begins at %s: to go on where a "
                    "schedule was, load the optimizer's state, as tierstore.checkpoint.load does",
                    table.name, table.learning_rate, rate,
                )  # fmt: skip
            self._resumed.add(table.name)
            table.go_on_at(rate)

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] = (), max_norm: float = 1.0, norm_type: float = 2.0, *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:  # fmt: skip
        """``torch.nn.utils.clip_grad_norm_`` over the rows' gradients and those of other ``parameters``, as one vector;
        sparse gradients of theirs are coalesced. Returns the norm before, float32 []."""
        others = []
        for each in [parameters] if isinstance(parameters, Tensor) else list(parameters):
            if each.grad is not None and each.grad.is_sparse:
                each.grad = each.grad.coalesce()
                others.append(each.grad._values())
            elif each.grad is not None:
                others.append(each.grad)
        norm = self._total_norm(others, norm_type, error_if_nonfinite=error_if_nonfinite)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for values in (*others, *self._row_gradients()):
            values.mul_(factor.to(values.device))
        return norm

    def _row_gradients(self, chosen: Callable[[str], bool] = lambda _: True) -> list[Tensor]:
        found = [rows.grad for rows in self._rows if chosen(rows.table.name)]
        return [each._values() for each in found if each is not None]

    def _total_norm(self, others: Sequence[Tensor], norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        return torch.nn.utils.get_total_norm([*others, *self._row_gradients()], norm_type, error_if_nonfinite)


def _group(table: Any) -> dict[str, Any]:
    if table.follows is not None:
        table.learning_rate = table.learning_rate  # by its own group from here on
    content = torch.zeros((), dtype=torch.float32, device=table.store.device)
    rows = _GradAnchor(content.expand(table.config.num_rows, table.layout.dim), requires_grad=False)
    rows.table, rows.waiting, rows.is_applied, rows.holds = table, None, False, []  # no gradient of zeros
    return {"params": [rows], "lr": table.first_rate, "name": table.name, "place": table.index}


def _is_of_rows(group: dict[str, Any]) -> bool:
    params = group["params"]
    return isinstance(params, list) and bool(params) and isinstance(params[0], _GradAnchor)
