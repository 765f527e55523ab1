"""The tables of an open store, changes of them, and the version of them that it shows.

A table is a place in the manifest, and its rows carry the number of the place. So a change of name, features, size or
rules of ids is a new manifest, written atomically. A table that is dropped leaves its place empty. Rows of an empty
place are nobody's, and are deleted.
"""

import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from ..config import TableConfig
from ..errors import StoreReplacedError, TableError, TierstoreError
from ..hbm.pool import require_supported
from ..io.base import ColdTier
from ..io.lmdb import LmdbColdTier
from ..layout import MAX_TABLES, DtypeName, RowLayout
from ..optim import SGD
from ..pool.converting import Converter, RowSource
from .directory import Opened
from .lifetime import Shown
from .manifest import Manifest
from .table import Table
from .table_ids import TableIds
from .version import ORIGIN_KEY, RANK_KEY, TableState, Version, unpack

_LOG: Final = logging.getLogger("tierstore")
_CHANGEABLE: Final = ("num_embeddings", "feature_names", "pooling", "optimizer", "ids")

KeptAs = DtypeName | Literal["stored"] | None  # what rows are kept in memory as; see ``open_store``


class Catalog:
    """The tables of an open store: each in the manifest, in the cold tier, and a ``Table``, all in one order.
    ``epoch``: the version that rows are written for. ``minutes``: the time for ``TTL(minutes=)``; 0: not set."""

    def __init__(
        self, store: "weakref.ref[Any]", directory: Path, files: Opened, shown: Shown, *, readonly: bool,
        has_hbm: bool, dtype: KeptAs,
    ) -> None:  # fmt: skip
        self.tables: dict[str, Table] = {}
        self.minutes = 0
        self.manifest = files.manifest
        self._cold: ColdTier = files.cold
        self._read_manifest = files.read_manifest
        self.shown: Final = shown
        shown.version, shown.committed = unpack(self._cold.version, self._cold.payload), {}
        self.epoch = self._cold.last_version + 1
        self._store = store
        self._directory = directory
        self._readonly = readonly
        self._has_hbm = has_hbm
        self._dtype = dtype
        self._converter = Converter()
        self._entered: dict[int, tuple[RowLayout, int]] = {}  # layout and rows of the tables that the cold tier knows
        self.move(self.manifest, self.version)

    @property
    def version(self) -> Version:
        return self.shown.version

    @property
    def states(self) -> dict[str, TableState]:
        states = {config.name: TableState(0, config.optimizer.lr) for config in self.manifest.tables}
        return states | {name: table.state for name, table in self.tables.items()}

    @property
    def ids(self) -> list[TableIds]:
        return [table.ids for table in list(self.tables.values()) if table.ids is not None]

    @contextlib.contextmanager
    def ids_locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for ids in self.ids:
                stack.enter_context(ids.lock)
            yield

    @property
    def num_changes(self) -> dict[str, int]:
        return {
            name: table.num_changes + (0 if table.ids is None else table.ids.num_changes)
            for name, table in self.tables.items()
        }

    @property
    def changed_tables(self) -> tuple[str, ...]:
        return tuple(name for name, count in self.num_changes.items() if count != self.shown.committed.get(name, 0))

    def source(self, read: RowSource) -> RowSource:
        if self._dtype is None:
            return read
        return lambda keys, slots, weights, _state, present: self._converter.read(read, keys, slots, weights, present)

    def show(self, version: Version) -> None:
        """Take over what a version keeps besides rows. FormatError if a table of it is not here."""
        version.require_of(self.manifest)
        states = list(version.tables.values())  # by place, whatever the tables' names were
        for table in self.tables.values():
            is_known = table.index < len(states)
            table.restore(states[table.index] if is_known else TableState(0, table.config.optimizer.lr))
        self.shown.version, self.shown.committed = version, self.num_changes

    # Making and changing tables. Nothing is cached then.

    def find(self, config: TableConfig) -> Table | None:
        """The table of this configuration, or None. TableError if another table has its name."""
        known = self.tables.get(config.name)
        if known is not None and known.config != config:
            raise TableError(_difference(known, config))
        if known is not None and known.learning_rate != config.optimizer.lr:
            _LOG.warning(
                "table %r goes on with learning rate %s, not %s of its configuration: it was set, or is of the last "
                "commit; set table.learning_rate to change it. A new store.optimizer() begins at the configured one",
                config.name, known.learning_rate, config.optimizer.lr,
            )  # fmt: skip
        return known

    def require_possible(self, config: TableConfig) -> None:
        """ValueError: rows too wide, or too many tables. TableError: the tier in device memory cannot have it."""
        self._require_supported(config)
        config.layout(self.manifest.page_bytes).pages_per_block  # noqa: B018 - ValueError for rows too wide
        if len(self.manifest.tables) + (config.ids is not None) >= MAX_TABLES:
            raise ValueError(f"a store holds at most {MAX_TABLES} tables, with those that were dropped")
        if config.is_hidden:
            raise ValueError(f"name={config.name!r} is of tables that the store keeps to itself; choose another name")

    def require_changeable(self) -> None:
        """TableError if others decide about the tables, or rows were changed since the last commit."""
        if ORIGIN_KEY in self.version.extra:
            raise TableError(
                f"{self._directory} has the tables of the store that is published to it: change them there"
            )
        if RANK_KEY in self.version.extra:
            raise TableError(
                f"{self._directory} is one rank's part of a sharded store: with tierstore reshard --plain make a store "
                "of all parts, change its tables, and reshard that"
            )
        if names := self.changed_tables:
            raise TableError(
                f"rows of table {names[0]!r} were changed since the last commit: commit or roll back before"
            )

    def create(self, config: TableConfig) -> Table:
        manifest = self.manifest
        for each in config.with_ids(len(manifest.tables)):
            manifest = manifest.with_table(each)
        self._replace(manifest)
        return self.tables[config.name]

    def drop(self, table: Table) -> None:
        manifest = self.manifest
        for place, each in enumerate(table.config.with_ids(table.index), table.index):
            manifest = manifest.with_place(place, each.dropped(place))
        self._change(manifest)

    def change(self, table: Table, config: TableConfig) -> Table:
        before, manifest = table.config, self.manifest
        if any(each.name == config.name for place, each in enumerate(manifest.tables) if place != table.index):
            raise TableError(f"there is a table {config.name!r}: choose another name")
        if config.num_embeddings < before.num_embeddings:
            raise ValueError(
                f"num_embeddings={config.num_embeddings} of {before.name!r} must be at least {before.num_embeddings}, "
                "as its rows stay; to leave some out, import what tierstore export writes into a new store"
            )
        if not config.keeps_ids_of(before):
            raise ValueError(
                f"ids={config.ids!r} cannot follow {before.ids!r} of {before.name!r}: what eviction goes by (uses, "
                "batches or minutes) and whether ids without a row are counted stay, and candidates do not become "
                "fewer; import what tierstore export writes into a table made with these rules"
            )
        rule, other, dim = before.optimizer, config.optimizer, before.embedding_dim
        if (rule.kind, rule.state_dim(dim)) != (other.kind, other.state_dim(dim)):
            raise TableError(
                f"rows of table {before.name!r} have the state of {rule.kind}, not of {other.kind}: import what "
                f"tierstore export writes into a new store, by tierstore import --optimizer {other.kind}"
            )
        self.require_possible(config)
        for place, each in enumerate(config.with_ids(table.index), table.index):
            manifest = manifest.with_place(place, replace(each, init=manifest.tables[place].init))
        self._change(manifest)
        return self.tables[config.name]

    def _change(self, manifest: Manifest) -> None:
        """Have other tables, durably, when no row changed since the last commit."""
        try:
            self._replace(manifest)
        finally:
            self.shown.committed = self.num_changes

    def _replace(self, manifest: Manifest) -> None:
        """Have the tables of another manifest, once that is on disk. Errors as of ``_write``; nothing changes then."""
        try:
            self.enter(manifest.shapes)
            tables = self._made(manifest)
            if isinstance(self._cold, LmdbColdTier):
                self._write(manifest, self._cold)
        except BaseException:
            with contextlib.suppress(TierstoreError):  # of files that are of no more use, as the first error says
                self.enter(self.manifest.shapes)
            raise
        self._take(manifest, tables)

    def _write(self, manifest: Manifest, cold: LmdbColdTier) -> None:
        """Returns once it is on disk, whatever is raised then. StoreReplacedError; others as ``Manifest.write``."""
        cold.require_in_place()
        try:
            manifest.write(self._directory)
        except BaseException:  # handlers of signals wait until the call ends
            with contextlib.suppress(TierstoreError):
                if Manifest.read(self._directory) == manifest:
                    return cold.sync_names()
            raise

    # Following a writer

    def prepare(self, version: Version) -> tuple[Manifest, bool]:
        """Make the tables of a newer version known to the cold tier, empty. Returns its manifest, and whether tables or
        rows are new. StoreReplacedError, TableError, BudgetError as of ``Store.find_newer``."""
        manifest, entered = version.manifest_of(self._read_manifest()), self._entered
        shapes, shown = dict(manifest.shapes), self.manifest.shapes
        # A replica's tables go with the versions that brought them, and others may have come before anybody looked.
        for index, before in enumerate(self.manifest.tables[: len(shapes)]):
            after = manifest.tables[index]
            if after.is_dropped:  # it is shown for now
                shapes[index] = shown[index]
            elif not after.keeps_rows_of(before):
                raise StoreReplacedError(
                    f"{self._directory}: table {after.name!r} is in the place of {before.name!r}, which is shown; open "
                    "the store again"
                )
        for index, config in enumerate(manifest.tables[len(shown) :], len(shown)):
            self._require_supported(config)
            self._kept(index, config)
        self.enter(shapes)
        return manifest, self._entered != entered

    def move(self, manifest: Manifest, version: Version) -> None:
        self.enter(manifest.shapes)
        self._take(manifest, self._made(manifest))
        self.show(version)

    # Tables and the cold tier

    def _made(self, manifest: Manifest) -> dict[str, Table]:
        """Those of a manifest, which the cold tier knows; tables that are in it as they are stay."""
        before, tables = {table.index: table for table in self.tables.values()}, dict[str, Table]()
        store = self._store()
        assert store is not None, "the caller of a store has it"
        for index, config in enumerate(manifest.tables):
            known = before.get(index)
            if known is not None and known.config == config:
                tables[config.name] = known
            elif not config.is_hidden:
                self._require_supported(config)
                tables[config.name] = made = Table(store, config, index, self._kept(index, config))
                if config.ids is not None:
                    made.ids = TableIds(config, index, self._cold, store.workers, lambda: self.minutes)
                if known is not None:
                    made.restore(known.state)
                    made.follows, made.converted = known.follows, known.converted
        return tables

    def _take(self, manifest: Manifest, tables: dict[str, Table]) -> None:
        before, self.tables, self.manifest = self.tables, tables, manifest
        store = self._store()
        for table in before.values():
            table.is_gone = tables.get(table.name) is not table
        for table in tables.values():
            if store is not None and store.recorder is not None and before.get(table.name) is not table:
                store.recorder.add_table(table.index, table.name)

    def enter(self, shapes: dict[int, tuple[RowLayout, int]]) -> None:
        """Have the cold tier know these tables, and no others."""
        if self._entered != shapes:
            self._cold.set_tables(shapes)
            self._entered = dict(shapes)

    def _kept(self, index: int, config: TableConfig) -> RowLayout:
        """How a table's rows lie in memory. TableError if they cannot as asked."""
        stored = config.layout(self.manifest.page_bytes)
        return stored if self._dtype is None else self._converter.keep(index, config.name, stored, self._dtype)

    def _require_supported(self, config: TableConfig) -> None:
        if self._has_hbm:
            if self._dtype is not None and self._dtype != "stored":
                config = replace(config, dtype=self._dtype, optimizer=SGD())
            require_supported(config, readonly=self._readonly)


def _difference(known: Table, asked: TableConfig) -> str:
    def said(config: TableConfig) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in ((field.name, getattr(config, field.name)) for field in fields(config)):
            found[name] = type(part).__name__ if is_dataclass(part) else part
            inner = fields(part) if is_dataclass(part) else ()
            found |= {f"{name}.{each.name}": getattr(part, each.name) for each in inner if each.compare}
        return found

    there, here, none = said(known.config), said(asked), "none"
    differing = [name for name in there | here if there.get(name, none) != here.get(name, none)]
    text = "; ".join(f"{name}: {there.get(name, none)!r} there, {here.get(name, none)!r} asked" for name in differing)
    if differing == ["optimizer.lr"]:
        way = f"create it with lr={known.config.optimizer.lr}, then set table.learning_rate = {asked.optimizer.lr}"
    elif all(name.split(".")[0] in _CHANGEABLE and name not in ("ids", "optimizer") for name in differing):
        way = "change it by Store.change_table (docs/tables.md), or choose another name"
    else:
        way = "choose another name, or move its rows to a new store by tierstore export and tierstore import"
    return f"table {asked.name!r} exists and differs in {text}. Keep its configuration, or {way}"
