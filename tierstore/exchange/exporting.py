"""A store's tables as one safetensors file, or the rows of one table as npy, CSV or Parquet."""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from ..kernels.arrays import Floats, Int64s
from ..lookup.base import Use
from ..store import Store, Table, open_store
from ..system.checks import packages_for
from ..system.files import partial_file, require_room, write_all
from .rows import chunks, numbered, read_keys
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

Progress = Callable[[int, int], None] | None
_OF_ROWS: Final = {".npy": 4, ".csv": 2, ".parquet": 0}
"""Endings of files of rows; the fewest bytes of a value."""


class ExportReport(NamedTuple):
    """What was written: ``keys`` are the tensors of a safetensors file, in order; ``rows`` those of all tables."""

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
    directory: str | os.PathLike[str], out: str | os.PathLike[str], *, tables: Sequence[str] | None = None,
    key: str = DEFAULT_KEY, state: bool = False, dense: bool = False, version: int | None = None, force: bool = False,
    ddr: int | str = "256MiB", progress: Progress = None
) -> ExportReport:  # fmt: skip
    """Write every row of some tables, as of one version, to a file; rows never written have first values.

    Of a table with dynamic ids the rows are those of its ids, ascending, which are int64 [rows] ``ids`` alongside.
    Quantized rows are written as they are, uint8 [rows, stored columns]. The store is opened read-only. Memory:
    ``ddr``, 4 bytes a row and 64 MiB.

    Args:
        out: the file; it appears when it is complete. Its ending is .safetensors or none; or, of one table as
            float32, .npy [rows, columns], .csv with ``id``, ``c0``, ``c1``, ..., or .parquet with ``id``, ``vector``.
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
        ValueError: two tensors would have one name, or a wrong argument. TableError: no such table. ImportError.
        FileExistsError: ``out`` exists. DiskFullError: too little free space for it; nothing is left of it.
        StoreNotFoundError: no store, or no such version. DamagedError, BudgetError: as ``tierstore.open``.
    """
    if (kind := Path(out).suffix) not in ("", ".safetensors", *_OF_ROWS):
        raise ValueError(
            f"{out}: an export's name ends in .safetensors, {', '.join(_OF_ROWS)}. What safetensors.torch.load_file "
            "gives of it is a checkpoint by torch.save"
        )
    path = Path(out).absolute()
    with open_store(directory, mode="r", version=version, ddr=ddr) as store:
        names = list(dict.fromkeys(tables)) if tables is not None else list(store.tables)
        if kind in _OF_ROWS:
            is_other = state or dense or key != DEFAULT_KEY
            if len(names) != 1 or is_other or (kind == ".npy" and store[names[0]].ids is not None):
                raise ValueError(
                    f"{out}: a {kind} file has rows of one table, no key, state and dense, and .npy no dynamic ids: "
                    f"name one of {', '.join(store.tables)} (--table), or choose .safetensors"
                )
            return _export_rows(store[names[0]], path, force=force, progress=progress)
        keys = weight_keys(key, names)
        plans = [_TablePlan.of(store[name], keys[name], with_state=state) for name in names]
        return _export_safetensors(store, path, plans, dense=dense, force=force, progress=progress)


def _export_rows(table: Table, path: Path, *, force: bool, progress: Progress) -> ExportReport:
    ids = None if table.ids is None else table.ids.listed()
    rows, dim = table.config.num_embeddings if ids is None else len(ids), table.config.embedding_dim
    with row_writer(path, rows, dim, force=force) as write:
        require_room(path, _OF_ROWS[path.suffix] * rows * dim)
        for start, stop in chunks(table, rows):
            part = np.arange(start, stop) if ids is None else ids[start:stop]
            write(part, table.read(torch.from_numpy(part)).float().numpy())
            (progress or (lambda *_: None))(4 * stop * dim, 4 * rows * dim)
    return ExportReport(path, table.store.version, (), rows, path.stat().st_size)


@contextlib.contextmanager
def row_writer(path: Path, rows: int, dim: int, *, force: bool) -> Iterator[Callable[[Int64s, Any], object]]:
    """A new file, which takes ids and values of rows, in parts; None, in Parquet: null. ``rows``: of .npy, in all.
    Errors as of ``partial_file``. ImportError."""
    with partial_file(path, force=force) as descriptor, os.fdopen(os.dup(descriptor), "wb") as file:
        if path.suffix == ".npy":
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)})
            yield lambda _, values: file.write(values.tobytes())
            return
        with packages_for(str(path), "pyarrow"):
            import pyarrow as pa
            from pyarrow import csv, parquet
        is_csv, kind = path.suffix == ".csv", pa.list_(pa.float32(), dim)
        columns = {f"c{column}": pa.float32() for column in range(dim)} if is_csv else {"vector": kind}
        schema = pa.schema({"id": pa.int64()} | columns)

        def write(ids: Int64s, values: Floats | None) -> None:
            parts = [pa.nulls(len(ids), kind)] if values is None else values.T
            if values is not None and not is_csv:
                parts = [pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), dim)]
            writer.write_table(pa.table([ids, *parts], schema=schema))

        with (csv.CSVWriter if is_csv else parquet.ParquetWriter)(file, schema) as writer:
            yield write


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
