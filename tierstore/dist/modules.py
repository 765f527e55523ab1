"""Modules over tables that are sharded over ranks, their batches, and the rest of a model alongside."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Pooling
from ..lookup.base import AnyLookup
from ..nn.collection import Collection, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from ..nn.embedding import TieredEmbedding, TieredEmbeddingBag
from ..nn.function import Prepared
from ..nn.module import TieredModule, arguments_of
from ..pool.joined import Features, Jagged, Joined
from ..store import Table
from .ids import DynamicLookupOverRanks
from .lookup import DeviceRowsLookup, ReplicatedLookup, RowsLookup, ShardedLookup
from .owners import Owners, ShardedTable
from .pooled import PooledLookup
from .ranks import Ranks
from .store import ShardedStore

Batch = TypeVar("Batch")
_NO_MORE: Final[Any] = object()
_FEW_VALUES: Final = 2**16
"""Sent once to each rank, they cost less than a second exchange; between 2 ranks so many bytes cross either way."""


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
    """What ``even`` gives. An empty batch goes through the model as any does, so each rank makes every call in its
    place. ``state_dict`` and ``load_state_dict`` are those of the source, where it has them."""

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
        source, empty = iter(self._batches), self._empty
        with ranks.telling():
            batch = next(source, _NO_MORE)
            goes_on = batch is not _NO_MORE
            if empty is None and goes_on:
                empty = empty_of(batch)
        all_empty = ranks.gather((goes_on, empty), "first batch")
        if empty is None:
            empty = next((each for _, each in all_empty if each is not None), None)
        num_left = sum(rank_goes_on for rank_goes_on, _ in all_empty)
        while num_left:
            yield batch if goes_on else empty  # type: ignore[misc]
            with ranks.telling():
                batch = next(source, _NO_MORE) if goes_on else _NO_MORE
            goes_on = batch is not _NO_MORE
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


class Ahead:
    """What ``tierstore.prefetch`` drives, from its thread, for one pass over batches. Every rank's pass has as many.
    ``ranks`` are in a group that only this object uses, as its exchanges and those of forward have no order between
    them; it is released at the end."""

    is_collective = True

    def __init__(self, module: "ShardedModule", ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks
        self._is_over = False

    def begin(self, batches: Any) -> Iterator[Any]:
        """Read from batches; of ``even`` with exchanges in the pass's thread, over its ranks."""
        if not isinstance(batches, Even):
            return iter(batches)
        return self._in_pass(batches.over(self._ranks))

    def _in_pass(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._ending_for_all():
                batch = next(batches, _NO_MORE)
            if batch is _NO_MORE:
                return
            yield batch

    def prepare(self, features: Any) -> Prepared:
        """Exchange the ids of a batch; see ``TieredModule.prepare``. RuntimeError: another rank failed, or has no
        more batches."""
        with self._ending_for_all():
            prepared = self._module.prepare_by(self._ranks, *arguments_of(features))
            lookups: list[Any] = list(prepared.lookups)
            for lookup in lookups:
                lookup.route(self._ranks)
            return self._module._prepared.put(arguments_of(features)[0], prepared)

    def bring_in(self, ticket: Prepared) -> bool:
        """Bring the batch's rows in that this rank owns; see ``TieredModule.bring_in``. RuntimeError: another rank
        failed, or has no more batches."""
        with self._ending_for_all(), self._ranks.together("a prefetched batch"):
            return ticket.stage()

    @contextlib.contextmanager
    def _ending_for_all(self) -> Iterator[None]:
        """What fails within fails on all ranks."""
        try:
            yield
        except BaseException:
            self._is_over = True
            raise

    def forget(self, ticket: Prepared) -> None:
        self._module.forget(ticket)

    def end(self) -> None:
        """Tell the other ranks that there are no more batches, and wait until they have none. In the pass's thread."""
        with contextlib.suppress(RuntimeError):  # of a rank that is gone, as forward will say
            if not self._is_over:
                self._ranks.counts([0] * self._ranks.size, "no more batches")
        self._is_over = True
        self._ranks.release()


class ShardedModule(TieredModule):
    """What all have in common."""

    is_collective = True

    def own_tensors(self) -> dict[str, Tensor]:
        """By name: parameters and buffers that nothing else may average."""
        return {"rows": self.rows}

    def _pooled_directly(self, *arguments: Any) -> None:
        """Nothing: all ranks take part in each lookup."""

    @property
    def _owners(self) -> Owners:
        owners: Owners = self._store.owners
        return owners

    def _prepare(self, sources: Any, *arguments: Any) -> Prepared:  # noqa: ARG002
        return self.prepare_by(self._owners.ranks, *arguments)

    def prepare_by(self, ranks: Ranks, *arguments: Any) -> Prepared:
        """``_prepare``; if it fails, ``ranks`` reports it to the others, which begin a lookup."""
        with ranks.telling() if self._tables else contextlib.nullcontext():  # without, nothing is exchanged
            return super()._prepare(self._sources(*arguments), *arguments)  # type: ignore[safe-super]

    def _require_one_process(self, rows: Tensor) -> None:
        pass

    def ahead(self) -> Ahead:
        """Called by ``tierstore.prefetch``. Collective."""
        return Ahead(self, self._owners.ranks.twin())


class ShardedCollection(ShardedModule, Collection):
    """What collections have in common."""

    def __init__(self, store: ShardedStore, *, tables: Sequence[str] | None = None, **options: Any) -> None:
        as_one: Any = store  # it has what a module asks of a store
        super().__init__(as_one, tables=tables, **options)

    def _checked(self, *arguments: Any) -> tuple[Jagged, dict[str, int]]:
        """Ids go to their owners from the host."""
        jagged, place = super()._checked(*arguments)
        return jagged.on_host, place

    _of_rows = False  # whether owners may not pool

    def _make_lookup(self, joined: Joined, mode: str) -> AnyLookup:
        tables: list[Any] = joined.features.tables
        return _lookup(self._kind_of(tables[0]), joined, mode=mode, owners=self._owners)

    def _kind_of(self, table: ShardedTable) -> type[ShardedLookup]:
        return _kind_of(table, of_rows=self._of_rows)

    def _alike(self, table: Any) -> Any:
        return (*super()._alike(table), self._kind_of(table), table.num_parts, table.config.ids is None)


def _lookup(kind: type[ShardedLookup], joined: Joined, *, mode: str, owners: Owners) -> AnyLookup:
    if joined.has_dynamic_ids:
        return DynamicLookupOverRanks(joined, mode=mode, make=partial(kind, mode=mode, owners=owners), owners=owners)
    return kind(joined, mode=mode, owners=owners)


def _kind_of(table: ShardedTable, *, of_rows: bool) -> type[ShardedLookup]:
    """The lookup in a table's rows: pooled by owners, if they may (``of_rows``: no)."""
    if table.sharding.sharding_type == "data_parallel":
        return ReplicatedLookup
    if table.sharding.exchange == "pooled" and not of_rows:
        return PooledLookup
    return DeviceRowsLookup if table.pool.tier.on_device else RowsLookup


class _OneTable:
    """A sharded table as the modules of one table ask of it."""

    jagged = Table.jagged

    def __init__(self, store: ShardedStore, name: str, *, of_rows: bool) -> None:
        self.store: Any = store
        self._table: Any = store[name]
        self.name, self.config, self.layout = name, self._table.config, self._table.layout
        self.ids = self._table.local.ids
        self._kind = _kind_of(self._table, of_rows=of_rows)

    def lookup(self, jagged: Any, *, mode: str) -> AnyLookup:
        joined = jagged.on_host.join(Features.of([self._table], [0]), [0])
        return _lookup(self._kind, joined, mode=mode, owners=self.store.owners)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # a copied module is over the same table

    def __repr__(self) -> str:
        return repr(self._table)


class ShardedTieredEmbeddingBag(ShardedModule, TieredEmbeddingBag):
    """``TieredEmbeddingBag`` over a table, by name, of a sharded store; as ``ShardedTieredEmbeddingBagCollection``."""

    def __init__(self, store: ShardedStore, table: str, *, mode: Pooling | None = None, **options: Any) -> None:
        one: Any = _OneTable(store, table, of_rows=False)
        super().__init__(one, mode=mode, **options)


class ShardedTieredEmbedding(ShardedModule, TieredEmbedding):
    """``TieredEmbedding`` over a table, by name, of a sharded store, without ``padding_idx``."""

    def __init__(self, store: ShardedStore, table: str) -> None:
        one: Any = _OneTable(store, table, of_rows=True)
        super().__init__(one)


class ShardedTieredEmbeddingBagCollection(ShardedCollection, TieredEmbeddingBagCollection):
    """``TieredEmbeddingBagCollection`` over a sharded store; forward and backward are collective.

    Each rank gives its own part of a global batch, and gets its results. Gradients of a row are divided by the number
    of ranks and summed in order of the ranks, as ``DistributedDataParallel`` averages the rest of a model: where a
    rank's loss is the mean over its samples, rows are trained by the mean over all.
    """


class ShardedTieredEmbeddingCollection(ShardedCollection, TieredEmbeddingCollection):
    """``TieredEmbeddingCollection`` over a sharded store, as ``ShardedTieredEmbeddingBagCollection``. A table's
    ``exchange`` plays no part."""

    _of_rows = True


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel(model, **options)``, which leaves rows of sharded tables and weights of towers."""
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", []), *own_tensors(model)}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, **options)


def own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that modules over sharded tables see to, by name: rows, and the weights of towers. Leave
    their gradients out of ``average``."""
    modules = [(name, each) for name, each in model.named_modules() if isinstance(each, ShardedModule)]
    found = ((f"{prefix}.{name}", own) for prefix, each in modules for name, own in each.own_tensors().items())
    return {name.lstrip("."): own for name, own in found}


def average(tensors: Sequence[Tensor], ranks: Ranks, among: Ranks | None = None) -> None:
    """Replace tensors by their means over the ranks, in place; collective. For dense gradients between ``backward``
    and ``step``, in place of ``DistributedDataParallel``.

    A mean is the sum, in order of the ranks, of each one's value divided by their number: the same bits on all ranks
    and in each run, which gloo's own sum does not promise. Each rank sums a part, or all values if they are few.

    Args:
        tensors: float32, on the CPU, of the same shapes on all ranks.
        ranks: ``ShardedStore.ranks``.
        among: a part of the ranks, in a call of all that has begun.
    """
    size = (among or ranks).size
    with ranks.telling():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / size
        part = len(flat) if len(flat) * (size - 2) <= _FEW_VALUES else -(-len(flat) // size)
        is_whole = part == len(flat)
        sent = flat.repeat(size) if is_whole else nn.functional.pad(flat, (0, part * size - len(flat)))
    if among is None:
        ranks.counts([0] * size, f"average of {len(flat)} values")
    counts = [part] * size
    ranks.one_more()
    means, *others = ranks.exchange(sent, counts, counts, among).view(size, part)
    for each in others:
        means += each
    if not is_whole:
        ranks.one_more()
        means = ranks.exchange(means.repeat(size), counts, counts, among)
    begin = 0
    for tensor in tensors:
        tensor.copy_(means[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
