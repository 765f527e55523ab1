"""What a store holds, and whether all of it is sound, in words for the command line."""

import json
import mmap
from pathlib import Path

from ..config import MAX_KEPT_VERSIONS
from ..errors import TierstoreError
from ..store import Store, open_store
from ..store.manifest import Manifest, parts_in
from ..system.sizes import format_count, format_size
from ..system.terminal import byte_bar

_MAX_EXTRA_CHARACTERS = 200


def stores_in(directory: str | Path) -> list[Path]:
    """The folder, or, of a sharded store, those of its ranks."""
    return [part.path for part in parts_in(Path(directory))] or [Path(directory)]


def describe(directory: str | Path) -> str:
    """``describe_store``; of a sharded store, its version and that of each rank's part."""
    stores = stores_in(directory)
    described = [describe_store(each) for each in stores]
    if stores != [Path(directory)]:
        try:
            with open_store(directory, mode="r") as store:
                how = f"{_version_of(store)}, in {len(stores)} parts that number their own commits"
                described.insert(0, f"{store.directory}: {how}")
        except TierstoreError as error:
            described.insert(0, f"{directory}: {error}")
    return "\n\n".join(described)


def _version_of(store: Store) -> str:
    version = f"version {store.version}" if store.version else "nothing committed yet"
    earlier = ", ".join(map(str, store.versions[:-1]))
    return version + (f" (kept too: {earlier})" if earlier else "")


def describe_store(directory: str | Path) -> str:
    """Version, tables and files of a store; opens it read-only and reads no row. StoreNotFoundError, DamagedError."""
    with open_store(directory, mode="r") as store:
        tensors = store.tensors().values()
        extra = json.dumps(store.extra)
        lines = [f"{store.directory}: {_version_of(store)}, {format_count(len(store.tables), 'table')}"]
        width = max(map(len, store.tables), default=0)
        for name, table in store.tables.items():
            config = table.config
            whole = format_size(config.size_bytes(mmap.PAGESIZE))
            rounding = "" if config.rounding == "nearest" else f" rounded {config.rounding}ally"
            lines.append(
                f"  {name:{width}}  {config.num_embeddings:,} x {config.embedding_dim} {config.dtype}{rounding}, "
                f"{config.optimizer.kind}{', dynamic ids' * (config.ids is not None)}, {whole} if all in memory"
            )
    files = sorted(path for path in Path(directory).iterdir() if path.is_file())
    # Row files are sparse: what counts is what they take on the device.
    lines += ["files", *(f"  {path.name}  {format_size(path.stat().st_blocks * 512)} on disk" for path in files)]
    if tensors:
        size = format_size(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        lines += ["dense state", f"  {format_count(len(tensors), 'tensor')}, {size}"]
    if extra != "{}":
        lines += ["extra", "  " + extra[:_MAX_EXTRA_CHARACTERS] + ("..." if len(extra) > _MAX_EXTRA_CHARACTERS else "")]
    return "\n".join(lines)


def verify_store(directory: str | Path) -> str:
    """Check everything in a store, with a progress bar; returns what was checked."""
    with open_store(directory, mode="r") as store, byte_bar("verify") as show:
        report = store.verify(progress=show)
        if not store.version:
            return f"{store.directory}: nothing committed yet, so there are no rows to check; what is there is sound"
        rows, segments = format_count(report.rows, "row"), format_count(report.segments, "segment")
        found = f"{rows} in {segments} of {format_count(report.tables, 'table')}, {format_size(report.bytes)}"
        return f"{store.directory}: version {store.version} is sound: {found}"


def roll_back_store(directory: str | Path, version: int) -> str:
    """Make a kept version the current one. ValueError: the version is not kept; names those that are."""
    Manifest.read(Path(directory))  # an open for writing would make a store where there is none
    with open_store(directory, keep=MAX_KEPT_VERSIONS) as store:
        store.rollback(version)
        return f"{store.directory}: version {store.version} is the current one"
