"""The placeholder parameter of a module's rows; it notices what torch does to gradients and would do to the rows'.

Rows that are trained in backward have no gradient that clipping, a ``GradScaler`` or an optimizer's weight decay could
change, and each pass is an update. Where torch would have applied these to rows, a warning names the way: Python shows
it once for each place.
"""

import functools
import itertools
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..store import Store

_CHANGE_GRADIENTS: Final = {
    clip_grad.__file__: "clipping does not reach them; optimizer.clip_grad_norm_(model.parameters(), max_norm) does",
    grad_scaler.__file__: "a GradScaler does not reach them, and they are trained by scaled gradients",
}
"""Files whose functions read ``grad`` of parameters to change it, with what is then wrong."""
_GRAD: Final[Any] = Tensor.grad  # torch's property, to which mypy knows no setter
_SEEN: Final = "_tierstore_seen"
"""An attribute of optimizers: by the ``id`` of a placeholder, its rows' updates as of the last step, and whether there
was more than one before that step."""


class Placeholder(nn.Parameter):
    """Without elements. See the module's docstring.

    Attributes:
        owner: gives the ``TieredModule``, while there is one.
    """

    owner: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def of(cls, module: nn.Module, *, requires_grad: bool) -> "Placeholder":
        _watch_steps()
        made = cls(torch.empty(0, dtype=torch.float32), requires_grad=requires_grad)
        made.owner = weakref.ref(module)
        return made

    @classmethod
    def in_place_of(cls, weight: nn.Parameter, given: "Placeholder") -> "Placeholder":
        """The weight itself, made a placeholder: optimizers and lists that have it go on without its old rows.
        ``given`` of a weight whose memory cannot be replaced, as on the meta device."""
        if weight.is_meta or weight.is_inference():
            return given
        weight.requires_grad_(given.requires_grad)
        if isinstance(weight, Placeholder):
            return weight
        if weight.grad is not None:
            warnings.warn("the gradient of a weight that becomes a table is dropped", RuntimeWarning, stacklevel=3)
            weight.grad = None
        weight.data = torch.empty(0, dtype=torch.float32)
        made: Any = weight
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    @property
    def grad(self) -> Tensor | None:
        reason = _CHANGE_GRADIENTS.get(sys._getframe(1).f_code.co_filename)
        if reason is not None and self.trained is not None:
            self.warn(reason)
        return super().grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @property
    def trained(self) -> Any:
        """The module, if backward trains its rows."""
        module = self.owner()
        if module is None or not self.requires_grad or not isinstance(module._store, Store):
            return None
        return None if module._store.readonly or module._store.optimizer_in_use else module

    def warn(self, reason: str) -> None:
        warnings.warn(
            f"rows of {self.owner()!r} are trained at the end of each backward pass: {reason}. With optimizer = "
            "store.optimizer(), backward collects gradients, and optimizer.step() trains rows as torch does",
            RuntimeWarning,
            stacklevel=1,  # one place, so that Python shows each text once
        )


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_at_step)


def _at_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called after each step of any optimizer. What happens at two steps in turn is a habit."""
    before: dict[int, tuple[int, bool]] | None = optimizer.__dict__.get(_SEEN)
    if before is not None and not before:
        return  # it has no rows
    seen = optimizer.__dict__.setdefault(_SEEN, {})
    for group in optimizer.param_groups:
        for each in group["params"]:
            if not isinstance(each, Placeholder):
                continue
            if not seen:
                optimizer.register_state_dict_post_hook(_with_placeholders)
            tables = [] if (module := each.trained) is None else module._tables
            updates = sum(table._step for table in tables)
            last, was_more = seen.get(id(each), (updates, False))
            is_more = updates - last > len(tables)
            seen[id(each)] = updates, is_more
            decay = group.get("weight_decay")
            if before is None and tables and decay and not any(table.config.optimizer.weight_decay for table in tables):
                name = type(optimizer).__name__
                each.warn(f"weight_decay={decay} of {name} does not reach them, as that of a tierstore.optim rule does")
            if is_more and was_more:
                each.warn("several passes before a step are several updates, not one of accumulated gradients")


def _with_placeholders(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    callers = [each.f_globals.get("__name__") for each, _ in itertools.islice(traceback.walk_stack(None), 8)]
    if "torch.distributed.checkpoint.state_dict" in callers and state_dict["state"]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for place, each in enumerate(parameters):
            if isinstance(each, Placeholder):
                state_dict["state"].setdefault(place, {})
