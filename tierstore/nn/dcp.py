"""Tables in checkpoints of ``torch.distributed.checkpoint``: all rows, or only which version of a store has them.

::

    state = {"model": model, "optimizer": optimizer, "tables": tierstore.checkpoint.rows(store)}
    torch.distributed.checkpoint.save(state, checkpoint_id=path)  # and load, of the same

Rows go by chunks through tensors without storage, by torch's protocol ``_Checkpointable`` (2.6 on). A writer asks for
the shards it was given and pickles each, which reads its rows. A reader narrows a shard to what it has read and
calls ``copy_``, which writes them. Every other use raises.
"""

import codecs
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import TierstoreError
from ..exchange.rows import RowValues, chunks, read_rows, write_rows
from ..exchange.tensor_files import DEFAULT_KEY, IDS, state_key, state_tensors, weight_keys
from ..pool.converting import raw_weights
from ..store import Store, Table
from ..store.table_ids import TableIds
from ..store.version import TableState

_ATEN: Final = torch.ops.aten
_WRITING: Final = threading.RLock()  # weights and state are written together, and a reader may have several threads


class _Content(NamedTuple):
    """One tensor of a table, read and written by ranges (``chunks``) of its first axis: of ``shape`` as a whole, with
    these columns here, None if it has one axis. ``write`` is given a first row and column, and values."""

    table: Table
    dtype: torch.dtype
    shape: tuple[int, ...]
    columns: range | None
    chunks: Sequence[tuple[int, int]]
    read: Callable[[int, int], Tensor]
    write: Callable[[int, int, Tensor], Any]


def rows(store: Any, *, key: str = DEFAULT_KEY) -> dict[str, Tensor]:
    """Everything of a store's tables, for ``dcp.save`` and ``dcp.load``; training goes on with the same bits.

    Each tensor is lazy: it can be saved and loaded, nothing else. Memory is a few chunks of 8 MiB (before torch 2.10
    more: it keeps what it wrote until the garbage collector runs); rows pass through the store's caches. Every row is
    saved, so any store with tables of the same names, shapes, dtypes and optimizers can load them. What is loaded is
    durable from the next commit on; where loading fails, ``store.rollback(store.version)`` undoes it.

    Of a sharded store all ranks save and load together, each what it owns; any number of ranks, and a store that is not
    sharded, can load it. Where each rank of several has a store of its own, it gives a ``key`` of its own: of equal
    names torch saves one rank's. A ``store.optimizer()`` has learning rates of its own: save and load it too.

    Args:
        store: a ``Store`` or ``ShardedStore``.
        key: the names of weights, ``{table}`` standing for the table's.

    Returns:
        of each table ``embedding_bags.TABLE.weight`` [rows, dim] of its dtype (uint8 [rows, stored columns] if rows are
        quantized); optimizer state, float32, as ``exchange.export_store`` names it; ``step`` int64 [1]; ``lr`` float64
        [1]; of dynamic ids ``ids``, int64 [rows of the table of ids, 2] as docs/format.md says, read and written whole.

    Raises:
        ValueError: ``key`` gives two tables one name.

    Loading raises, as torch wraps it: ReadOnlyError: the store was opened for reading, or rows are quantized;
    ValueError: another shape (both before anything is loaded). TypeError: another dtype. Saving and loading:
    ClosedError, DiskFullError, DamagedError. TypeError: ``dcp.async_save``, which copies tensors to memory.
    """
    keys = weight_keys(key, store.tables)
    contents = {name: each for table in store.tables.values() for name, each in _contents(table, keys[table.name])}
    return {name: _WholeTensor(each, 0, 0, each.shape) for name, each in contents.items()}


def _contents(table: Any, key: str) -> list[tuple[str, _Content]]:
    layout, num_rows = table.layout, table.config.num_embeddings
    local: Table = table.local
    if local is not table:
        table.config.require_fixed_ids("torch.distributed.checkpoint of sharded stores")
    ranges = list(chunks(local)) if table.rows else []

    def of_rows(dtype: torch.dtype, shape: tuple[int, ...], state: slice | None = None) -> _Content:
        """Weights, or these columns of the optimizer state."""
        columns = table.columns if len(shape) > 1 else None

        def part_of(rows: RowValues) -> Any:
            return rows.weights if state is None else rows.state[:, state]

        def read(start: int, stop: int) -> Tensor:
            values = torch.from_numpy(np.ascontiguousarray(part_of(read_rows(local, start, stop)))).view(dtype)
            return values if columns is not None else values.view(-1)

        def write(start: int, first: int, values: Tensor) -> None:
            own, given = read_rows(local, start, start + len(values)), raw_weights(values.view(len(values), -1))
            part_of(own)[:, first : first + given.shape[1]] = given
            write_rows(local, start, *own)

        return _Content(local, dtype, shape, columns, ranges, read, write)

    def of_number(place: int, dtype: torch.dtype) -> _Content:
        def write(_start: int, _first: int, values: Tensor) -> None:
            numbers: list[Any] = [*local.state]
            numbers[place] = values.item()
            local.restore(TableState.checked(*numbers))

        def read(*_: int) -> Tensor:
            return torch.tensor([local.state[place]], dtype=dtype)

        return _Content(local, dtype, (1,), None, [(0, 1)], read, write)

    def of_ids(known: TableIds) -> _Content:
        def write(_start: int, _first: int, values: Tensor) -> None:
            with local.store.shown.changing():
                known.restore(values.numpy().view(np.uint64))

        def read(_start: int, _stop: int) -> Tensor:
            return torch.from_numpy(known.words().view(np.int64))

        return _Content(local, torch.int64, known.shape, range(known.shape[1]), [(0, known.shape[0])], read, write)

    dtype = torch.uint8 if layout.is_quantized else layout.torch_dtype
    found = [(key, of_rows(dtype, (num_rows, layout.stored_columns)))]
    rule = table.config.optimizer
    for whole, own in zip(*(state_tensors(rule, dim) for dim in (layout.dim, local.layout.dim)), strict=True):
        state = of_rows(torch.float32, whole.shape(num_rows), slice(own.first, own.last))
        found.append((state_key(key, whole.name), state))
    if local.ids is not None:
        found.append((state_key(key, IDS), of_ids(local.ids)))
    step, rate = of_number(0, torch.int64), of_number(1, torch.float64)
    return [*found, (state_key(key, "step"), step), (state_key(key, "lr"), rate)]


class _Range(Tensor):
    """Rows from ``start`` on, columns from ``first`` on of those here, of a table's tensor: not in memory."""

    _content: _Content
    _start: int
    _first: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, content: _Content, start: int, first: int, shape: Sequence[int]) -> "_Range":
        made: _Range = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=content.dtype)
        made._content, made._start, made._first = content, start, first
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), _kwargs: Any = None) -> Tensor:  # type: ignore[override]
        own = args[0] if args else None
        if isinstance(own, _Range):
            if func is _ATEN.detach.default:
                return _Range(own._content, own._start, own._first, own.shape)
            is_narrowed = func is _ATEN.slice.Tensor and len(args) == 4 and args[3] <= own.shape[args[1]]
            if is_narrowed and (args[1] == 0 or type(own) is _Range):
                (axis, start, stop), shape, places = args[1:], list(own.shape), [own._start, own._first]
                shape[axis] = stop - start
                places[axis] += start
                return _Range(own._content, places[0], places[1], shape)
            if func is _ATEN.copy_.default:
                own._load(args[1])
                return own
        raise _refusal(func)

    def _load(self, source: Tensor) -> None:
        content = self._content
        if source.dtype != self.dtype:
            raise TypeError(
                f"the checkpoint has {source.dtype} where table {content.table.name!r} has {self.dtype}: load it into "
                "a table of that dtype"
            )
        values = source.detach().cpu().expand(self.shape)
        step = content.chunks[0][1] - content.chunks[0][0]
        for place in range(0, len(values), step):
            with _WRITING:
                content.write(self._start + place, self._first, values[place : place + step].contiguous())

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = self._content.read(self._start, self._start + len(self))
        for width in self.shape[1:]:
            values = values[:, self._first : self._first + width].contiguous()
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{list(self.shape)} {self.dtype} of {self._content.table!r}>"


class _WholeTensor(_Range):
    """All of a table's tensor, as the planners of a checkpoint ask for it. Of a sharded table a rank has its part."""

    _shards: dict[int, int]  # stop by start, those that a planner got last

    def __create_write_items__(self, fqn: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        about: dict[str, Any] = {"properties": TensorProperties(dtype=self.dtype), "size": self.size()}
        return [
            WriteItem(MetadataIndex(fqn, each.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(each, **about))
            for each in self._chunks_of(self._content.chunks)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        content = self._content
        content.table.store.require_writable()
        content.table.require_float()
        return self._chunks_of([(content.chunks[0][0], content.chunks[-1][1])] if content.chunks else [])

    def _chunks_of(self, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._shards = dict(ranges)
        rest = [] if self._content.columns is None else [self._content.columns]
        parts = ([range(start, stop), *rest] for start, stop in ranges)
        return [
            ChunkStorageMetadata(torch.Size(each.start for each in part), torch.Size(len(each) for each in part))
            for part in parts
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        start, columns = index.offset[0], self._content.columns
        shape = [self._shards[start] - start, *([] if columns is None else [len(columns)])]
        return _Range(self._content, start, 0, shape)

    def to(self, *_args: Any, **_options: Any) -> NoReturn:
        """How torch 2.6 stages a tensor for ``async_save``; the operator would leave one on the CPU as it is."""
        raise _refusal("to")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise _refusal("pickling")


def _refusal(use: Any) -> TypeError:
    return TypeError(
        f"{use} needs rows in memory, but tierstore.checkpoint.rows leaves them in the store, for save and load of "
        "torch.distributed.checkpoint. For its async_save take tierstore.checkpoint.StoreVersion; Table.read reads rows"
    )


class StoreVersion:
    """In a checkpoint, which version of a store has the rows: its number and the store's directory, but no row.

    A ``Stateful`` of ``torch.distributed.checkpoint``. Saving commits (``dcp.async_save`` before it returns); a store
    opened for reading has the version that it shows saved. Loading goes back to that version, as ``Store.rollback``
    does: later ones, and what was not committed, are dropped. The version is known by its commit's identity. So a store
    that was moved, or copied by ``Store.backup``, loads it. Each rank of several has it under a name of its own.

    Raises:
        ValueError: the store keeps one version only. A commit would drop the version of the last checkpoint while the
            new one is not yet complete.
        TypeError: it is a sharded store.
    """

    def __init__(self, store: Store) -> None:
        if not isinstance(store, Store):
            raise TypeError(
                f"StoreVersion takes no {type(store).__name__}, of which a rank cannot go back alone: save "
                "tierstore.checkpoint.rows(store), or everything in the store by tierstore.checkpoint.save"
            )
        if not store.readonly and store.keep < 2:
            raise ValueError(
                f"keep={store.keep} of {store.directory} would drop the last checkpoint's version before the next is "
                "complete: open the store with keep=2, or more for older checkpoints"
            )
        self._store = store

    def state_dict(self) -> dict[str, Any]:
        """{"version": what commits when it is pickled or copied, and becomes number, identity and directory}."""
        return {"version": _Committed(self._store)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the version saved.

        Raises:
            TierstoreError: it is no version of this store; or the store was opened for reading and shows another.
            ValueError: the version is not kept any more, or nothing was loaded. TableError: as ``Store.rollback``.
        """
        saved, store = state_dict["version"], self._store
        if not isinstance(saved, bytes | tuple):  # releases before wrote a tuple
            raise ValueError("the checkpoint has no version of a store: save a StoreVersion in it")
        version, commit_id, directory = json.loads(saved) if isinstance(saved, bytes) else saved
        if not commit_id or store.commit_id(version) != commit_id:
            raise TierstoreError(
                f"the checkpoint is of version {version} of {directory} (commit {commit_id}), which is not "
                f"among the commits of {store.directory}: open the store that it was saved from, or a backup of it"
            )
        if not store.readonly:
            store.rollback(version)
        elif store.version != version:
            raise TierstoreError(
                f"{store.directory} was opened for reading and shows version {store.version}, but the checkpoint is of "
                f'version {version}: open it with mode="r", version={version}'
            )


class _Committed:
    """Pickled or copied it commits, and is bytes of JSON, which ``torch.load(weights_only=True)`` takes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._made: list[Any] = []

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        if not self._made:  # torch may copy it more than once
            store = self._store
            version = store.version if store.readonly else store.commit()
            self._made = [version, store.commit_id(version), str(store.directory)]
        return codecs.encode, (json.dumps(self._made), "ascii")
