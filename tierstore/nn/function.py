"""The autograd function behind both modules: pooled lookups forward, fused optimizer backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hbm.lookup import HbmLookup
from ..lookup import Lookup, new_output
from ..pool import Pool
from ..store import Store

__all__ = ["Announced", "Prepared", "PreparedLookups", "run_lookups"]


class Prepared:
    """Lookups ready to run, and the tensors they were made from.

    Args:
        lookups: one or more, for disjoint columns of one output.
        batch: rows of the output.
        scale: per-sample weights, or None.
        sources: tensors whose contents the lookups depend on.
        store: whose rows they are; the output goes to its device.
    """

    def __init__(
        self,
        lookups: Sequence[Lookup | HbmLookup],
        batch: int,
        scale: Tensor | None,
        sources: Sequence[Tensor | None],
        store: Store,
    ) -> None:
        self.lookups = lookups
        self.batch = batch
        self.scale = scale
        self.store = store
        self._sources = [(source, _changes(source)) for source in sources if source is not None]

    def is_current(self, sources: Sequence[Tensor | None]) -> bool:
        """Whether it was made from these very tensors, and none was changed in place since."""
        given = [source for source in sources if source is not None]
        return len(given) == len(self._sources) and all(
            one is other and _changes(one) == version
            for one, (other, version) in zip(given, self._sources, strict=True)
        )

    def stage(self) -> None:
        """Bring the rows in and keep them pinned, as far as there is room."""
        try:
            for lookup in self.lookups:
                lookup.stage()
        except BaseException:
            self.release()
            raise

    def announce(self) -> "Announced | None":
        """Tell the pools of the rows it will use; None, and nothing is told, if a pool has no room for it yet."""
        demands = [lookup.demand for lookup in self.lookups]
        if not all(pool.can_announce(len(keys)) for pool, keys in demands):
            return None
        return Announced([(pool, pool.announce(keys)) for pool, keys in demands])

    def release(self) -> None:
        """Unpin whatever is pinned."""
        for lookup in self.lookups:
            lookup.release()


class Announced:
    """A batch that pools were told of.

    Args:
        batches: each pool with the batch's number there.
    """

    def __init__(self, batches: Sequence[tuple[Pool, int]]) -> None:
        self._batches = batches

    def retire(self) -> None:
        """It is in use, or will never be."""
        for pool, batch in self._batches:
            pool.retire(batch)


class PreparedLookups:
    """What the prefetch pipeline made ready, waiting for the forward call that will use it.

    Found by the identity of the very object that forward will be given; that object is kept alive meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[object, Prepared]] = {}

    def put(self, features: object, prepared: Prepared) -> Prepared:
        """Keep ``prepared`` for ``features``; returns the ticket for ``drop``."""
        stale = self._waiting.pop(id(features), None)
        if stale is not None:
            stale[1].release()
        self._waiting[id(features)] = (features, prepared)
        return prepared

    def take(self, features: object, sources: Sequence[Tensor | None]) -> Prepared | None:
        """What was prepared for this object, once, unless its tensors changed since."""
        found = self._waiting.pop(id(features), None)
        if found is None:
            return None
        if found[1].is_current(sources):
            return found[1]
        found[1].release()
        return None

    def drop(self, ticket: Prepared) -> None:
        """Release what was prepared and not taken."""
        for place, (_, prepared) in list(self._waiting.items()):
            if prepared is ticket:
                del self._waiting[place]
                prepared.release()


def _changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def run_lookups(prepared: Prepared, anchor: Tensor, columns: int, *, trainable: bool) -> Tensor:
    """float32 [batch, columns]. With gradients enabled and ``trainable``, backward updates the rows.

    Args:
        anchor: a tensor that requires grad, so that autograd calls backward though ids have no gradient.
        columns: columns of the output.
        trainable: whether rows may be updated; per-sample weights get their gradient in any case.
    """
    scale = prepared.scale
    if torch.is_grad_enabled() and (trainable or (scale is not None and scale.requires_grad)):
        start = anchor if trainable else anchor.detach()
        out: Tensor = _PooledLookups.apply(start, scale, prepared, columns, trainable)  # type: ignore[no-untyped-call]
        return out
    return _forward(prepared, columns, keep=False)


def _forward(prepared: Prepared, columns: int, *, keep: bool) -> Tensor:
    out = new_output(prepared.lookups, prepared.batch, columns, prepared.store.device)
    try:
        for lookup in prepared.lookups:
            lookup.forward(out, keep=keep)
    except BaseException:
        prepared.release()
        raise
    if prepared.store.recorder is not None:
        prepared.store.recorder.note_lookups([lookup.joined for lookup in prepared.lookups])
    return out


class _PooledLookups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, _scale: Tensor | None, prepared: Prepared, columns: int, trainable: bool
    ) -> Tensor:
        ctx.prepared = prepared
        ctx.trainable = trainable
        ctx.save_for_backward(anchor)  # so that a second backward is refused, as torch refuses it
        return _forward(prepared, columns, keep=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        gradient = grad_out.detach().to(torch.float32).contiguous()
        prepared: Prepared = ctx.prepared
        grad_scale = None
        if ctx.trainable:
            for lookup in prepared.lookups:
                lookup.require_trainable()  # before any table changes
        if ctx.needs_input_grad[1] and prepared.scale is not None:
            grad_scale = torch.zeros(prepared.scale.shape, dtype=torch.float32, device="cpu")
            for lookup in prepared.lookups:
                lookup.scale_gradient(gradient, grad_scale.numpy())
            grad_scale = grad_scale.to(prepared.scale.device)
        if ctx.trainable:
            for lookup in prepared.lookups:
                lookup.update(gradient)
        else:
            prepared.release()
        return None, grad_scale, None, None, None
