"""A whole job in one version of a store: rows, and with them a model's weights, optimizers and schedulers.

::

    tierstore.checkpoint.save(store, model, [dense_optimizer, row_optimizer], [scheduler], extra={"step": step})
    ...
    extra = tierstore.checkpoint.load(store, model, [dense_optimizer, row_optimizer], [scheduler])
    tierstore.checkpoint.load(store, model)  # the model alone, as in a process that only reads

``rows`` and ``StoreVersion`` (``dcp``) have tables take part in checkpoints of ``torch.distributed.checkpoint``.
"""

import copy
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TierstoreError
from ..store import Store
from ..store.commits import PendingCommit
from ..store.optimizer import TieredOptimizer
from ..store.version import CHECKPOINT_NAME, plain
from .dcp import StoreVersion, rows
from .module import TieredModule, require_store

__all__ = ["StoreVersion", "load", "rows", "save", "save_async"]


def save_async(
    store: Store, model: nn.Module, optimizers: Sequence[Any] = (), schedulers: Sequence[Any] = (),
    extra: dict[str, Any] | None = None,
) -> PendingCommit:  # fmt: skip
    """Commit rows, the state of everything given and the random numbers of torch's CPU, atomically and durably.

    Returns at once, with what ``Store.commit_async`` returns; errors as there.

    Args:
        model: whose ``state_dict()`` is kept; rows are the store's.
        optimizers, schedulers: in an order that ``load`` is given again; also others that have a state, as a
            ``GradScaler``.
        extra: as for ``Store.commit``.

    Raises:
        TypeError: a state has what ``load`` does not read; nothing was committed. numpy's scalars become numbers.
    """
    _require(store, optimizers, schedulers)
    if not hasattr(store, "commit_async"):
        raise TypeError("a sharded store commits with all ranks waiting: use tierstore.checkpoint.save")
    return store.commit_async(extra=extra, tensors=_packed(model, optimizers, schedulers))


def _require(store: object, optimizers: object, schedulers: object) -> None:
    require_store(store)
    for name, objects in (("optimizers", optimizers), ("schedulers", schedulers)):
        if isinstance(objects, Mapping):
            raise TypeError(f"{name} must be a list, not a dict; what else is to be kept goes into extra=, by its name")
        if not isinstance(objects, Sequence):
            raise TypeError(f"{name} must be a list, as [{name[:-1]}], not {type(objects).__name__}")


def _packed(model: nn.Module, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> dict[str, Tensor]:
    state: dict[str, Any] = plain(
        {
            "model": model.state_dict(),
            "optimizers": [each.state_dict() for each in optimizers],
            "schedulers": [each.state_dict() for each in schedulers],
            "rng": torch.get_rng_state(),
        }
    )
    try:
        saved = _saved(state)
    except Exception as error:
        raise TypeError(
            f"{_unreadable(state, '')}, which tierstore.checkpoint.load would not read, so nothing was committed. Let "
            "its state_dict hold tensors, numbers, str, and dicts, lists and tuples of these"
        ) from error
    return {CHECKPOINT_NAME: torch.from_numpy(np.frombuffer(saved, np.uint8))}


def _saved(state: Any) -> memoryview:
    """What ``torch.save`` writes. Raises what reading it does, by the rules of ``load``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, map_location="meta", weights_only=True)  # types alone: no tensor is copied
    return buffer.getbuffer()


def _unreadable(state: Any, place: str) -> str:
    parts = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, part in parts:
        try:
            _saved(part)
        except Exception:
            return _unreadable(part, f"{place}[{key!r}]" if place else str(key))
    return f"{place or 'the state'} is a {type(state).__qualname__}"


def save(
    store: Any, model: nn.Module, optimizers: Sequence[Any] = (), schedulers: Sequence[Any] = (),
    extra: dict[str, Any] | None = None,
) -> int:  # fmt: skip
    """As ``save_async``, and wait; returns the version's number. Of a ``ShardedStore``, too: collective."""
    _require(store, optimizers, schedulers)
    for module in model.modules():
        if isinstance(module, TieredModule):
            module.gather(optimizers)
    version: int = store.commit(extra=extra, tensors=_packed(model, optimizers, schedulers))
    return version


def load(
    store: Any, model: nn.Module, optimizers: Sequence[Any] | None = None, schedulers: Sequence[Any] | None = None,
    *, strict: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Put everything where the store's version has it, and return its ``extra``. Tensors go to the devices of what they
    are loaded into.

    Rows are the store's, and stay. Where they changed since the commit, drop the changes by
    ``store.rollback(store.version)`` beforehand, or by opening the store again.

    Args:
        model: as for ``save_async``.
        optimizers, schedulers: as for ``save_async``; None in a list leaves that one out. Without both, the model alone
            is loaded, and torch's random numbers go on.
        strict: of ``model.load_state_dict``.

    Raises:
        TierstoreError: there is no commit, or ``save`` did not write it; or rows changed since.
        ValueError: other numbers of optimizers or schedulers. Others: what ``load_state_dict`` raises. After any error
            everything is as it was before.
    """
    given = {"optimizers": optimizers or (), "schedulers": schedulers or ()}
    _require(store, *given.values())
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
    state = _unpacked(packed)
    is_whole = not (optimizers is None and schedulers is None and any(state[name] for name in given))
    parts: list[tuple[Any, Any]] = []
    for name, objects in given.items() if is_whole else ():
        if len(objects) != len(state[name]):
            raise ValueError(
                f"{len(objects)} {name} given, but the checkpoint has {len(state[name])}; give None for one that is "
                "not to be loaded, or the model alone"
            )
        parts += [pair for pair in zip(objects, state[name], strict=True) if pair[0] is not None]
    before = [(each, copy.deepcopy(each.state_dict())) for each in (model, *(each for each, _ in parts))]
    try:
        model.load_state_dict(state["model"], strict=strict)
        changed = []  # optimizers whose groups are other tables' than they were
        for each, saved in parts:
            if isinstance(each, TieredOptimizer):
                names, own = ([group.get("name") for group in of] for of in (saved["param_groups"], each.param_groups))
                changed += [each] * (names != own)
            each.load_state_dict(each.of_own_tables(saved) if isinstance(each, TieredOptimizer) else saved)
        for each in schedulers or ():
            _take_first_rates(each, changed)
    except BaseException:
        for each, saved in before:
            each.load_state_dict(saved)
        raise
    if is_whole:
        torch.set_rng_state(state["rng"])
    extra: dict[str, Any] = store.extra
    return extra


def _take_first_rates(scheduler: Any, changed: Sequence[Any]) -> None:
    """Have a schedule of an optimizer whose groups are other tables' than they were go by their first rates."""
    for each in getattr(scheduler, "_schedulers", ()):
        _take_first_rates(each, changed)
    optimizer: Any = getattr(scheduler, "optimizer", None)
    if hasattr(scheduler, "base_lrs") and any(optimizer is each for each in changed):
        scheduler.base_lrs = [group.get("initial_lr", group["lr"]) for group in optimizer.param_groups]


def model_state(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The state of the model that ``save`` wrote into a commit's tensors; of another commit, its tensors."""
    packed = tensors.get(CHECKPOINT_NAME)
    return tensors if packed is None else _unpacked(packed)["model"]


def _unpacked(packed: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    return state
