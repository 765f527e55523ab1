"""A whole job in one version of a store: rows, and beside them a model's weights, optimizers and schedulers.

::

    tierstore.checkpoint.save(store, model, [dense_optimizer, row_optimizer], [scheduler], extra={"step": step})
    ...
    extra = tierstore.checkpoint.load(store, model, [dense_optimizer, row_optimizer], [scheduler])

``rows`` and ``StoreVersion`` (``dcp``) have tables take part in checkpoints of ``torch.distributed.checkpoint``.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TierstoreError
from ..store import Store
from ..store.commits import PendingCommit
from ..store.version import CHECKPOINT_NAME
from .dcp import StoreVersion, rows
from .module import require_store

__all__ = ["StoreVersion", "load", "rows", "save", "save_async"]


class Stateful(Protocol):
    """An optimizer, a scheduler, a ``GradScaler``."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class Committing(Protocol):
    """A ``Store``, or the ``ShardedStore`` of each rank, which calls ``save`` and ``load`` with what is its own."""

    @property
    def version(self) -> int: ...
    @property
    def directory(self) -> Path: ...
    @property
    def extra(self) -> dict[str, Any]: ...
    @property
    def changed_tables(self) -> tuple[str, ...]: ...
    def tensors(self) -> dict[str, Tensor]: ...
    def commit(self, *, extra: dict[str, Any] | None, tensors: Mapping[str, Tensor]) -> int: ...


def save_async(
    store: Store,
    model: nn.Module,
    optimizers: Sequence[Stateful] = (),
    schedulers: Sequence[Stateful] = (),
    extra: dict[str, Any] | None = None,
) -> PendingCommit:
    """Commit rows, the state of everything given and the random numbers of torch's CPU, atomically and durably.

    Returns at once, with what ``Store.commit_async`` returns; errors as there.

    Args:
        model: whose ``state_dict()`` is kept; rows are the store's.
        optimizers, schedulers: in an order that ``load`` is given again; also others that have a state, as a
            ``GradScaler``.
        extra: as for ``Store.commit``.
    """
    _require(store, optimizers, schedulers)
    return store.commit_async(extra=extra, tensors=_packed(model, optimizers, schedulers))


def _require(store: object, optimizers: object, schedulers: object) -> None:
    """TypeError, saying what to give instead."""
    require_store(store)
    for name, objects in (("optimizers", optimizers), ("schedulers", schedulers)):
        if isinstance(objects, Mapping):
            raise TypeError(f"{name} must be a list, not a dict; what else is to be kept goes into extra=, by its name")
        if not isinstance(objects, Sequence):
            raise TypeError(f"{name} must be a list, as [{name[:-1]}], not {type(objects).__name__}")


def _packed(model: nn.Module, optimizers: Sequence[Stateful], schedulers: Sequence[Stateful]) -> dict[str, Tensor]:
    state = {
        "model": model.state_dict(),
        "optimizers": [each.state_dict() for each in optimizers],
        "schedulers": [each.state_dict() for each in schedulers],
        "rng": torch.get_rng_state(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {CHECKPOINT_NAME: torch.from_numpy(np.frombuffer(buffer.getbuffer(), np.uint8))}


def save(
    store: Committing,
    model: nn.Module,
    optimizers: Sequence[Stateful] = (),
    schedulers: Sequence[Stateful] = (),
    extra: dict[str, Any] | None = None,
) -> int:
    """As ``save_async``, and wait; returns the version's number. Collective for a ``ShardedStore``."""
    _require(store, optimizers, schedulers)
    return store.commit(extra=extra, tensors=_packed(model, optimizers, schedulers))


def load(
    store: Committing, model: nn.Module, optimizers: Sequence[Stateful] = (), schedulers: Sequence[Stateful] = ()
) -> dict[str, Any]:
    """Put everything where the store's version has it; tensors go to the devices of what they are loaded into.

    Rows are the store's, and stay. Where they changed since the commit, drop the changes by
    ``store.rollback(store.version)`` beforehand, or by opening the store again.

    Args: as for ``save_async``.

    Returns:
        ``extra`` of that version.

    Raises:
        TierstoreError: there is no commit, or ``save`` did not write it; or rows changed since. Nothing was loaded.
        ValueError: other numbers of optimizers or schedulers. Others: what ``load_state_dict`` raises.
    """
    _require(store, optimizers, schedulers)
    packed: Tensor | None = store.tensors().get(CHECKPOINT_NAME) if store.version else None
    if packed is None:
        raise TierstoreError(
            f"version {store.version} of {store.directory} has no checkpoint: it is of a store that nothing was "
            "committed to, or of Store.commit; write one with tierstore.checkpoint.save, or go back to a version that "
            "has one by store.rollback"
        )
    if store.changed_tables:
        raise TierstoreError(
            f"table {store.changed_tables[0]!r} of {store.directory} changed since version {store.version}, whose "
            "weights do not go with its rows: call store.rollback(store.version) before, which takes the rows back, or "
            "open the store again"
        )
    state = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    given = {"optimizers": optimizers, "schedulers": schedulers}
    for name, objects in given.items():
        if len(objects) != len(state[name]):
            raise ValueError(f"{len(objects)} {name} given, but the checkpoint has {len(state[name])}")
    model.load_state_dict(state["model"])
    for name, objects in given.items():
        for each, saved in zip(objects, state[name], strict=True):
            each.load_state_dict(saved)
    torch.set_rng_state(state["rng"])
    return store.extra


def model_state(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The state of the model that ``save`` wrote into a commit's tensors; of another commit, its tensors."""
    packed = tensors.get(CHECKPOINT_NAME)
    if packed is None:
        return tensors
    state: Mapping[str, Tensor] = torch.load(
        io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True
    )["model"]
    return state
