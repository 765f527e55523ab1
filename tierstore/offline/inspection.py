"""What a store holds, and whether all of it is sound, in words for the command line."""

import contextlib
import json
import mmap
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..config import MAX_KEPT_VERSIONS, TableConfig
from ..errors import DamagedError, TierstoreError
from ..io.files import require_plain_files, rows_path
from ..io.meta import PlainTree
from ..io.records import STORE_ITEM, AnyTree, item_key, read_head, read_payload, read_record, unpack_store, version_item
from ..io.superblock import require_sound
from ..store.manifest import Manifest, parts_in
from ..store.version import RANK_KEY, Version, tensor_sizes, unpack
from ..system.sizes import format_count, format_size
from ..system.terminal import byte_bar

_MAX_EXTRA_CHARACTERS: Final = 200


class _Content(NamedTuple):
    """A store's tables, its last version, and when each that it keeps was made, or None."""

    tables: list[TableConfig]
    version: Version
    dates: dict[int, str | None]

    @classmethod
    def of(cls, tree: AnyTree, manifest: Manifest) -> "_Content":
        head = read_head(tree)
        version = unpack(head.current, read_payload(tree, read_record(tree, head.current)))
        version.require_of(manifest)
        tables = [each for each in version.manifest_of(manifest).tables if not each.is_hidden]
        seconds = {each: _seconds(tree, each) for each in head.kept[:-1]}
        seconds |= dict.fromkeys(head.kept[-1:], version.lineage.seconds)
        dates = {each: f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}" for each, at in seconds.items() if at}
        return cls(tables, version, dict.fromkeys(head.kept) | dates)


def _seconds(tree: AnyTree, version: int) -> int:
    with contextlib.suppress(DamagedError):  # a header that is longer than its first chunk
        return unpack(version, tree.get(item_key(version_item(version, 0))) or b"").lineage.seconds
    return 0


def _look(directory: Path) -> _Content:
    """By plain code, at once, if all that this looks at is sound; else by an open. Errors of ``open_files``."""
    with contextlib.suppress(TierstoreError, OSError, ValueError, IndexError, struct.error):
        require_plain_files(directory)
        manifest, path = Manifest.read(directory), rows_path(directory)
        require_sound(path, store_id := bytes.fromhex(manifest.store_id))
        with contextlib.closing(PlainTree(path)) as tree:
            content, found = _Content.of(tree, manifest), unpack_store(tree.get(item_key(STORE_ITEM)) or b"")
            is_ours = found == store_id and tree.meta.page_bytes == manifest.page_bytes
            if tree.is_whole() and is_ours and RANK_KEY not in content.version.extra:
                return content
    from ..store.directory import open_files  # numba takes a second to load

    manifest, cold, _ = open_files(directory, readonly=True)
    with contextlib.closing(cold), cold.lease_tree() as tree:
        return _Content.of(tree, manifest)


def stores_in(directory: str | Path) -> list[Path]:
    """The folder, or, of a sharded store, those of its ranks."""
    return [part.path for part in parts_in(Path(directory))] or [Path(directory)]


def to_dict(directory: str | Path) -> dict[str, Any]:
    """What ``describe`` says, for JSON. Of ranks, by part."""
    directory = Path(directory).absolute()
    if parts := parts_in(directory):
        return {"directory": str(directory), "parts": [to_dict(each.path) for each in parts]}
    tables, version, dates = _look(directory)
    tensors = tensor_sizes(version)
    return {
        "directory": str(directory),
        "version": version.number,
        "versions": [{"version": each, "date": date} for each, date in dates.items()],
        "tables": [each.to_dict() | {"size_bytes": each.size_bytes(mmap.PAGESIZE)} for each in tables],
        # Row files are sparse: what counts is what they take on the device.
        "files": {path.name: path.stat().st_blocks * 512 for path in sorted(directory.iterdir()) if path.is_file()},
        "tensors": len(tensors),
        "tensor_bytes": sum(tensors.values()),
        "extra": version.extra,
    }


def describe(directory: str | Path) -> str:
    """``describe_store``; of a sharded store, its version and that of each rank's part."""
    stores = stores_in(directory)
    described = [describe_store(each) for each in stores]
    if stores != [Path(directory)]:
        from ..store import open_store

        try:
            with open_store(directory, mode="r") as store:
                how = f"{_version_of(*store.versions)}, in {len(stores)} parts that number their own commits"
                described.insert(0, f"{store.directory}: {how}")
        except TierstoreError as error:
            described.insert(0, f"{directory}: {error}")
    return "\n\n".join(described)


def _version_of(*kept: int) -> str:
    version = f"version {kept[-1]}" if kept else "nothing committed yet"
    earlier = ", ".join(map(str, kept[:-1]))
    return version + (f" (kept too: {earlier})" if earlier else "")


def describe_store(directory: str | Path) -> str:
    """Version, tables and files of a store; opens it read-only and reads no row. StoreNotFoundError, DamagedError."""
    found = to_dict(directory)
    extra, tables, kept = json.dumps(found["extra"]), found["tables"], found["versions"]
    how = _version_of(*(each["version"] for each in kept))
    lines = [f"{found['directory']}: {how}, {format_count(len(tables), 'table')}"]
    width = max((len(each["name"]) for each in tables), default=0)
    for each in tables:
        rounding = f" rounded {each['rounding']}ally" if "rounding" in each else ""
        shape = f"{each['num_embeddings']:,} x {each['embedding_dim']} {each['dtype']}{rounding}"
        lines.append(
            f"  {each['name']:{width}}  {shape}, {each['optimizer']['kind']}{', dynamic ids' * ('ids' in each)}, "
            f"{format_size(each['size_bytes'])} if all in memory"
        )
    dated = [f"  {each['version']}  {each['date']}" for each in kept if each["date"]]
    lines += ["versions", *dated] if dated else []
    lines += ["files", *(f"  {name}  {format_size(size)} on disk" for name, size in found["files"].items())]
    if found["tensors"]:
        lines += ["dense state", f"  {format_count(found['tensors'], 'tensor')}, {format_size(found['tensor_bytes'])}"]
    if extra != "{}":
        lines += ["extra", "  " + extra[:_MAX_EXTRA_CHARACTERS] + ("..." if len(extra) > _MAX_EXTRA_CHARACTERS else "")]
    return "\n".join(lines)


def verify_store(directory: str | Path) -> str:
    """Check everything in a store, with a progress bar; returns what was checked."""
    from ..store import open_store

    with open_store(directory, mode="r") as store, byte_bar("verify") as show:
        report = store.verify(progress=show)
        if not store.version:
            return f"{store.directory}: nothing committed yet, so there are no rows to check; what is there is sound"
        rows, segments = format_count(report.rows, "row"), format_count(report.segments, "segment")
        found = f"{rows} in {segments} of {format_count(report.tables, 'table')}, {format_size(report.bytes)}"
        return f"{store.directory}: version {store.version} is sound: {found}"


def roll_back_store(directory: str | Path, version: int) -> str:
    """Make a kept version the current one. ValueError: the version is not kept; names those that are."""
    from ..store import open_store

    with open_store(directory, create=False, keep=MAX_KEPT_VERSIONS) as store:
        store.rollback(version)
        return f"{store.directory}: version {store.version} is the current one"
