"""Uneven data: a rank whose batches end first goes on with empty ones, until all ranks have ended.

An empty batch goes through the model as any does, so each rank makes every call in its place; torch's ``Join`` runs one
object's hook after another's, where the exchanges of rows lie within those of ``DistributedDataParallel``.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from .ranks import Ranks
from .store import ShardedStore

Batch = TypeVar("Batch")
_NONE: Final[Any] = object()


def even(batches: Iterable[Batch], store: ShardedStore, *, empty: Batch | None = None) -> "Even[Batch]":
    """Iterate over this rank's batches, and then over empty ones until all ranks' have ended. Collective: each step
    begins with an exchange of a few bytes. ``tierstore.prefetch`` takes what this returns.

    Gradients are divided by the number of ranks throughout, those that ended included, as by
    ``DistributedDataParallel.join(divide_by_initial_world_size=True)``. A mean over no samples is NaN, and its
    gradients are zeros or empty: only the logged loss of such a batch has no value.

    Args:
        batches: of this rank, any number of them. The ranks may have different numbers.
        empty: a batch without samples. Default: a rank's first batch, or another rank's, with every tensor cut to
            ``[:0]``, in tuples, lists, mappings, dataclasses and jagged tensors; all else stays.

    Raises:
        TypeError: ``empty`` is to be given, as the batch is none of those. What ``batches`` raised; RankError on the
            other ranks. RankError: ranks make different calls, as one left the loop before its end.
    """
    return Even(batches, store.ranks, empty)


class Even(Generic[Batch]):
    """What ``even`` gives. Its ``state_dict`` and ``load_state_dict`` are those of the source, where it has them."""

    def __init__(self, batches: Iterable[Batch], ranks: Ranks, empty: Batch | None) -> None:
        self._batches = batches
        self._ranks = ranks
        self._empty = empty
        for name in ("state_dict", "load_state_dict"):
            if hasattr(batches, name):
                setattr(self, name, getattr(batches, name))

    def __iter__(self) -> Iterator[Batch]:
        return self.over(self._ranks)

    def over(self, ranks: Ranks) -> Iterator[Batch]:
        """Iterate with exchanges over these ranks, whose group no other thread uses."""
        source, empty, goes_on = iter(self._batches), self._empty, True
        with ranks.telling():
            batch = next(source, _NONE)
            goes_on = batch is not _NONE
            if empty is None and goes_on:
                empty = empty_of(batch)
        all_empty = ranks.gather((goes_on, empty), "first batch")
        if empty is None:
            empty = next((each for _, each in all_empty if each is not None), None)
        num_left = sum(rank_goes_on for rank_goes_on, _ in all_empty)
        while num_left:
            yield batch if goes_on else empty  # type: ignore[misc]
            with ranks.telling():
                batch = next(source, _NONE) if goes_on else _NONE
            goes_on = batch is not _NONE
            num_left = sum(ranks.counts([int(goes_on)] * ranks.size, "next batch"))


def empty_of(batch: Any) -> Any:
    """The batch without its samples; see ``even``. TypeError: it holds something unknown."""
    if isinstance(batch, Tensor):
        return batch[:0].clone() if batch.dim() else batch
    if isinstance(batch, int | float | str | bytes | None):
        return batch
    if isinstance(batch, Mapping):
        return {name: empty_of(each) for name, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[empty_of(each) for each in batch])
    if type(batch) in (list, tuple):
        return type(batch)([empty_of(each) for each in batch])
    if hasattr(batch, "weights_or_none"):  # jagged, of ours or of TorchRec
        names = [list(batch.keys())] if hasattr(batch, "keys") else []
        weights = batch.weights_or_none()
        lengths = torch.empty(0, dtype=torch.int64, device=batch.lengths().device)
        weights = None if weights is None else empty_of(weights)
        return type(batch)(*names, empty_of(batch.values()), weights, lengths)
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) and not isinstance(batch, type) else ()
    if fields and all(each.init for each in fields):
        return dataclasses.replace(batch, **{each.name: empty_of(getattr(batch, each.name)) for each in fields})
    raise TypeError(f"cannot tell what a {type(batch).__name__} without samples is: pass empty=, such a batch")
