"""The autograd function behind all modules: pooled lookups forward, gradients for the fused optimizer backward."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..lookup.base import AnyLookup
from ..lookup.gradients import NUMBERS, collect, note_pass, require_engine
from ..lookup.lookup import DynamicLookup
from ..optim.curvature import OF_THREAD

_MISSED: Final = 2  # batches in turn: one may well have been left out
_NOT_TAKEN: Final = (
    "prefetch brought rows in for an object that forward was not given: it was given another one. features= must "
    "return the very object that the model passes to the module, not a copy"
)


class Padding(NamedTuple):
    """Places of the output (bool [n], on the store's device) that are one row, not trained there. Of the bits
    ``empty``, float32 [1, dim], it was never written, and gives zeros."""

    lookup: AnyLookup
    places: Tensor
    empty: Tensor

    def fill(self, out: Tensor) -> None:
        row = torch.empty((1, out.shape[1]), dtype=torch.float32, device=out.device)
        self.lookup.forward(row, keep=False)
        out[self.places] = torch.where((row == self.empty).all(), torch.zeros_like(row), row)


class Prepared:
    """Lookups ready to run, and the tensors they were made from. ``shape`` is the output's: (batch, columns); or
    (elements,), of which each lookup has a run, in order. ``features``: the object that it waits for."""

    def __init__(
        self, lookups: list[AnyLookup], shape: tuple[int, ...], scale: Tensor | None,
        sources: Sequence[Tensor | None], store: Any, padding: Padding | None = None,
    ) -> None:  # fmt: skip
        self.lookups, self.shape, self.scale, self.store, self.padding = lookups, shape, scale, store, padding
        self.features: object = None
        self.sources, self.versions = sources, list[tuple[int, int]]()

    @property
    def _all(self) -> Sequence[AnyLookup]:
        return self.lookups if self.padding is None else [*self.lookups, self.padding.lookup]

    def parts(self, out: Tensor) -> list[Tensor]:
        """What each lookup has of the output, or of its gradient: [batch, columns], views."""
        if len(self.shape) == 2:
            return [out] * len(self.lookups)
        shapes = [(lookup.joined.batch, lookup.joined.tables[0].layout.dim) for lookup in self.lookups]
        runs = torch.split(out, [bags * dim for bags, dim in shapes])
        return [run.view(shape) for run, shape in zip(runs, shapes, strict=True)]

    def has_room(self) -> bool:
        return all(lookup.has_room() for lookup in self._all)

    def stage(self) -> bool:
        """Bring in and pin the rows of each lookup that there is room for; returns whether there was for all."""
        try:
            are_in = [lookup.stage() for lookup in self._all]
        except BaseException:
            self.release()
            raise
        return all(are_in)

    def release(self) -> None:
        for lookup in self._all:
            lookup.release()


class PreparedLookups:
    """What prefetching made ready, found by the identity of the object that forward will be given, which is kept alive
    meanwhile; one that comes several times has a batch for each, in order. Ids are not compared. Several threads may
    call it: a batch is whose ``_remove`` found it."""

    def __init__(self) -> None:
        self.waiting: list[Prepared] = []
        self._num_others = self._num_missed = 0

    def put(self, features: object, prepared: Prepared) -> Prepared:
        prepared.features, prepared.versions = features, _versions(prepared.sources)
        self.waiting.append(prepared)
        return prepared

    def take(self, features: object, sources: Sequence[Tensor | None]) -> Prepared | None:
        """What was prepared for this object, once, unless torch changed its tensors since."""
        was_there = False
        for prepared in self.waiting.copy():
            if prepared.features is features and self._remove(prepared):
                was_there, self._num_others, self._num_missed = True, 0, 0
                if prepared.versions == _versions(sources):
                    return prepared
                prepared.release()  # it is stale; a later one of the same object may not be
        self._num_others += not was_there
        return None

    def _remove(self, prepared: Prepared) -> bool:
        try:
            self.waiting.remove(prepared)
        except ValueError:
            return False
        prepared.features = None
        return True

    def drop(self, ticket: Prepared) -> None:
        """Release what was prepared and not taken; warn of the second in turn for which another object came instead."""
        if self._remove(ticket):
            ticket.release()
            self._num_missed += bool(self._num_others)
            if self._num_others and self._num_missed == _MISSED:
                warnings.warn(_NOT_TAKEN, RuntimeWarning, stacklevel=2)
            self._num_others = 0


def _versions(sources: Sequence[Tensor | None]) -> list[tuple[int, int]]:
    """Which tensors these are, and how often each was changed in place; inference tensors do not count."""
    return [(id(each), 0 if each.is_inference() else each._version) for each in sources if each is not None]


def run_lookups(prepared: Prepared, anchor: Tensor, shape: Sequence[int], *, trainable: bool) -> Tensor:
    """float32 of a shape with as many elements as ``prepared.shape`` has. With ``trainable`` a backward pass trains the
    rows, unless it was asked for other gradients only. ``anchor``: a leaf that stands for the rows."""
    scale = prepared.scale
    if torch.is_grad_enabled() and (trainable or (scale is not None and scale.requires_grad)):
        start = anchor if trainable else anchor.detach()
        out: Tensor = _PooledLookups.apply(start, scale, prepared, shape, trainable)  # type: ignore[no-untyped-call]
        return out
    note_pass()
    return _forward(prepared, shape, keep=False)


def _forward(prepared: Prepared, shape: Sequence[int], *, keep: bool) -> Tensor:
    lookups, store = prepared.lookups, prepared.store
    # Not a view, which would lose hooks and refuse to be changed in place.
    made = torch.empty(shape, dtype=torch.float32, device=store.device)
    out = made if shape is prepared.shape else made.view(prepared.shape)

    def look_up() -> None:
        for lookup, part in zip(lookups, prepared.parts(out), strict=True):
            lookup.forward(part, keep=keep)
            if lookup.joined.unseen is not None:
                lookup.joined.unseen.add(part, lookup.mode)
        if prepared.padding is not None:
            prepared.padding.fill(out)

    try:
        store.shown.at_one(look_up, prepared.release)
    except BaseException:
        prepared.release()
        raise
    if store.recorder is not None:
        for _, together in itertools.groupby(lookups, key=lambda lookup: lookup.joined.batch):
            store.recorder.note_lookups([lookup.joined for lookup in together])
    return made


class _PooledLookups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, _scale: Tensor | None, prepared: Prepared, shape: Sequence[int], trainable: bool
    ) -> Tensor:
        ctx.prepared, ctx.trainable = prepared, trainable
        ctx.number, ctx.inside, ctx.evaluation = next(NUMBERS), note_pass(), OF_THREAD.evaluation
        if trainable:
            for place, each in enumerate(prepared.lookups):
                if isinstance(each, DynamicLookup):
                    prepared.lookups[place] = each.admitted()  # which gives ids rows
        if ctx.needs_input_grad[1]:
            ctx.rows_read = [(each, each.num_changes) for lookup in prepared.lookups for each in lookup.tables]
        ctx.save_for_backward(anchor)  # so that a second backward is refused, as torch refuses it
        return _forward(prepared, shape, keep=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        (anchor,) = ctx.saved_tensors
        prepared: Prepared = ctx.prepared
        gradient = grad_out.to(torch.float32).contiguous().view(prepared.shape)
        is_asked, grad_anchor = False, None
        if ctx.trainable:
            require_engine()
            try:
                is_asked = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
            except RuntimeError:  # torch.autograd.grad, which trains nothing, was given the anchor, too
                grad_anchor = torch.empty_like(anchor)
        if is_asked:
            ctx.evaluation.require(is_over=ctx.evaluation.is_over)
            for lookup in prepared.lookups:
                lookup.joined.require_trainable()  # before any table changes
        grad_scale = _scale_gradient(ctx, gradient) if ctx.needs_input_grad[1] else None
        if is_asked:
            of_rows = prepared.parts(gradient)
            for place, lookup in enumerate(prepared.lookups):
                if lookup.joined.unseen is not None:
                    of_rows[place] = lookup.joined.unseen.of_rows(of_rows[place])
            collect(ctx.number, ctx.inside, prepared.lookups, of_rows)
        else:
            prepared.release()
        return grad_anchor, grad_scale, None, None, None


def _scale_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    """Gradient of the per-sample weights. RuntimeError: the rows are not those that forward read."""
    found = torch.zeros(ctx.prepared.scale.shape, dtype=torch.float32, device="cpu")
    _require_rows_as_read(ctx)
    for each in [part for one in ctx.prepared.lookups for part in (one, one.joined.unseen) if part is not None]:
        each.scale_gradient(gradient.detach(), found.numpy())
    _require_rows_as_read(ctx)
    return found.to(ctx.prepared.scale.device)


def _require_rows_as_read(ctx: Any) -> None:
    for table, num_changes in ctx.rows_read:
        if table.num_changes != num_changes:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: rows "
                f"of table {table.name!r}, which the gradient of per_sample_weights needs as forward read them. Run "
                "backward before you write, train or roll back the table, or give weights that require no gradient"
            )
