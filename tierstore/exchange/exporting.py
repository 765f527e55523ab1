"""A store's tables as one file."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..errors import TierstoreError
from ..kernels.arrays import Int64s
from ..lookup.tables import Use
from ..store import Store, Table, open_store
from ..system.checks import require_choice
from ..system.output import partial_file, require_room
from .keys import DEFAULT_KEY, IDS, SCORES, StateTensor, state_key, state_tensors, weight_keys
from .rows import CHUNK_BYTES, chunks, numbered, read_keys
from .sources import Metadata, TableMetadata
from .tensor_file import SafetensorsFile, TensorFile, TensorSpec, TorchFile

if TYPE_CHECKING:
    import pyarrow as pa

_ID, _WEIGHT = "id", "weight"


def write_parquet(
    table: Table, file: IO[bytes], *, state: bool, progress: Callable[[int, int], None] | None
) -> tuple[tuple[str, ...], int]:
    """Write a table's rows to a file; the names of the columns, and how many rows there are. Columns: ``id`` int64,
    ascending; ``weight``, ``embedding_dim`` float32; with ``state``, each state as ``export_store`` names it,
    float32. TierstoreError: there is no pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise TierstoreError(
            "format=\"parquet\" needs pyarrow; install it with: pip install 'PATH_OF_THE_CHECKOUT[parquet]'"
        ) from None
    dim = table.config.embedding_dim
    states = state_tensors(table.config.optimizer, dim) if state else ()
    lists = [pa.float32() if each.per_row else pa.list_(pa.float32(), each.last - each.first) for each in states]
    columns = [(_ID, pa.int64()), (_WEIGHT, pa.list_(pa.float32(), dim))]
    schema = pa.schema(columns + [(each.name, kind) for each, kind in zip(states, lists, strict=True)])
    count, total = 0, table.size_bytes
    with parquet.ParquetWriter(file, schema) as writer:
        for ids in _some(table):
            writer.write_batch(pa.record_batch(_columns(table, ids, states, schema), schema=schema))
            count += len(ids)
            if progress is not None:
                done = int(ids[-1]) + 1 if table.ids is None else count
                progress(done * table.layout.row_bytes, total)
    return tuple(schema.names), count


def _some(table: Table) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK_BYTES // (8 * (1 + table.config.embedding_dim + table.layout.state_dim)))
    for part in table.written():
        for first in range(0, len(part), step):
            yield part[first : first + step]


def _columns(table: Table, ids: torch.Tensor, states: tuple[StateTensor, ...], schema: "pa.Schema") -> list[Any]:
    import pyarrow as pa

    parts = [table.read(ids).float().cpu()]
    rest = table.read_state(ids) if states else None
    parts += [rest[:, each.first : each.last] for each in states if rest is not None]
    columns = [pa.array(ids.numpy())]
    for part, field in zip(parts, list(schema)[1:], strict=True):
        flat = pa.array(part.contiguous().reshape(-1).numpy())
        columns.append(
            flat if pa.types.is_float32(field.type) else pa.FixedSizeListArray.from_arrays(flat, type=field.type)
        )
    return columns


FORMATS: Final = {"safetensors": SafetensorsFile, "torch": TorchFile, "parquet": None}
"""What writes tensors; Parquet has rows."""
ENDINGS: Final = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".parquet": "parquet"}


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

    @property
    def num_rows(self) -> int:
        return self.specs[0].shape[0]

    def read(self, start: int, stop: int) -> list[Any]:
        """Rows ``[start, stop)`` of each tensor."""
        table = self.table
        keys = table.keys_of(self.ids[0][start:stop], Use.READ).keys if self.ids else numbered(table, start, stop)
        rows = read_keys(table, keys)
        states = [rows.state[:, state.first : state.last].copy() for state in self.states]
        return [rows.weights, *states, *(each[start:stop] for each in self.ids)]


def export_store(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word for it
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

    Of a table with dynamic ids the rows are those of its ids, ascending, which are int64 [rows] ``ids`` alongside.

    In Parquet one table has only its rows that were ever written, as ``write_parquet`` says; it is not
    imported again. Elsewhere quantized rows are written as they are, uint8 [rows, stored columns]: what
    ``torch.ops.quantized`` looks up in. The store is opened read-only and may be trained on meanwhile. Memory: ``ddr``,
    4 bytes a row and at most 64 MiB, however large the tables are.

    Args:
        directory: the store's.
        out: the file; it appears when it is complete.
        format: "safetensors", "torch" or "parquet"; default: as ``out`` ends, in .safetensors, .pt or .parquet.
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
    if format is None:
        require_choice(ending, ENDINGS, "without format=, --format, the file's ending")
    format = format or ENDINGS[ending]  # noqa: A001
    require_choice(format, tuple(FORMATS), "format")
    with open_store(directory, mode="r", version=version, ddr=ddr) as store:
        names = list(dict.fromkeys(tables)) if tables is not None else list(store.tables)
        keys = weight_keys(key, names)
        plans = [_plan(store[name], keys[name], state) for name in names]
        tensors = dict(sorted(store.tensors().items())) if dense else {}
        path, maker = Path(out).absolute(), FORMATS[format]
        if maker is None:
            return _export_rows(store, names, path, state=state, force=force, progress=progress, has_others=dense)
        specs = [spec for plan in plans for spec in plan.specs]
        specs += [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        if not specs:
            raise ValueError(f"there is nothing to export: {store.directory} has no table")
        _require_distinct(specs)
        metadata = [TableMetadata(plan.specs[0].name, plan.table.config, plan.table.state) for plan in plans]
        file: TensorFile = maker(specs, Metadata(store.version, tuple(metadata)).to_dict())
        with partial_file(path, force=force) as descriptor:
            require_room(path, file.size_bytes)
            for name, tensor in tensors.items():
                file.append(descriptor, name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            _write_tables(file, descriptor, plans, progress)
            file.finish(descriptor)
        rows = sum(each.num_rows for each in plans)
        return ExportReport(path, store.version, tuple(spec.name for spec in specs), rows, path.stat().st_size)


def _export_rows(
    store: Store,
    names: Sequence[str],
    path: Path,
    *,
    state: bool,
    force: bool,
    progress: Callable[[int, int], None] | None,
    has_others: bool,
) -> ExportReport:
    if len(names) != 1 or has_others:
        raise ValueError(
            'format="parquet" is of one table, without dense tensors: choose one with tables=, --table, of '
            f"{', '.join(names) or 'none'}"
        )
    with partial_file(path, force=force) as descriptor, open(descriptor, "wb", closefd=False) as file:
        columns, rows = write_parquet(store[names[0]], file, state=state, progress=progress)
        file.flush()
        return ExportReport(path, store.version, columns, rows, os.fstat(descriptor).st_size)


def _plan(table: Table, key: str, with_state: bool) -> _TablePlan:
    config = table.config
    known, dim = table.ids, config.embedding_dim
    listed = [] if known is None else [known.listed()]
    rows = len(listed[0]) if listed else config.num_embeddings
    scores = [known.scores_of(listed[0])] if known is not None and with_state else []
    states = state_tensors(config.optimizer, dim) if with_state else ()
    dtype = torch.uint8 if table.layout.is_quantized else table.layout.torch_dtype
    weights = TensorSpec(key, dtype, (rows, table.layout.stored_columns))
    parts = [TensorSpec(state_key(key, each.name), torch.float32, each.shape(rows)) for each in states]
    of_ids = [TensorSpec(state_key(key, name), torch.int64, (rows,)) for name in (IDS, SCORES)]
    ids = [*listed, *scores]
    return _TablePlan(table, [weights, *parts, *of_ids[: len(ids)]], states, ids)


def _require_distinct(specs: Sequence[TensorSpec]) -> None:
    names = Counter(["__metadata__", *(spec.name for spec in specs)])
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(f"two tensors would be named {min(twice)!r}; choose other names with key, or leave one out")


def _write_tables(
    file: TensorFile, descriptor: int, plans: Sequence[_TablePlan], progress: Callable[[int, int], None] | None
) -> None:
    total = sum(spec.size_bytes for plan in plans for spec in plan.specs)
    done = 0
    for plan in plans:
        for start, stop in chunks(plan.table, plan.num_rows):
            for spec, part in zip(plan.specs, plan.read(start, stop), strict=True):
                done += len(file.append(descriptor, spec.name, part))
            if progress is not None:
                progress(done, total)
