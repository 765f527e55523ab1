"""Gradients of pooled rows: collected while a backward pass runs, applied at its end, as one update a table: all of a
step's updates, or none.

Autograd runs the nodes of a pass in its own order, and may fail half way. So a node only collects the gradient of its
lookups. A callback that autograd owns holds what was collected. Autograd calls it when the whole pass succeeded; when
something failed, autograd drops it with its content. Autograd's number identifies a pass.

A reentrant checkpoint, or a hook, runs a pass within a pass. When the inner pass succeeds, its gradients go to the
outer one, so rows change when the outermost ends. Autograd does not say which pass is within which. But a checkpoint
repeats forward calls in the outer pass before the inner one begins. So the outer pass is that of the thread's last
forward call, if it has not ended.
"""

import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..system.signals import shielded
from .base import AnyLookup
from .finite import check_cause

NUMBERS: Final = itertools.count()
"""Of forward calls, ascending."""
_LOCK: Final = threading.RLock()


def train(updates: Sequence[tuple[AnyLookup, Tensor]]) -> None:
    """Make some updates, of distinct tables; the lookups are released.

    First all rows are fetched and pinned: what can fail, fails before a row changes. Only a lookup whose rows do not
    fit in memory together is trained part by part.

    Args:
        updates: lookups, each with the gradient of its output, float32 [batch, columns], C-contiguous.

    Raises:
        PartlyTrainedError: some rows were trained, or may have been, by this step or an earlier one.
        NonFiniteError: see ``finite``; of a gradient no row was trained.
        DiskFullError, DamagedError, BudgetError, MemoryError: no row was trained.
    """
    stores, ready = {table.store for lookup, _ in updates for table in lookup.tables}, []
    for store in stores:
        store.require_whole_steps()
    try:
        for lookup, gradient in updates:
            ready.append(lookup.readied(gradient))
    except BaseException as error:
        for lookup, _ in updates:
            lookup.release()
        error.add_note("No row was trained by this step: it can be repeated, from forward on.")
        for lookup, _ in updates if isinstance(error, NonFiniteError) else ():  # a row of any table may be the cause
            check_cause(lookup.joined)
        raise
    try:
        # Parts may have to wait until rows that were pinned whole are released.
        for update in sorted(ready, key=operator.attrgetter("is_whole"), reverse=True):
            update.train()
    except BaseException as error:
        for lookup, _ in updates:
            lookup.release()
        for store in stores:
            store.note_partly_trained(error)
        for store in () if isinstance(error, NonFiniteError) else stores:
            store.require_whole_steps()
        raise
    finally:
        for lookup, _ in updates:
            for hold in lookup.holds:
                hold.let_go()


def note_pass() -> int:
    """The number of the backward pass that runs this, -1 if none does; each forward call asks."""
    number = torch._C._current_graph_task_id()
    if number >= 0:
        _INNERMOST.noted = weakref.ref(_current_pass(number))
    return number


class _Collected(NamedTuple):
    number: int  # of the forward call
    lookup: AnyLookup
    gradient: Tensor  # float32 [batch, columns], C-contiguous
    stream: Any  # of CUDA, that it was made on, or None


class _Pass:
    def __init__(self, number: int, outer: "_Pass | None") -> None:
        self.number = number
        self.outer = outer  # that it is part of, if that is known
        self.collected: list[_Collected] = []

    @shielded
    def end(self) -> None:
        """Called by autograd when every node has run; the streams that its caller had as current are so again."""
        _PASSES.pop(self.number, None)
        collected, self.collected = sorted(self.collected, key=operator.attrgetter("number")), []
        if self.outer is not None and self.outer.number in _PASSES:
            self.outer.collected.extend(collected)
            return
        try:
            _update_all(collected)
        except BaseException:
            for each in collected:
                each.lookup.release()
            raise


_PASSES: Final[dict[int, weakref.ref[_Pass]]] = {}


_INNERMOST: Final = threading.local()
"""``noted``: a reference to the pass that the thread's last forward call was made in, if any; it may have ended."""


def require_engine() -> None:
    """RuntimeError if the current pass is compiled autograd's, which has no callbacks."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        raise RuntimeError(
            "rows are not trained under compiled autograd, which does not say when a pass has ended; set "
            "torch._dynamo.config.compiled_autograd = False (the model itself may be compiled)"
        )


def _current_pass(number: int) -> _Pass:
    with _LOCK:  # autograd runs nodes of one pass in several threads, one for each device
        found = _PASSES.get(number, lambda: None)()
        if found is None:
            noted = getattr(_INNERMOST, "noted", lambda: None)()
            outer = noted if noted is not None and noted.number in _PASSES else None
            found = _Pass(number, outer)
            _PASSES[number] = weakref.ref(found, partial(_PASSES.pop, number))  # which is in C, where one is dropped
            torch.autograd.Variable._execution_engine.queue_callback(found.end)
        return found


def collect(number: int, inside: int, lookups: Sequence[AnyLookup], gradients: Sequence[Tensor]) -> None:
    """Update the rows of some lookups at the end of this thread's current backward pass, if the pass succeeds. All
    lookups of a pass that share a table make one update of it, with positions in the order of the forward calls.
    They keep their rows pinned until then.

    Args:
        number: of the forward call; inside: the backward pass that it was made in, of ``note_pass``.
        gradients: float32 [batch, columns], C-contiguous, kept as they are.
    """
    into = _current_pass(torch._C._current_graph_task_id())
    outer = _PASSES.get(inside, lambda: None)()
    if outer is not None and outer is not into:
        into.outer = outer
    for lookup, gradient in zip(lookups, gradients, strict=True):
        stream = torch.cuda.current_stream(gradient.device) if gradient.is_cuda else None
        into.collected.append(_Collected(number, lookup, gradient, stream))


def _update_all(collected: Sequence[_Collected]) -> None:
    """One update of each table, of gradients in the order of forward calls; all of them, or none: see ``train``."""
    together: dict[Any, list[_Collected]] = {}
    for each in collected:  # a table has one layout and one pooling, so all its positions come together
        together.setdefault(each.lookup.group, []).append(each)
    updates = []
    for lookup, gradient in map(_merged, together.values()):
        optimizer = lookup.tables[0].store.optimizer_in_use
        if optimizer is None:
            updates.append((lookup, gradient))
        else:
            optimizer.collect(lookup, gradient)
    train(updates)
    for group in together.values():
        if len(group) > 1:
            for each in group:
                each.lookup.release()


def _merged(collected: Sequence[_Collected]) -> tuple[Any, Tensor]:
    """Of lookups of one pool and mode, one lookup and its gradient."""
    gradients = []
    for each in collected:
        gradient = each.gradient.detach()
        current = None if each.stream is None else torch.cuda.current_stream(gradient.device)
        if current is not None and current != each.stream:
            current.wait_stream(each.stream)
            gradient.record_stream(current)
        gradients.append(gradient)
    if len(collected) == 1:
        return collected[0].lookup, gradients[0]
    lookups: list[Any] = [each.lookup for each in collected]
    merged = lookups[0].merged(lookups, [gradient.shape[1] for gradient in gradients])
    return merged, torch.cat([gradient.reshape(1, -1) for gradient in gradients], dim=1)
