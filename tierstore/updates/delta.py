"""Making an update of a store: what changed in it since a version, read from its row file past any cache."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import optim
from ..errors import StoreNotFoundError
from ..kernels.arrays import Int64s
from ..store.directory import Opened, open_files
from ..store.manifest import Manifest
from ..store.version import NO_LINEAGE, ORIGIN_KEY, Lineage, pack, unpack, unpack_tensors
from .update_file import Origin, UpdateHeader, UpdateWriter


class Update(NamedTuple):
    """A file that was made; its ``id`` is that of its content."""

    path: Path
    id: str
    size_bytes: int
    header: UpdateHeader


class Head(NamedTuple):
    """What a store would publish, its last version, and what it can tell changes since, the lineage."""

    origin: Origin
    lineage: Lineage

    def has_grown_from(self, origin: Origin | None) -> bool:
        """Whether its version was made from this very commit, and from that of its urgent rows, as far back as the
        lineage goes."""
        own = {"", self.origin.commit_id, *(each.commit_id for each in self.lineage.ancestors)}
        return (
            origin is not None
            and origin.source == self.origin.source
            and origin.commit_id != ""
            and self.lineage.id_of(origin.version) == origin.commit_id
            and origin.urgent in own
        )


@contextlib.contextmanager
def open_source(directory: Path, version: int | None = None) -> Iterator[Opened]:
    """A store whose last version, or a kept one, is published, its tables added; it may be trained on meanwhile."""
    opened = open_files(directory, readonly=True, version=version)
    with contextlib.closing(opened.cold) as tier:
        if not tier.version:
            raise StoreNotFoundError(f"{directory}: nothing was committed yet, so there is nothing to publish")
        opened.manifest.add_tables(tier)
        yield opened


def source_of(directory: str | os.PathLike[str]) -> Head:
    """Which version a store would publish. StoreNotFoundError: none, or nothing was committed. DamagedError."""
    with open_source(Path(directory).absolute()) as (manifest, tier, _):
        return source_in(manifest, tier)


def source_in(manifest: Manifest, tier: Any) -> Head:
    lineage = unpack(tier.version, tier.payload).lineage
    return Head(Origin(manifest.store_id, tier.version, lineage.commit_id), lineage)


def write_update(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    since: int = 0,
    version: int | Opened | None = None,
    only: Int64s | None = None,
) -> Update:
    """Write what changed since a version to a file: rows, ids, tables, ``extra`` and tensors but the optimizer's.

    The rows that were written since that version are sent; if it is not in the lineage of the current one, every row
    that was ever written; then ``header.since`` is 0. The store is opened read-only and may be trained on meanwhile.
    The same call gives the same bytes. Memory: some 32 MiB, the map of the rows, 8 bytes for each row sent, and the
    dense tensors.

    Args:
        directory: the store's.
        out: the file; must not exist.
        since: the version that the receiver has; 0 if it has none.
        version: a kept one; default: the last. Or what ``open_source`` gave, which need not be kept any more.
        only: of what changed since then only these rows, keys, int64 [n], and nothing but rows: an urgent update.

    Raises:
        StoreNotFoundError: no store, or nothing was committed. ValueError: ``since`` is not below the current version.
        FileExistsError, DiskFullError. DamagedError: a row that would be sent is damaged.
    """
    directory, out = Path(directory).absolute(), Path(out).absolute()
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another name")
    source = contextlib.nullcontext(version) if isinstance(version, Opened) else open_source(directory, version)
    with source as (manifest, tier, _), contextlib.closing(UpdateWriter(out)) as writer:
        if not 0 <= since < tier.version:
            raise ValueError(
                f"since={since}: {directory} is at version {tier.version}; give an earlier one, or 0 for all"
            )
        sent, tensors, extra = unpack(tier.version, tier.payload), {}, {}
        if only is None:
            tensors = {name: each for name, each in unpack_tensors(sent).items() if not name.startswith("optimizer.")}
            extra = {key: value for key, value in sent.extra.items() if key != ORIGIN_KEY}
        writer.add_payload(pack({}, extra, tensors, NO_LINEAGE))
        origin, lineage = source_in(manifest, tier)
        since_commit_id = lineage.id_of(since)
        since = since if since_commit_id else 0
        with tier.changes(since) as changes:
            if only is not None and changes.written is not None:
                changes.written = np.intersect1d(changes.written, only)
            for index, config in enumerate(manifest.tables):
                for chunk in changes.rows(index):
                    writer.add_rows(index, config.layout(manifest.page_bytes), chunk.rows, chunk.weights)
        lookup_only: dict[str, Any] = {"optimizer": optim.SGD(), "rounding": "nearest"}  # rows without state
        header = UpdateHeader(
            origin=origin,
            since=since,
            since_commit_id=since_commit_id,
            tables=tuple(replace(config, **lookup_only) for config in manifest.tables),
            chunks=tuple(writer.chunks),
            passed=tuple(each.commit_id for each in lineage.ancestors if 0 < since < each.version),
            is_urgent=only is not None,
        )
        update_id = writer.finish(header)
    return Update(out, update_id, out.stat().st_size, header)
