"""Making an update of a store: what changed in it since a version, read from its row file past any cache.

And which of the changed rows servers should have first: new ones, then those whose change most lookups see. After
M. Sima et al., Ekko (OSDI 2022): freshness, share of requests, size of the change. Within both kinds the greatest
product of lookups, as servers counted them, and L2 norm of the change comes first. Earlier values are read from the
store, if it keeps that version (``keep=``); else all changes count alike, and no row as new.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from .. import optim
from ..config import TableConfig
from ..errors import StoreNotFoundError, TierstoreError
from ..io.base import ColdTier
from ..io.reads import ChangedRows
from ..kernels.arrays import Bools, Floats, Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..pool.converting import floats
from ..store.directory import Opened, open_files
from ..store.manifest import Manifest
from ..store.version import NO_LINEAGE, ORIGIN_KEY, Lineage, pack, unpack, unpack_tensors
from .update_file import Origin, UpdateHeader, UpdateWriter

_LOG: Final = logging.getLogger("tierstore.updates")


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
        tier.set_tables(opened.manifest.shapes)
        yield opened


def source_in(manifest: Manifest, tier: Any) -> Head:
    """Which version an open store would publish."""
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


def urgent_rows(
    directory: str | os.PathLike[str], since: int, share: float, lookups: Mapping[int, int],
    version: Opened | None = None,
) -> Int64s:  # fmt: skip
    """Keys of the most urgent rows, int64 [n] ascending: that share of what changed since a version, one at least.

    Rows of tables with dynamic ids are none of them: an id may have moved, and both rows belong to one version. Memory:
    the map of the rows, twice, 17 bytes for each row that changed, and some 32 MiB. Raises as ``write_update``.

    Args:
        lookups: how often servers looked rows up, by key; of others once less than of a row with 1.
        version: as ``open_source`` gave it; default: the last.
    """
    directory, total = Path(directory).absolute(), 0
    columns: list[tuple[Int64s, Bools, Floats]] = [
        (np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.float32))
    ]
    with (
        open_source(directory) if version is None else contextlib.nullcontext(version) as (manifest, tier, _),
        _earlier(directory, since, unpack(tier.version, tier.payload).lineage) as earlier,
        tier.changes(since) as changes,
    ):
        for index, config in enumerate(manifest.tables):
            for chunk in changes.rows(index):
                total += len(chunk.rows)
                if config.ids is None and not config.is_hidden:
                    columns.append(_weigh(index, config, config.layout(manifest.page_bytes), chunk, earlier))
    keys, are_new, sizes = (np.concatenate(each) for each in zip(*columns, strict=True))
    hot, counts = np.array([*lookups.items()], np.int64).reshape(-1, 2), np.ones(len(keys))
    hot = hot[np.isin(hot[:, 0], keys)]
    counts[np.searchsorted(keys, hot[:, 0])] += hot[:, 1]
    order = np.lexsort((keys, -counts * sizes, ~are_new))
    return np.sort(keys[order[: max(1, int(share * total))]])


@contextlib.contextmanager
def _earlier(directory: Path, version: int, lineage: Lineage) -> Iterator[ColdTier | None]:
    """The store at an earlier version; None if it does not keep that."""
    with contextlib.ExitStack() as stack:
        found = None
        try:
            manifest, tier, _ = open_files(directory, readonly=True, version=version)
            stack.callback(tier.close)
            if unpack(version, tier.payload).lineage.commit_id == lineage.id_of(version):
                tier.set_tables(manifest.shapes)
                found = tier
        except TierstoreError as error:
            _LOG.warning("urgent rows are chosen by lookups alone, as earlier values are not at hand: %s", error)
        yield found


def _weigh(
    index: int, config: TableConfig, layout: RowLayout, changed: ChangedRows, earlier: ColdTier | None
) -> tuple[Int64s, Bools, Floats]:
    """Keys, whether they are new, and L2 norms of their change, float32."""
    keys, count = changed.rows | (index << KEY_ROW_BITS), len(changed.rows)
    if earlier is None:
        return keys, np.zeros(count, np.bool_), np.ones(count, np.float32)
    before, state = (np.empty((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
    present = np.empty(count, np.bool_)
    earlier.read(keys, np.arange(count, dtype=np.int32), before, state, present)
    before[~present] = config.init.rows(keys[~present], layout)
    sizes = np.linalg.norm((floats(changed.weights, layout) - floats(before, layout)).numpy(), axis=1)
    return keys, ~present, np.nan_to_num(sizes, nan=np.inf, posinf=np.inf)
