"""Making updates of a store: what changed in it since a version, as files in a folder, which replicas pull.

A new version is offered as what changed since the one that replicas show, and as a full copy when the changes since the
last copy are larger than that. With a canary, one version is on trial at a time.

Of the changed rows servers may have the urgent ones first: new ones, then those whose change most lookups see. After
M. Sima et al., Ekko (OSDI 2022): freshness, share of requests, size of the change. Within both kinds the greatest
product of lookups, as servers counted them, and L2 norm of the change comes first. Earlier values are read from the
store, if it keeps that version (``keep=``); else all changes count alike, and no row as new.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ..layout import KEY_ROW_BITS, MAX_TABLES, RowLayout
from ..pool.converting import floats
from ..store.directory import Opened, open_files
from ..store.manifest import Manifest
from ..store.version import NO_LINEAGE, ORIGIN_KEY, Lineage, pack, unpack, unpack_tensors
from ..system.files import make_directory
from ..system.killpoints import reach
from ..system.sizes import format_size
from .fetch import Source
from .listing import MADE_NAME, MAX_FILES, Folder, Listing, Offered, way
from .update_file import Origin, UpdateHeader, UpdateWriter

_LOG: Final = logging.getLogger("tierstore.updates")
_MAX_OLDER: Final = 64
_MAX_KEY: Final = MAX_TABLES << KEY_ROW_BITS
_MAX_COUNT: Final = 1 << 50
LOOK_SECONDS: Final = 0.5


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
    """Which version an open store would publish. TierstoreError: the commit has no identity."""
    lineage = unpack(tier.version, tier.payload).lineage
    if not lineage.commit_id:
        made = f"version {tier.version} of store {manifest.store_id}"
        raise TierstoreError(f"{made} was made by an earlier release: commit once more with this one")
    return Head(Origin(manifest.store_id, tier.version, lineage.commit_id), lineage)


def write_update(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    since: int = 0,
    version: int | Opened | None = None,
    only: Int64s | None = None,
) -> Update:
    """Write what changed since a version to a file: rows, ids, tables, ``extra`` and tensors but the trainer's.

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
            every = unpack_tensors(sent).items()
            tensors = {name: each for name, each in every if not name.startswith(("optimizer.", "metrics."))}
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


class Publisher:
    """Offers the versions of a store in a folder; ``step`` takes up what is new, within ``folder.held()``.

    Args:
        folder: default: ``STORE.updates``.
        urgent: share of the changed rows that is offered first, above 0 and below 1.
        canary: whose verdict a version needs before others are to show it.
        silent_seconds: after which it is said that the canary has not decided.
        lookups: servers that say how often rows are looked up, for the choice of urgent rows.
        say: told in a line what was done.

    Raises:
        ValueError: ``urgent``.
    """

    def __init__(
        self, store: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, *,
        urgent: float | None = None, canary: Source | None = None, silent_seconds: float = 600.0,
        lookups: Sequence[Source] = (), say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        if urgent is not None and not 0 < urgent < 1:
            raise ValueError(f"urgent={urgent}: a share of the changed rows is above 0 and below 1, as 0.05")
        self._store, self._urgent = Path(store).absolute(), urgent
        self.folder = Folder(Path(folder or self._store.with_name(f"{self._store.name}.updates")).absolute())
        self._canary, self._silent_seconds, self._lookups, self._say = canary, silent_seconds, lookups, say
        self._silent_at = time.monotonic() + silent_seconds  # when it is said that a version is on trial still
        self._stop = threading.Event()

    def step(self) -> bool:
        """Hear the canary, and offer the store's version if that is a new one; whether it was. Errors as of
        ``write_update``. TierstoreError: the folder is of another store, or the commit has no identity."""
        self._hear()
        if _is_whole(self.folder.listing, self.folder.listing.trial):
            return False
        with open_source(self._store) as opened:
            return self._offer(opened)

    def run(self) -> None:
        said = ""
        while True:
            try:
                self.step()
                said = ""
            except Exception as error:  # of one commit, or of what a server answers
                if said != (said := str(error) or type(error).__name__):
                    trace = None if isinstance(error, TierstoreError | OSError | ValueError) else error
                    _LOG.warning("nothing new is published: %s", said, exc_info=trace)
            if self._stop.wait(LOOK_SECONDS):
                return

    def stop(self) -> None:
        self._stop.set()

    # The canary

    def _hear(self) -> None:
        listing = self.folder.listing
        if self._canary is not None:
            listing = listing.judged(self._canary.poll().verdicts)
        trial, target, declined = listing.trial, listing.target, listing.declined
        verdict = listing.verdict_on(trial.commit_id) if trial else None
        if target is not None and target.commit_id in declined and listing.before is not None:
            self._say(f"version {target.version} was declined: back to version {listing.before.version}")
            back, serial = listing.before, _serial(listing)
            listing, trial = replace(listing, target=back, shown=back, before=None, trial=None, serial=serial), None
        if trial is not None and (self._canary is None or (verdict is not None and verdict.is_approved)):
            self._say(f"version {trial.version} is approved")
            listing = _kept(_showing(replace(listing, trial=None), trial))
        elif trial is not None and verdict is not None:
            self._say(f"version {trial.version} is declined: {verdict.why}")
            listing = replace(listing, trial=None, serial=_serial(listing))
        elif trial is not None and self._canary is not None and time.monotonic() > self._silent_at:
            why = self._canary.error or "it has few requests, or its watch has not measured"
            told = f"no decision on version {trial.version} for {self._silent_seconds:.0f} s: {self._canary.url}: {why}"
            self._say(f"{told}. Others stay at version {target.version if target else 0}")
            self._silent_at = math.inf
        files = tuple(each for each in listing.files if each.commit_id not in declined)
        self.folder.put(replace(listing, files=files))
        reach("publish: canary heard")

    # New versions

    def _offer(self, opened: Opened) -> bool:
        listing, source = self.folder.listing, source_in(opened.manifest, opened.cold)
        target, new = listing.target, source.origin
        if target is not None and target.source != new.source:
            raise TierstoreError(f"{self.folder.path} has {target}, and this is {new}: choose another folder")
        if new.commit_id in listing.declined or (new == target and _is_whole(listing, target)):
            return False
        base, urgent = _base(listing), "" if target is None or _is_whole(listing, target) else target.commit_id
        has_grown = base is not None and base != new and source.has_grown_from(base._replace(urgent=urgent))
        since = base.version if base is not None and has_grown else 0
        if since and self._urgent and all(each.commit_id != new.commit_id for each in listing.files):
            self._offer_urgent(opened, since, new)
        made = [self._make(opened, since)] if since else []
        if not made or self._lacks_copy(made[0], base):
            made.append(self._make(opened, 0))
        reach("publish: file made")
        self._put(new, made)
        sizes = ", ".join(
            f"{format_size(each.size_bytes)} {f'since version {each.since}' if each.since else 'whole'}"
            for each in made
        )
        self._say(f"version {new.version}: {sizes}{', on trial' if self.folder.listing.trial else ''}")
        return True

    def _offer_urgent(self, opened: Opened, since: int, new: Origin) -> None:
        try:
            rows = urgent_rows(self._store, since, self._urgent or 0.0, self._counts(), opened)
            if len(rows):
                self._put(new, [self._make(opened, since, only=rows)])
                reach("publish: urgent rows offered")
        except (TierstoreError, OSError, ValueError) as error:
            _LOG.warning("no urgent rows go first: %s", error)

    def _counts(self) -> Counter[int]:
        counts = Counter[int]()
        for server in self._lookups:
            try:
                found = server.lookups()
                if not all(0 <= key < _MAX_KEY and 0 <= count < _MAX_COUNT for key, count in found.items()):
                    raise ValueError("a key or a count cannot be")
                counts.update(found)
            except Exception as error:  # it may answer anything
                _LOG.warning("lookups at %s count for nothing: %s: %s", server.url, type(error).__name__, error)
        return counts

    def _make(self, opened: Opened, since: int, **settings: Any) -> Offered:
        make_directory(self.folder.path)
        made = self.folder.path / MADE_NAME
        made.unlink(missing_ok=True)
        reminder = threading.Timer(10.0, self._say, [f"version {opened.cold.version}: its rows are being written"])
        reminder.start()
        try:
            update = write_update(self._store, made, since=since, version=opened, **settings)
        finally:
            reminder.cancel()
        os.replace(made, self.folder.path / update.id)
        return Offered.of(update.id, update.size_bytes, update.header)

    def _lacks_copy(self, made: Offered, base: Origin | None) -> bool:
        listing = self.folder.listing
        found = way(listing.files, None, base) if base else None
        if not found or base is None or base.commit_id in listing.declined:
            return True
        return made.size_bytes + sum(each.size_bytes for each in found[1:]) > found[0].size_bytes or (
            len(found) > MAX_FILES // 4
        )

    def _put(self, new: Origin, made: Iterable[Offered]) -> None:
        listing = self.folder.listing
        listing = replace(listing, files=(*listing.files, *made))
        if self._canary is None or listing.target is None:
            listing = _showing(listing, new)
        elif new not in (listing.target, listing.trial):
            listing = replace(listing, trial=new, serial=_serial(listing, new.version))
            self._silent_at = time.monotonic() + self._silent_seconds
        self.folder.put(_kept(listing))


def _serial(listing: Listing, version: int = 0) -> int:
    return max(listing.serial + 1, version << 20)


def _is_whole(listing: Listing, version: Origin | None) -> bool:
    return version is not None and any(
        each.commit_id == version.commit_id and not each.is_urgent for each in listing.files
    )


def _base(listing: Listing) -> Origin | None:
    return listing.target if listing.before is None or _is_whole(listing, listing.target) else listing.before


def _showing(listing: Listing, new: Origin) -> Listing:
    if new == listing.target:
        return listing
    return replace(listing, target=new, shown=new, before=_base(listing), serial=_serial(listing, new.version))


def _kept(listing: Listing) -> Listing:
    """Files on the way to the target from nothing, and to what is on trial; of older changes as much as a full copy."""
    files, target, trial = listing.files, listing.target, listing.trial
    path = (way(files, None, target) if target else None) or []
    ends = {each.commit_id for each in (target, trial) if each}
    kept = {each.id for each in files if each.commit_id in ends} | {each.id for each in path}
    if not path:
        return replace(listing, files=files[-MAX_FILES:])
    left, end = path[0].size_bytes, path[0].commit_id
    for _ in range(_MAX_OLDER):
        older = next((each for each in files if each.commit_id == end and each.since and not each.is_urgent), None)
        if older is None or older.size_bytes > left:
            break
        left, end = left - older.size_bytes, older.since_commit_id
        kept.add(older.id)
    return replace(listing, files=tuple(each for each in files if each.id in kept))
