"""Lookups of tables with dynamic ids: which rows a batch has is known when it is looked up, not when it is prepared."""

from collections.abc import Callable, Sequence
from functools import cached_property

from torch import Tensor

from ..kernels.arrays import Floats
from .joined import AnyLookup, Joined, Unjoined
from .tables import Found, LookupTable, Ready, RowGradients, Sought, Use


def pool_all(lookup: AnyLookup, out: Tensor, *, keep: bool) -> None:
    """``lookup.forward``, with ids that have no row where they count."""
    lookup.forward(out, keep=keep)
    if lookup.joined.unseen is not None:
        lookup.joined.unseen.add(out, lookup.mode)


class DynamicLookup(AnyLookup):
    """Of the ids that have rows, until ``admitted`` makes a lookup of one kind more. Errors as of ``Lookup``."""

    def __init__(self, batch: Unjoined, *, mode: str, make: Callable[[Joined], AnyLookup]) -> None:
        self.mode = mode
        self._batch = batch
        self._make = make

    @cached_property
    def _known(self) -> AnyLookup:
        return self._joined(Use.PREPARE)

    def _joined(self, use: Use) -> AnyLookup:
        def find(sought: Sequence[Sought]) -> Sequence[Found]:
            return [each.table.keys_of(each.ids, use) for each in sought]

        return self._make(self._batch.join(find))

    def admitted(self) -> AnyLookup:
        """A lookup whose ids were admitted, for a forward pass that trains."""
        self.release()
        return self._joined(Use.ADMIT)

    @property
    def joined(self) -> Joined:  # type: ignore[override]
        """Of the ids that have rows."""
        return self._known.joined

    @property
    def tables(self) -> Sequence[LookupTable]:
        return self._batch.features.tables

    def has_room(self) -> bool:
        return self._known.has_room()

    def stage(self) -> bool:
        return self._known.stage()

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """As ``Lookup.forward``, of the ids that have rows now: since it was prepared, rows may have got other ids."""
        self.release()
        self._known = self._joined(Use.KEEP if keep else Use.READ)
        self._known.forward(out, keep=keep)

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        self._known.scale_gradient(grad_out, grad_scale)

    def readied(self, grad_out: Tensor) -> Ready:
        return self._known.readied(grad_out)

    def gradients(self, grad_out: Tensor) -> list[RowGradients]:
        return self._known.gradients(grad_out)

    def release(self) -> None:
        """Rows are let go of. What is looked up next is looked for again: ids may have got other rows."""
        known = self.__dict__.pop("_known", None)
        if known is not None:
            known.release()
