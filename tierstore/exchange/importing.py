"""Files' tensors as a store's tables."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..config import MAX_KEPT_VERSIONS, Pooling, Rounding, TableConfig
from ..io.files import rows_path
from ..kernels.arrays import Floats
from ..layout import DtypeName
from ..optim import Optimizer
from ..pool.transfers import raw_weights
from ..store import Store, Table, open_store
from ..store.files import kept_if_committed
from ..store.version import TableState
from .matching import Match, Settings, match_tables, notes_of
from .rows import chunks, numbered, write_keys
from .sources import open_source


class TableImport(NamedTuple):
    name: str
    key: str
    created: bool
    """The table is new."""
    rows: int
    changed_rows: int
    """Rows that had other bits before."""
    with_state: bool
    """Optimizer state came with the weights."""
    nonfinite: int
    """Values that are NaN or infinite, in the weights as stored."""
    config: TableConfig
    notes: tuple[str, ...]
    """What was done without, or left out, of the table's rows and their optimizer state."""


class ImportReport(NamedTuple):
    """What an import did: the version that shows it, and the entries of the files that were not taken."""

    version: int
    tables: tuple[TableImport, ...]
    left_out: tuple[str, ...]


def import_files(
    directory: str | os.PathLike[str],
    files: Sequence[str | os.PathLike[str]],
    *,
    mapping: Mapping[str, str] | None = None,
    optimizer: Optimizer | None = None,
    dtype: DtypeName | None = None,
    pooling: Pooling | None = None,
    rounding: Rounding | None = None,
    ddr: int | str = "256MiB",
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Take tables from safetensors files or torch checkpoints into a store, and commit once all of it is there.

    The store is made if there is none, and so are tables that it does not have; those that it has must have as many
    columns and at least as many rows, and the dtype, and keep their configuration and their other rows. A tensor named
    ``embedding_bags.TABLE.weight``, whatever stands before that, is a table; files written by ``export_store`` say
    themselves what is. Optimizer state with the weights is taken too; without it in the file a table keeps what state
    it has. ``extra`` and tensors of the last commit stay, and so do the kept versions.

    Memory: ``ddr``, 4 bytes a row and at most 64 MiB, however large the tables are. A run cut short leaves the
    last commit as it was (and perhaps new tables, empty); repeat it from the start. One that fails leaves no new store.

    Args:
        directory: the store's.
        files: each tensor is in one of them.
        mapping: table by key; if there are any, these tensors alone are taken, with their optimizer state and ids.
            State that has another name is given as ``{KEY: "TABLE.exp_avg"}``; so are exp_avg_sq, sum, step and ids.
        optimizer: of new tables; default: what the file says, else SGD(lr=0.01).
        dtype: of the weights in the store; they are converted to it, rounded to nearest. Default: as in the file.
        pooling: of new tables; default: what the file says, else "sum".
        rounding: of training of new tables; default: what the file says, else "nearest".
        progress: called as ``progress(done_bytes, total_bytes)``.

    Raises:
        ValueError: the files hold no table, or one that cannot be taken. TableError: an existing table is another.
        FormatError: a file cannot be read. StoreLockedError: the store is open for writing elsewhere.
        DiskFullError, DamagedError, BudgetError: as ``tierstore.open`` and ``commit``.
    """
    paths = list(dict.fromkeys(Path(path).absolute() for path in files))
    settings = Settings(optimizer, dtype, pooling, rounding)
    sources = [open_source(path) for path in paths]
    # Rows leave memory, and so are appended, in the order in which they came.
    opened = partial(open_store, directory, mode="w", keep=_keep(directory), ddr=ddr, policy="lru")
    with kept_if_committed(Path(directory)), opened() as store:
        existing = {name: table.config for name, table in store.tables.items()}
        matches = match_tables(sources, mapping or {}, settings, existing)
        counts = {name: table.state.step for name, table in store.tables.items()}
        tables = [_table(store, match, match.config.name not in existing) for match in matches]
        total, done = sum(match.size_bytes for match in matches), 0

        def add(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            if progress is not None:
                progress(done, total)

        imported = [
            _import(match, table, add, match.config.name not in existing, counts.get(table.name, 0))
            for match, table in zip(matches, tables, strict=True)
        ]
        version = store.commit(extra=store.extra, tensors=store.tensors())
        taken = {key for match in matches for key in match.keys}
        left_out = tuple(key for source in sources for key in (*source.tensors, *source.others) if key not in taken)
        return ImportReport(version, tuple(imported), left_out)


def _keep(directory: str | os.PathLike[str]) -> int:
    """As many versions as are kept, and the new one."""
    if not rows_path(Path(directory)).exists():
        return 1
    with open_store(directory, mode="r") as store:
        return min(len(store.versions) + 1, MAX_KEPT_VERSIONS)


def _table(store: Store, match: Match, is_new: bool) -> Table:
    """The table, made if need be, with its count of updates and learning rate as the file has them."""
    table = store.create_table(match.config)
    if match.kept is not None and match.states:
        table.restore(match.kept)
    elif match.kept is not None and is_new:
        # Updates are counted for the sake of the state: where that begins again, so do they.
        step = 0 if table.layout.state_dim else match.kept.step
        table.restore(TableState(step, match.kept.learning_rate))
    elif match.updates is not None and match.states:
        table.restore(table.state._replace(step=match.updates))
    return table


def _import(match: Match, table: Table, add: Callable[[int], None], created: bool, count: int) -> TableImport:
    changed = nonfinite = 0
    rows = match.info.shape[0]
    for start, stop in chunks(table, rows):
        weights = match.source.read(match.key, start, stop).to(table.layout.torch_dtype).contiguous()
        nonfinite += int(torch.count_nonzero(~torch.isfinite(weights)))
        ids = [each[start:stop] for each in match.ids]
        keys = table.give_rows(*ids) if ids else numbered(table, start, stop)
        changed += write_keys(table, keys, raw_weights(weights), state_rows(match, start, stop))
        add(match.size_bytes * stop // rows - match.size_bytes * start // rows)
    notes = notes_of(match, created, count)
    return TableImport(
        table.name, match.key, created, rows, changed, bool(match.states), nonfinite, table.config, notes
    )


def state_rows(match: Match, start: int, stop: int) -> Floats | None:
    """float32 [stop - start, state_dim], or None if there is none in the files."""
    if not match.states:
        return None
    config = match.config
    state = np.empty((stop - start, config.optimizer.state_dim(config.embedding_dim)), np.float32)
    for part in match.states:
        values = part.source.read(part.key, start, stop).reshape(stop - start, -1)
        state[:, part.state.first : part.state.last] = values.numpy()
    return state
