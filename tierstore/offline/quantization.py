"""An inference store from a trained one: rows in fewer bytes, without optimizer state; the version's number, extra and
tensors stay. It is made in a directory of its own within the target, verified, and moved into its place at the end.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from torch import Tensor

from .. import optim
from ..config import TableConfig
from ..errors import DamagedError, TableError
from ..io.files import ROW_FILE_NAME
from ..io.lmdb import LmdbColdTier
from ..io.reads import by_key, stored_batches
from ..layout import MAX_ROWS, DtypeName
from ..pool.converting import converted
from ..store.directory import bytes_on_device, new_store, new_tier, require_outside, verify_copy
from ..store.manifest import MANIFEST_NAME, Manifest
from ..store.version import NO_LINEAGE, TableState, pack, unpack, unpack_tensors
from ..system.checks import require_choice
from ..system.files import write_text

TARGET_DTYPES: Final[tuple[str, ...]] = tuple(name for name in get_args(DtypeName) if name != "float32")
_CHUNK_BYTES: Final = 8 << 20  # rows and optimizer state that are read at a time
WORK_NAME: Final = "quantize.partial"  # where in the target the store is made; what is in it may be deleted


class QuantizedTable(NamedTuple):
    """``rows`` are those that were ever written; the others keep their first values, quantized."""

    name: str
    dtype_before: DtypeName
    dtype: DtypeName
    rows: int


class QuantizeReport(NamedTuple):
    """``version`` is the source's; bytes are those that row files take on the device."""

    target: Path
    version: int
    tables: tuple[QuantizedTable, ...]
    bytes_before: int
    bytes_after: int


def quantize(
    directory: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: DtypeName | Mapping[str, DtypeName],
    tables: Sequence[str] | None = None, version: int | None = None, progress: Callable[[int, int], None] | None = None,
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict, files: Mapping[str, str] = MappingProxyType({}),
) -> QuantizeReport:  # fmt: skip
    """Make a store for inference: the same tables in another dtype, without optimizer state; then verify it.

    int8 and int4 rows have the bits of ``torch.ops.quantized.embedding_bag_byte_prepack`` and
    ``embedding_bag_4bit_prepack`` (but for the sign of a bias of zero, where both zeros are in the row). First values
    of rows never written are quantized when they are read, from float32 whatever dtype the source has. The source is
    opened read-only and may be trained on meanwhile. Memory: 8 bytes a row, some 32 MiB.

    Args:
        directory: the source. target: the new store's directory; must not exist, or be empty.
        dtype: "int8", "int4", "float16" or "bfloat16"; or that of each table that is converted, by name.
        tables: names of the tables to convert; default: all. The others keep their dtype.
        version: a kept one; default: the last. progress: called as ``progress(done_bytes, total_bytes)`` of rows.
        tensors: what becomes of the version's tensors. files: texts that the new store's folder holds too, by name.

    Raises, and nothing is left of the target:
        ValueError: a wrong argument; a table is quantized already; a row holds NaN or infinity, or numbers too large
            for the dtype: names table and row; the target is inside the store.
        TableError: no such table. FileExistsError: the target holds something. FileNotFoundError: there is no directory
            to make it in. DiskFullError: too little free space. TierstoreError: the system refuses to write there.
        StoreNotFoundError, DamagedError: the source is none, or not sound.
    """
    for each in [dtype] if isinstance(dtype, str) else dtype.values():
        require_choice(each, TARGET_DTYPES, "dtype")
    source, target = Path(directory).absolute(), Path(target).absolute()
    known = Manifest.read(source)
    require_outside(target, source)
    names = (ROW_FILE_NAME, *files, MANIFEST_NAME)
    opened = LmdbColdTier(source, store_id=bytes.fromhex(known.store_id), readonly=True, version=version)
    with contextlib.closing(opened) as before, new_store(target, WORK_NAME, names) as work:
        # Read once more, after the version was chosen: a writer makes a table before it commits rows of it.
        known = Manifest.read(source)
        before.set_tables(known.shapes)
        configs = _configs(known, dtype, tables)
        made = replace(Manifest.new(known.page_bytes), tables=configs, has_rows=True)
        with new_tier(work, made) as after:
            rows = _copy(known, made, before, after, tensors, progress)
        for name, text in files.items():
            write_text(work / name, text, force=True)
        made.write(work)
        if (found := verify_copy(work)[1].rows) != sum(rows):
            raise DamagedError(f"{work}: {found} rows are there and {sum(rows)} were written; try again")
        sizes = bytes_on_device(source), bytes_on_device(work)
    pairs = zip(known.tables, configs, rows, strict=True)
    done = (QuantizedTable(new.name, old.dtype, new.dtype, count) for old, new, count in pairs if not new.is_hidden)
    return QuantizeReport(target, before.version, tuple(done), *sizes)


def _configs(
    known: Manifest, dtype: DtypeName | Mapping[str, DtypeName], tables: Sequence[str] | None
) -> tuple[TableConfig, ...]:
    """The new store's tables, in the source's order: a table's place decides about the first values of its rows."""
    names = [config.name for config in known.tables if not config.is_hidden]
    chosen = dict.fromkeys(names if tables is None else tables, dtype) if isinstance(dtype, str) else dtype
    for name in chosen:
        if name not in names:
            raise TableError(f"no table {name!r}; there are {', '.join(sorted(names)) or 'none'}")
    configs = []
    for config in known.tables:
        new = chosen.get(config.name)
        if new is not None and config.layout(known.page_bytes).is_quantized:
            raise ValueError(f"table {config.name!r} is {config.dtype} already; name the others with tables=, --table")
        changes: dict[str, Any] = {} if new is None else {"dtype": new, "rounding": "nearest"}
        configs.append(replace(config, optimizer=optim.SGD(), **changes))
    return tuple(configs)


def _copy(
    known: Manifest, made: Manifest, before: LmdbColdTier, after: LmdbColdTier, tensors: Callable[[dict[str, Tensor]],
    dict[str, Tensor]], progress: Callable[[int, int], None] | None,
) -> list[int]:  # fmt: skip
    """Append stored rows to the other tier, and commit; returns how many there are of each table."""
    version, done = before.version, 0
    if not version:
        return [0] * len(known.tables)
    before_and_after = ([config.layout(each.page_bytes) for config in each.tables] for each in (known, made))
    layouts = list(zip(*before_and_after, strict=True))
    with before.lease() as (snapshot, rows):
        total = sum(int(each.arrays.live.sum()) * layout.row_bytes for layout, each in rows.segments.items())
        for old, new in dict.fromkeys(layouts):
            tables = [index for index, each in enumerate(layouts) if each == (old, new)]
            size = max(1, _CHUNK_BYTES // (old.row_bytes * new.rows_per_segment)) * new.rows_per_segment
            for found in stored_batches(snapshot, rows, by_key(rows, tables), size):
                words, bad = converted(found.weights, old, new)
                if bad >= 0:
                    table, row = divmod(int(found.keys[bad]), MAX_ROWS)
                    raise ValueError(
                        f"row {row} of table {known.tables[table].name!r} holds NaN, infinity or numbers too large for "
                        f"{new.dtype}; leave the table as it is (name the others with tables=, --table) or choose "
                        "another dtype"
                    )
                state = np.zeros((len(words), new.state_words), np.uint64)
                after.write(found.keys, found.slots, words, state, epoch=version)
                done += len(words) * old.row_bytes
                if progress is not None:
                    progress(done, total)
        counts = rows.counts()
    kept = unpack(version, before.payload)
    states = {config.name: TableState(0, config.optimizer.lr) for config in made.tables}
    after.commit(pack(states, kept.extra, tensors(unpack_tensors(kept)), NO_LINEAGE.following(0)), version)
    return counts
