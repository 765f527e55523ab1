"""A sharded store as one process reads it: a cold tier of whole tables, whose rows lie in the ranks' row files."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from ..config import TableConfig
from ..errors import ReadOnlyError, StoreNotFoundError, StoreReplacedError, TierstoreError
from ..io.base import ColdCounters, NewerVersion, VerifyReport
from ..io.lmdb import LmdbColdTier
from ..io.reads import CHUNK_BYTES, ChangedRows
from ..kernels.arrays import Bools, Int32s, Int64s, Words
from ..kernels.floats import code_of_dtype
from ..layout import KEY_ROW_BITS, MAX_ROWS, ROW_MASK, RowLayout
from ..pool.converting import RowSource
from ..store.directory import Opened
from ..store.manifest import Manifest
from ..store.version import Ancestor, Lineage, Version, repack, unpack
from .owners import whole_config
from .parts import SECTION, Commits, Source, in_common, newest_set, state_columns
from .plan import Shard, Sharding

_ATTEMPTS: Final = 10
"""To open parts before their writers drop the version that all have."""


class Piece(NamedTuple):
    """A shard of a table, and the table that its rank's store has."""

    shard: Shard
    config: TableConfig
    layout: RowLayout
    state_columns: Int64s


class Rows(NamedTuple):
    """Rows in arrays of their own, as ``ColdTier.read`` takes them."""

    weights: Words
    state: Words
    present: Bools

    @classmethod
    def read(cls, read: RowSource, layout: RowLayout, keys: Int64s) -> "Rows":
        """Zeros where there is no row."""
        weights, state = (
            np.zeros((len(keys), words), np.uint64) for words in (layout.weight_words, layout.state_words)
        )
        found = cls(weights, state, np.zeros(len(keys), np.bool_))
        read(keys, np.arange(len(keys), dtype=np.int32), *found)
        return found

    def fill_first_values(self, piece: Piece, keys: Int64s, places: Int64s) -> None:
        """Of rows that another rank wrote its columns of: this one's had the bits that they began with."""
        layout, config = piece.layout, piece.config
        weights: Any = self.weights.view(layout.numpy_dtype)
        config.init.fill(keys[places], places.astype(np.int32), weights, layout.dim, code_of_dtype(layout.dtype))
        self.state.view(np.float32)[places, : layout.state_dim] = config.optimizer.initial_state


class WholeTable(NamedTuple):
    """Reads rows of one table from the ranks that have them."""

    layout: RowLayout
    num_rows: int
    pieces: Sequence[Piece]

    def read(self, reads: Sequence[RowSource], keys: Int64s, slots: Int32s, weights: Words, state: Words) -> Bools:
        """``ColdTier.read`` by each rank's; returns ``present``."""
        rows, places = keys & ROW_MASK, list[Int64s]()
        for shard, *_ in self.pieces:
            places.append(np.flatnonzero((rows >= shard.first_row) & (rows < shard.first_row + shard.num_rows)))
        present = np.zeros(len(keys), np.bool_)
        if self.pieces[0].layout.dim < self.layout.dim:
            whole = self._read_columns(reads, keys, places, present)
            weights[slots[present]], state[slots[present]] = whole.weights[present], whole.state[present]
            return present
        for (shard, *_), own in zip(self.pieces, places, strict=True):
            here = np.zeros(len(own), np.bool_)
            reads[shard.rank](keys[own], slots[own], weights, state, here)
            present[own] = here
        return present

    def _read_columns(self, reads: Sequence[RowSource], keys: Int64s, places: Sequence[Int64s], present: Bools) -> Rows:
        """Whole rows of their columns; a row is ``present``, which is set, where a rank has some."""
        whole, parts = Rows.read(lambda *_: None, self.layout, keys), list[Rows]()
        for piece, own in zip(self.pieces, places, strict=True):
            parts.append(Rows.read(reads[piece.shard.rank], piece.layout, keys[own]))
            present[own] |= parts[-1].present
        for piece, own, part in zip(self.pieces, places, parts, strict=True):
            part.fill_first_values(piece, keys[own], np.flatnonzero(present[own] & ~part.present))
            shard, layout = piece.shard, piece.layout
            columns = np.arange(shard.first_column, shard.first_column + shard.num_columns)
            values = part.weights.view(layout.numpy_dtype)[:, : layout.dim]
            whole.weights.view(layout.numpy_dtype)[np.ix_(own, columns)] = values
            of_part = part.state.view(np.float32)[:, : layout.state_dim]
            whole.state.view(np.float32)[np.ix_(own, piece.state_columns)] = of_part
        return whole


class _Joint(NamedTuple):
    """A commit of all ranks: as that of one store, its tables' shardings, and each rank's versions by commit."""

    version: Version
    shardings: dict[str, Sharding]
    commits: list[Commits]

    @classmethod
    def of(cls, versions: Sequence[Version]) -> "_Joint | None":
        """Of each rank's version; None if they are of different commits. TierstoreError: of different runs."""
        sections = [each.extra[SECTION] for each in versions]
        if len({each["run"] for each in sections}) > 1:
            raise TierstoreError("the ranks' stores are of different runs; put the parts of one run into the folder")
        commits = [Commits.read(each.extra[SECTION], each.number) for each in versions]
        first, numbers = versions[0], [each["number"] for each in sections]
        if len({(number, own.ids.get(number)) for number, own in zip(numbers, commits, strict=True)}) > 1:
            return None
        past = []
        for each in filter(None, in_common(commits)):  # ascending
            pairs = zip(versions, commits, strict=True)
            past.append(Ancestor(each, _joint_id([own.lineage.id_of(known.versions[each]) for own, known in pairs])))
        ancestors = tuple(each for each in past if each.commit_id)
        ids, seconds = zip(*((each.lineage.commit_id, each.lineage.seconds) for each in versions), strict=True)
        lineage = Lineage(_joint_id(ids), ancestors, max(seconds))
        shardings = {name: Sharding.from_json(each, len(versions)) for name, each in commits[0].shardings.items()}
        joint = Version(numbers[0], first.tables, first.extra["extra"], first.tensors, lineage)
        return cls(joint, shardings, commits)


def _joint_id(commit_ids: Sequence[str]) -> str:
    """Of the ranks' commits; "" if one's is not known."""
    return hashlib.sha256("".join(commit_ids).encode()).hexdigest()[:16] if all(commit_ids) else ""


def _read_by(
    reads: Sequence[RowSource], tables: Mapping[int, WholeTable],
    keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools,
) -> None:  # fmt: skip
    indices = keys >> KEY_ROW_BITS
    for index in np.unique(indices).tolist():
        own = np.flatnonzero(indices == index)
        present[own] = tables[index].read(reads, keys[own], slots[own], weights, state)


class WholeTier:
    """A read-only ``ColdTier`` of whole tables. Versions are the commits that all ranks have. ``tiers``: the row files
    of the ranks' stores, in order, at the versions of one commit; this one's to close. ``shown``: that commit."""

    def __init__(self, paths: Sequence[Path], tiers: Sequence[LmdbColdTier]) -> None:
        joined = _Joint.of([unpack(each.version, each.payload) for each in tiers])
        assert joined is not None, "they are opened at the versions of one commit"
        self.page_bytes = tiers[0].page_bytes
        self.tables: dict[int, WholeTable] = {}
        self._paths = paths
        self._tiers = tiers
        self._configs: list[tuple[TableConfig, ...]] = []  # of each rank's tables
        self.shown = self._latest = joined

    def read_manifest(self) -> Manifest:
        """The whole tables' of the commit that was found last."""
        latest, run = self._latest, self._latest.commits[0].run
        self._configs = [Manifest.read(path).tables for path in self._paths]
        tables = takewhile(lambda each: each.name in latest.version.tables, self._configs[0])
        whole = [whole_config(each, self._sharding_of(index)) for index, each in enumerate(tables)]
        return Manifest(store_id=2 * run, page_bytes=self.page_bytes, tables=tuple(whole), has_rows=True)

    def _sharding_of(self, table_index: int) -> Sharding:
        """Of the commit that was found last."""
        config = self._configs[0][table_index]
        name = self._configs[0][table_index - config.is_table_of_ids].name  # ids are where their rows are
        return self._latest.shardings.get(name, Sharding("table_wise", (0,)))  # one that was begun has no rows

    # -- tables

    def _whole(self, table_index: int, layout: RowLayout, num_rows: int) -> WholeTable:
        """Of the commit that was found last."""
        pieces: dict[int, Piece] = {}
        sharding = self._sharding_of(table_index)
        for rank, configs in enumerate(self._configs):
            config = configs[table_index]
            whole = whole_config(config, sharding)
            shards = {each.rank: each for each in sharding.shards(num_rows, whole.embedding_dim)}
            if (own := shards.get(rank)) is not None:
                pieces[rank] = Piece(own, config, config.layout(self.page_bytes), state_columns(whole, own))
        ordered = [pieces[rank] for rank in sharding.ranks if rank in pieces]
        kept = ordered[:1] if sharding.sharding_type == "data_parallel" else ordered
        return WholeTable(layout, num_rows, kept)

    def set_tables(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        """Know only these of its tables; the tables of ranks do not change."""
        before = {index: (table.layout, table.num_rows) for index, table in self.tables.items()}
        try:
            self._set_tables_of_ranks(shapes)
        except BaseException:
            self._set_tables_of_ranks(before)
            raise
        made = {index: self._whole(index, *shapes[index]) for index in shapes.keys() - before.keys()}
        self.tables = {index: (made | self.tables)[index] for index in shapes}

    def _set_tables_of_ranks(self, shapes: Mapping[int, tuple[RowLayout, int]]) -> None:
        for configs, tier in zip(self._configs, self._tiers, strict=True):
            own = {index: (configs[index].layout(tier.page_bytes), num_rows) for index, (_, num_rows) in shapes.items()}
            tier.set_tables(own)

    # -- reading

    def stored_rows(self, table_index: int) -> Iterator[Int64s]:
        """Which rows of a table ``read`` finds, ascending. Ranks that have columns of one row write it together."""
        stop = 0
        for shard, *_ in self.tables[table_index].pieces:
            first, stop = stop, max(stop, shard.first_row + shard.num_rows)
            for part in self._tiers[shard.rank].stored_rows(table_index) if stop > first else ():
                if len(own := part[(part >= first) & (part < stop)]):
                    yield own

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        _read_by([tier.read for tier in self._tiers], self.tables, keys, slots, weights, state, present)

    @contextlib.contextmanager
    def changes(self, since: int) -> Iterator["WholeChanges"]:
        """What changed since a version in the lineage of the current one; 0 for all rows ever written."""
        parts = []
        for tier, commits in zip(self._tiers, self.shown.commits, strict=True):
            if since:
                with tier.changes(commits.versions[since]) as changes:
                    parts.append(changes.written)
        yield WholeChanges(self, np.unique(np.concatenate(parts)) if since else None)

    # -- versions

    @property
    def version(self) -> int:
        return self.shown.version.number

    @property
    def versions(self) -> tuple[int, ...]:
        kept = [
            commits._replace(versions={each: own for each, own in commits.versions.items() if own in tier.versions})
            for tier, commits in zip(self._tiers, self.shown.commits, strict=True)
        ]
        return tuple(filter(None, in_common(kept)))

    @property
    def last_version(self) -> int:
        return self.version

    @property
    def payload(self) -> bytes:
        return repack(self.shown.version, self.shown.version.lineage)

    def find_newer(self) -> "_NewerWhole | None":
        """A commit that all ranks have and that is the newest of each; None if there is none."""
        found = [newer for tier in self._tiers if (newer := tier.find_newer()) is not None]
        is_all = len(found) == len(self._tiers)
        joined = _Joint.of([unpack(each.version, each.payload) for each in found]) if is_all else None
        owners = {} if joined is None else joined.shardings
        is_moved = any(owners.get(name, own) != own for name, own in self.shown.shardings.items())
        if joined is None or is_moved:  # or a rank has not committed yet
            for each in found:
                each.close()
            if is_moved:
                raise StoreReplacedError(f"{self._paths[0].parent}: rows have other owners now; open the store again")
            return None
        self._latest = joined
        return _NewerWhole(self, found, joined)

    def write(self, *_arguments: Any, **_more: Any) -> NoReturn:
        """Raises ReadOnlyError."""
        raise ReadOnlyError(f"{self._paths[0].parent}: a sharded store is written by its ranks: open_sharded")

    commit = rollback = write

    # -- checking and counting

    def verify(self, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every row of all ranks' row files, one after another."""
        done = [tier.verify(progress) for tier in self._tiers]
        _, *totals = (sum(column) for column in zip(*done, strict=True))
        return VerifyReport(max(each.tables for each in done), *totals)

    def counters(self) -> ColdCounters:
        return ColdCounters(*(sum(column) for column in zip(*(tier.counters() for tier in self._tiers), strict=True)))

    @property
    def held_bytes(self) -> int:
        return sum(tier.held_bytes for tier in self._tiers)

    @property
    def map_bytes(self) -> int:
        return sum(tier.map_bytes for tier in self._tiers)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for tier in self._tiers:
                stack.callback(tier.close)


class _NewerWhole(NamedTuple):
    tier: WholeTier
    found: Sequence[NewerVersion]
    joined: _Joint

    @property
    def version(self) -> int:
        return self.joined.version.number

    @property
    def payload(self) -> bytes:
        return repack(self.joined.version, self.joined.version.lineage)

    @property
    def changed(self) -> Int64s:
        return np.unique(np.concatenate([each.changed for each in self.found]))

    def read(self, keys: Int64s, slots: Int32s, weights: Words, state: Words, present: Bools) -> None:
        _read_by([each.read for each in self.found], self.tier.tables, keys, slots, weights, state, present)

    def show(self) -> None:
        for each in self.found:
            each.show()
        self.tier.shown = self.joined

    def close(self) -> None:
        for each in self.found:
            each.close()


@dataclass
class WholeChanges:
    """What changed in a sharded store; see ``io.reads.Changes``."""

    tier: WholeTier
    written: Int64s | None

    def rows(self, table: int) -> Iterator[ChangedRows]:
        """The table's changed rows, in ascending chunks; none is empty. ChecksumError, TruncatedError."""
        whole, first = self.tier.tables[table], table << KEY_ROW_BITS
        keys: Int64s | range = range(first, first + whole.num_rows)
        if self.written is not None:
            keys = self.written[slice(*np.searchsorted(self.written, [first, first + MAX_ROWS]))]
        for start in range(0, len(keys), step := max(1, CHUNK_BYTES // whole.layout.row_bytes)):
            chunk = np.array(keys[start : start + step], np.int64)
            found = Rows.read(self.tier.read, whole.layout, chunk)
            if self.written is not None:  # a row that moved to a rank with the same bits was not written there
                found.fill_first_values(whole.pieces[0], chunk, np.flatnonzero(~found.present))
                found.present[:] = True
            if found.present.any():
                yield ChangedRows(chunk[found.present] & ROW_MASK, found.weights[found.present])


def open_whole(directory: Path, version: int | None = None) -> Opened:
    """The whole tables of a sharded store for reading, and the cold tier, which knows none yet and is the caller's
    to close. StoreNotFoundError: not all parts are there, or no such version. TierstoreError: they are of different
    runs. Others as of ``LmdbColdTier``."""
    for attempt in range(_ATTEMPTS):
        source = newest_set(directory)
        try:
            return _open(directory, source, version)
        except StoreNotFoundError:
            if version is not None or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def _open(directory: Path, source: Source, version: int | None) -> Opened:
    number, common = source.number if version is None else version, list(filter(None, in_common(source.commits)))
    if number not in common:
        raise StoreNotFoundError(f"{directory} has no version {number} in all its parts; they have {common}")
    with contextlib.ExitStack() as opened:
        paths = [directory / f"{rank}-of-{source.size}" for rank in range(source.size)]
        tiers = []
        for path, commits in zip(paths, source.commits, strict=True):
            store_id, own = bytes.fromhex(Manifest.read(path).store_id), commits.versions[number]
            tier = LmdbColdTier(path, store_id=store_id, readonly=True, version=own, follow=version is None)
            opened.callback(tier.close)
            tiers.append(tier)
        whole = WholeTier(paths, tiers)
        made = Opened(whole.read_manifest(), whole, whole.read_manifest)
        opened.pop_all()
        return made
