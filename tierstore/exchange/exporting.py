"""A store's tables as one file: safetensors, or Parquet."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..errors import TierstoreError
from ..kernels.arrays import Int64s
from ..lookup.base import Use
from ..store import Store, Table, open_store
from ..system.checks import require_choice
from ..system.files import partial_file, require_room, write_all
from .rows import CHUNK_BYTES, chunks, numbered, read_keys
from .tensor_files import (
    DEFAULT_KEY,
    IDS,
    SCORES,
    ExportedTable,
    SafetensorsFile,
    StateTensor,
    TensorSpec,
    metadata_of,
    state_key,
    state_tensors,
    weight_keys,
)

FORMATS: Final = ("safetensors", "parquet")
_TORCH: Final = ("torch", ".pt", ".pth")
Progress = Callable[[int, int], None] | None


class ExportReport(NamedTuple):
    """What was written: ``keys`` are the file's tensors, in order, or columns; ``rows`` those of all tables."""

    path: Path
    version: int
    keys: tuple[str, ...]
    rows: int
    size_bytes: int


class _TablePlan(NamedTuple):
    table: Table
    specs: list[TensorSpec]
    states: Sequence[StateTensor]
    ids: Sequence[Int64s]
    """Of dynamic ids: int64 [rows] of those that have rows, ascending, and with state their scores."""

    @classmethod
    def of(cls, table: Table, key: str, *, with_state: bool) -> "_TablePlan":
        config, known, ids = table.config, table.ids, list[Int64s]()
        if known is not None:
            ids = [known.listed()]
            ids += [known.scores_of(ids[0])] if with_state else []
        rows = len(ids[0]) if ids else config.num_embeddings
        states = state_tensors(config.optimizer, config.embedding_dim) if with_state else ()
        dtype = torch.uint8 if table.layout.is_quantized else table.layout.torch_dtype
        specs = [TensorSpec(key, dtype, (rows, table.layout.stored_columns))]
        specs += [TensorSpec(state_key(key, each.name), torch.float32, each.shape(rows)) for each in states]
        specs += [TensorSpec(state_key(key, name), torch.int64, (rows,)) for name in (IDS, SCORES)[: len(ids)]]
        return cls(table, specs, states, ids)

    def read(self, start: int, stop: int) -> list[Any]:
        """Rows ``[start, stop)`` of each tensor."""
        table = self.table
        keys = table.keys_of(self.ids[0][start:stop], Use.READ).keys if self.ids else numbered(table, start, stop)
        rows = read_keys(table, keys)
        states = [rows.state[:, each.first : each.last].copy() for each in self.states]
        return [rows.weights, *states, *(each[start:stop] for each in self.ids)]


def export_store(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], *,
    format: str | None = None,  # noqa: A002 - the word for it
    tables: Sequence[str] | None = None, key: str = DEFAULT_KEY, state: bool = False, dense: bool = False,
    version: int | None = None, force: bool = False, ddr: int | str = "256MiB", progress: Progress = None,
) -> ExportReport:  # fmt: skip
    """Write every row of some tables, as of one version, to one file; rows never written have their first values.

    Of a table with dynamic ids the rows are those of its ids, ascending, which are int64 [rows] ``ids`` alongside.
    Quantized rows are written as they are, uint8 [rows, stored columns]. A Parquet file has one table's rows that were
    ever written, and is not imported again: ``id`` int64, ascending; ``weight``, ``embedding_dim`` float32; with
    ``state``, each state by its name. The store is opened read-only. Memory: ``ddr``, 4 bytes a row and 64 MiB.

    Args:
        out: the file; it appears when it is complete.
        format: "safetensors" or "parquet", which needs pyarrow; default: as ``out`` ends.
        tables: names; default: all.
        key: the tensors' names, ``{table}`` standing for the table's.
        state: add the optimizer state, float32, alongside each ``weight`` under the names that torch.optim uses:
            ``sum`` [rows] (row-wise Adagrad) or [rows, dim] (Adagrad); ``exp_avg``, ``exp_avg_sq`` [rows, dim] (Adam).
            Of dynamic ids also ``scores`` int64 [rows].
        dense: add the commit's tensors under their own names.
        version: which of the kept versions; default: the last.
        force: replace an existing file.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises:
        ValueError: two tensors would have one name, or a wrong argument. TableError: no such table.
        FileExistsError: ``out`` exists. DiskFullError: too little free space for it; nothing is left of it.
        StoreNotFoundError: no store, or no such version. DamagedError, BudgetError: as ``tierstore.open``.
    """
    ending = Path(out).suffix or ".safetensors"
    if (format or ending) in _TORCH:
        raise ValueError(
            f"{out}: torch checkpoints are not written. Export to a .safetensors file: safetensors.torch.load_file "
            "reads it, and torch.save of what that gives is a checkpoint"
        )
    if format is None:
        require_choice(ending, [f".{each}" for each in FORMATS], "without format=, --format, the file's ending")
    format = format or ending[1:]  # noqa: A001
    require_choice(format, FORMATS, "format")
    path = Path(out).absolute()
    with open_store(directory, mode="r", version=version, ddr=ddr) as store:
        names = list(dict.fromkeys(tables)) if tables is not None else list(store.tables)
        if format == "parquet":
            if len(names) != 1 or dense:
                raise ValueError(
                    'format="parquet" is of one table, without dense tensors: choose one with tables=, --table, of '
                    f"{', '.join(names) or 'none'}"
                )
            return _export_parquet(store[names[0]], path, state=state, force=force, progress=progress)
        keys = weight_keys(key, names)
        plans = [_TablePlan.of(store[name], keys[name], with_state=state) for name in names]
        return _export_safetensors(store, path, plans, dense=dense, force=force, progress=progress)


def _export_safetensors(
    store: Store, path: Path, plans: Sequence[_TablePlan], *, dense: bool, force: bool, progress: Progress
) -> ExportReport:
    tensors = dict(sorted(store.tensors().items())) if dense else {}
    specs = [spec for plan in plans for spec in plan.specs]
    total, done = sum(spec.size_bytes for spec in specs), 0
    specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    if not specs:
        raise ValueError(f"there is nothing to export: {store.directory} has no table")
    names = Counter(["__metadata__", *(spec.name for spec in specs)])
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"two tensors would be named {min(twice)!r}; choose other names with key, or leave one out")
    exported = {plan.specs[0].name: ExportedTable(plan.table.config, plan.table.state) for plan in plans}
    file = SafetensorsFile(specs, metadata_of(store.version, exported))
    with partial_file(path, force=force) as descriptor:
        require_room(path, file.size_bytes)
        write_all(descriptor, file.head, 0)
        for name, tensor in tensors.items():
            file.append(descriptor, name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for plan in plans:
            for start, stop in chunks(plan.table, plan.specs[0].shape[0]):
                for spec, part in zip(plan.specs, plan.read(start, stop), strict=True):
                    file.append(descriptor, spec.name, part)
                    done += part.nbytes
                if progress is not None:
                    progress(done, total)
    rows = sum(plan.specs[0].shape[0] for plan in plans)
    return ExportReport(path, store.version, tuple(spec.name for spec in specs), rows, file.size_bytes)


def _export_parquet(table: Table, path: Path, *, state: bool, force: bool, progress: Progress) -> ExportReport:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise TierstoreError(
            "format=\"parquet\" needs pyarrow; install it with: pip install 'PATH_OF_THE_CHECKOUT[parquet]'"
        ) from None
    dim, count = table.config.embedding_dim, 0
    states = state_tensors(table.config.optimizer, dim) if state else ()
    kinds = [pa.float32() if each.per_row else pa.list_(pa.float32(), each.last - each.first) for each in states]
    kinds = [pa.list_(pa.float32(), dim), *kinds]
    names = ["id", "weight", *(each.name for each in states)]
    schema = pa.schema(list(zip(names, [pa.int64(), *kinds], strict=True)))
    step = max(1, CHUNK_BYTES // (8 * (1 + dim + table.layout.state_dim)))
    with partial_file(path, force=force) as descriptor, open(descriptor, "wb", closefd=False) as file:
        with parquet.ParquetWriter(file, schema) as writer:
            for ids in (run[first : first + step] for run in table.written() for first in range(0, len(run), step)):
                parts = [table.read(ids).float().cpu()]
                if states:
                    rest = table.read_state(ids)
                    parts += [rest[:, each.first : each.last] for each in states]
                columns: list[Any] = [pa.array(ids.numpy())]
                for part, kind in zip(parts, kinds, strict=True):
                    flat = pa.array(part.contiguous().reshape(-1).numpy())
                    is_flat = pa.types.is_float32(kind)
                    columns.append(flat if is_flat else pa.FixedSizeListArray.from_arrays(flat, type=kind))
                writer.write_batch(pa.record_batch(columns, schema=schema))
                count += len(ids)
                if progress is not None:
                    done = int(ids[-1]) + 1 if table.ids is None else count
                    progress(done * table.layout.row_bytes, table.size_bytes)
        file.flush()
        size_bytes = os.fstat(descriptor).st_size
    return ExportReport(path, table.store.version, tuple(names), count, size_bytes)
