"""A store's tables as one file."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..config import require_choice
from ..store import Store, Table, open_store
from ..system.output import partial_file, require_room
from .keys import DEFAULT_KEY, StateTensor, state_key, state_tensors, weight_keys
from .metadata import Metadata, TableMetadata
from .rows import chunks, read_rows
from .safetensors_file import SafetensorsFile
from .tensor_file import TensorFile, TensorSpec, TensorWriter
from .torch_file import TorchFile

__all__ = ["FORMATS", "ExportReport", "export_store"]

FORMATS: Final[dict[str, Callable[[Sequence[TensorSpec], dict[str, Any]], TensorFile]]] = {
    "safetensors": SafetensorsFile,
    "torch": TorchFile,
}


class ExportReport(NamedTuple):
    """What was written.

    Attributes:
        version: of the store, whose rows these are.
        keys: the file's tensors, in order.
        rows: of all tables.
    """

    path: Path
    version: int
    keys: tuple[str, ...]
    rows: int
    size_bytes: int


class _TablePlan(NamedTuple):
    """A table and where its parts go."""

    table: Table
    weight: TensorSpec
    states: tuple[tuple[StateTensor, TensorSpec], ...]

    @property
    def specs(self) -> list[TensorSpec]:
        return [self.weight, *(spec for _, spec in self.states)]


def export_store(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "safetensors",  # noqa: A002 - the word for it
    tables: Sequence[str] | None = None,
    key: str = DEFAULT_KEY,
    state: bool = False,
    dense: bool = False,
    version: int | None = None,
    force: bool = False,
    ddr: int | str = "256MiB",
    progress: Callable[[int, int], None] | None = None,
) -> ExportReport:
    """Write every row of some tables, as of one version, to one file; rows never written have their first values.

    Quantized rows are written as they are, uint8 [rows, stored columns]: what ``torch.ops.quantized`` looks up in.
    The store is opened read-only and may be trained on meanwhile. Memory: ``ddr``, 4 bytes a row and at most
    64 MiB, however large the tables are.

    Args:
        directory: the store's.
        out: the file; it appears when it is complete.
        format: "safetensors" or "torch".
        tables: names; default: all.
        key: the tensors' names, ``{table}`` standing for the table's.
        state: add the optimizer state, float32, beside each ``weight`` under the names that torch.optim uses:
            ``sum`` [rows] (row-wise Adagrad) or [rows, dim] (Adagrad); ``exp_avg``, ``exp_avg_sq`` [rows, dim] (Adam).
        dense: add the commit's tensors under their own names.
        version: which of the kept versions; default: the last.
        force: replace an existing file.
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises:
        ValueError: two tensors would have one name, or a wrong argument. TableError: no such table.
        FileExistsError: ``out`` exists. DiskFullError: there is no room for it; nothing is left of it.
        StoreNotFoundError: no store, or no such version. DamagedError, BudgetError: as ``tierstore.open``.
    """
    require_choice(format, tuple(FORMATS), "format")
    with open_store(directory, mode="r", version=version, ddr=ddr) as store:
        names = list(dict.fromkeys(tables)) if tables is not None else list(store.tables)
        keys = weight_keys(key, names)
        plans = [_plan(store[name], keys[name], state) for name in names]
        tensors = dict(sorted(store.tensors().items())) if dense else {}
        specs = [spec for plan in plans for spec in plan.specs]
        specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        if not specs:
            raise ValueError(f"there is nothing to export: {store.directory} has no table")
        _require_distinct(specs)
        plan = FORMATS[format](specs, _metadata(store, plans).to_dict())
        path = Path(out).absolute()
        with partial_file(path, force=force) as descriptor:
            require_room(path, plan.size_bytes)
            writer = TensorWriter(descriptor, plan)
            for name, tensor in tensors.items():
                writer.append(name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            _write_tables(writer, plans, progress)
            writer.finish()
        rows = sum(each.table.config.num_embeddings for each in plans)
        return ExportReport(path, store.version, tuple(spec.name for spec in specs), rows, plan.size_bytes)


def _plan(table: Table, key: str, with_state: bool) -> _TablePlan:
    config = table.config
    rows, dim = config.num_embeddings, config.embedding_dim
    states = state_tensors(config.optimizer, dim) if with_state else ()
    dtype = torch.uint8 if table.layout.is_quantized else table.layout.torch_dtype
    return _TablePlan(
        table,
        TensorSpec(key, dtype, (rows, table.layout.stored_columns)),
        tuple((each, TensorSpec(state_key(key, each.name), torch.float32, each.shape(rows))) for each in states),
    )


def _require_distinct(specs: Sequence[TensorSpec]) -> None:
    names = Counter(["__metadata__", *(spec.name for spec in specs)])
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(f"two tensors would be named {min(twice)!r}; choose other names with key, or leave one out")


def _metadata(store: Store, plans: Sequence[_TablePlan]) -> Metadata:
    return Metadata(
        store.version, tuple(TableMetadata(plan.weight.name, plan.table.config, plan.table.state) for plan in plans)
    )


def _write_tables(
    writer: TensorWriter, plans: Sequence[_TablePlan], progress: Callable[[int, int], None] | None
) -> None:
    total = sum(spec.size_bytes for plan in plans for spec in plan.specs)
    done = 0
    for plan in plans:
        for start, stop in chunks(plan.table):
            rows = read_rows(plan.table, start, stop)
            writer.append(plan.weight.name, rows.weights)
            done += rows.weights.nbytes
            for state, spec in plan.states:
                part = rows.state[:, state.first : state.last].copy()
                writer.append(spec.name, part)
                done += part.nbytes
            if progress is not None:
                progress(done, total)
