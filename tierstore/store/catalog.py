"""The tables of an open store, and the version of them that it shows."""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..config import TableConfig
from ..errors import StoreReplacedError, TableError, TierstoreError
from ..hbm.build import require_supported
from ..io.base import ColdTier
from ..io.lmdb import LmdbColdTier
from ..layout import MAX_TABLES, DtypeName, RowLayout
from ..optim import SGD
from ..pool.converting import Converter, RowSource
from .manifest import Manifest
from .table import Table
from .table_ids import TableIds
from .version import TableState, Version, unpack

if TYPE_CHECKING:
    from .store import Store

_LOG: Final = logging.getLogger("tierstore")

_CHANGEABLE: Final = ("num_embeddings", "feature_names", "pooling", "optimizer", "ids")

KeptAs = DtypeName | Literal["stored"] | None  # what rows are kept in memory as; see ``open_store``


@dataclass(slots=True)
class ShownVersion:
    """What a store shows besides rows."""

    version: Version  # the part of it that is not rows
    committed: dict[str, int]  # ``num_changes`` of each table as of that version


class Catalog:
    """The tables of an open store. Each is in the manifest, in the cold tier, and a ``Table``, all in one order.

    Attributes:
        tables: by name, in order of creation.
        manifest: of the tables.
        shown: the version that is shown.
        minutes: the time of batches from now on, for ``TTL(minutes=)``, from 1 on; 0: it was not set.
    """

    def __init__(
        self,
        store: "weakref.ref[Store]",
        directory: Path | None,
        manifest: Manifest,
        cold: ColdTier,
        read_manifest: Callable[[], Manifest] | None,
        *,
        readonly: bool,
        has_hbm: bool,
        dtype: KeptAs,
    ) -> None:
        self.tables: dict[str, Table] = {}
        self.minutes = 0
        self.shown = ShownVersion(unpack(cold.version, cold.payload), {})
        self._store = store
        self._directory = directory
        self.manifest = manifest
        self._cold = cold
        self._read_manifest = read_manifest
        self._readonly = readonly
        self._has_hbm = has_hbm
        self._dtype = dtype
        self._converter = Converter()
        self._entered: dict[int, tuple[RowLayout, int]] = {}  # layout and rows of the tables that the cold tier knows
        self._shown_shapes = self._entered
        self._enter(manifest.shapes)
        self._take(manifest, self._made(manifest))
        self.show(self.version)

    @property
    def version(self) -> Version:
        """The one that is shown."""
        return self.shown.version

    @property
    def states(self) -> dict[str, TableState]:
        """What a commit keeps of each table besides its rows."""
        states = {config.name: TableState(0, config.optimizer.lr) for config in self.manifest.tables}
        return states | {name: table.state for name, table in self.tables.items()}

    @property
    def ids(self) -> list[TableIds]:
        """Of the tables with dynamic ids."""
        return [table.ids for table in list(self.tables.values()) if table.ids is not None]

    @property
    def num_changes(self) -> dict[str, int]:
        """Of each table, its ids included."""
        return {
            name: table.num_changes + (0 if table.ids is None else table.ids.num_changes)
            for name, table in self.tables.items()
        }

    @property
    def changed_tables(self) -> tuple[str, ...]:
        return tuple(name for name, count in self.num_changes.items() if count != self.shown.committed.get(name, 0))

    def source(self, read: RowSource) -> RowSource:
        """Reads rows as they are kept in memory, by what reads them as they are stored."""
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

    # One more table

    def find(self, config: TableConfig) -> Table | None:
        """The table of this configuration, or None. TableError if another table has its name."""
        known = self.tables.get(config.name)
        if known is None:
            return None
        if known.config != config:
            raise TableError(_difference(known, config))
        if known.learning_rate != config.optimizer.lr:
            _LOG.warning(
                "table %r goes on with learning rate %s, not %s of its configuration: it was set, or is of the last "
                "commit; set table.learning_rate to change it. A new store.optimizer() begins at the configured one",
                config.name, known.learning_rate, config.optimizer.lr,
            )  # fmt: skip
        return known

    def require_possible(self, config: TableConfig) -> None:
        """ValueError if a table's rows are too wide, or there are too many tables. TableError if the tier in device
        memory cannot have it."""
        self._require_supported(config)
        config.layout(self.manifest.page_bytes).pages_per_block  # noqa: B018 - ValueError for rows too wide
        if len(self.manifest.tables) + (config.ids is not None) >= MAX_TABLES:
            raise ValueError(f"a store holds at most {MAX_TABLES} tables, with those that were dropped")
        if config.is_hidden:
            raise ValueError(f"name={config.name!r} is of tables that the store keeps to itself; choose another name")

    def create(self, config: TableConfig) -> Table:
        """Make a table, durably; errors as of ``_write``."""
        manifest = self.manifest
        for each in config.with_ids(len(manifest.tables)):
            manifest = manifest.with_table(each)
        self._replace(manifest)
        return self.tables[config.name]

    def change(self, manifest: Manifest) -> None:
        """Have other tables, durably; errors as of ``_write``. Nothing is cached, and no row changed since the last
        commit. Tables whose configuration changes are others from then on (``Table.leave``)."""
        try:
            self._replace(manifest)
        finally:
            self.shown.committed = self.num_changes

    def _replace(self, manifest: Manifest) -> None:
        """Have the tables of another manifest, once that is on disk. Errors as of ``_write``; nothing changes then."""
        try:
            self._enter(manifest.shapes)
            tables = self._made(manifest)
            self._write(manifest)
        except BaseException:
            with contextlib.suppress(TierstoreError):  # of files that are of no more use, as the first error says
                self._enter(self.manifest.shapes)
            raise
        self._take(manifest, tables)

    def _write(self, manifest: Manifest) -> None:
        """Returns once it is on disk, whatever is raised then. StoreReplacedError; others as ``Manifest.write``."""
        if self._directory is None or not isinstance(self._cold, LmdbColdTier):
            return
        self._cold.require_in_place()
        try:
            manifest.write(self._directory)
        except BaseException:  # handlers of signals wait until the call ends
            with contextlib.suppress(TierstoreError):
                if Manifest.read(self._directory) == manifest:
                    self._cold.sync_names()
                    return
            raise

    @contextlib.contextmanager
    def written_to(self, places: range) -> Iterator[None]:
        """Within the block, rows may be written for places that are empty in the manifest."""
        shapes = {place: (self._entered[place][0], self.manifest.tables[place].num_embeddings) for place in places}
        self._enter(self._entered | shapes)
        try:
            yield
        finally:
            self._enter(self.manifest.shapes)

    # Following a writer

    def prepare(self, version: Version) -> tuple[Manifest, bool]:
        """Make ready the tables of a newer version: the cold tier knows them, empty, and nothing shows them. Returns
        the manifest that goes with it, and whether the cold tier knows tables, or rows, that it did not know before.

        Raises:
            StoreReplacedError: a table is in the place of another. TableError: a table cannot be kept in memory as
                asked. BudgetError: the system refuses memory for the map of its rows.
        """
        assert self._read_manifest is not None, "nobody else commits to a store in memory"
        manifest, entered = version.manifest_of(self._read_manifest()), self._entered
        shapes, shown = manifest.shapes, self.manifest.shapes
        # A replica's tables go with the versions that brought them, and others may have come before anybody looked.
        for index, before in enumerate(self.manifest.tables[: len(shapes)]):
            after = manifest.tables[index]
            if not after.is_dropped and not after.keeps_rows_of(before):
                raise StoreReplacedError(
                    f"{self._directory}: table {after.name!r} is in the place of {before.name!r}, which is shown; open "
                    "the store again"
                )
            if after.is_dropped:  # it is shown for now
                shapes[index] = shown[index]
        for index, config in enumerate(manifest.tables):
            if index >= len(self.manifest.tables):
                self._require_supported(config)
                self._kept(index, config)
        self._enter(shapes)
        return manifest, self._entered != entered

    def drop_prepared(self) -> None:
        """Forget the tables of a newer version that was not shown."""
        if self._entered is not self._shown_shapes:
            self._enter(self.manifest.shapes)
            self._shown_shapes = self._entered

    def move(self, manifest: Manifest, version: Version) -> None:
        """Show a newer version, for which ``prepare`` gave the manifest."""
        self._enter(manifest.shapes)
        self._take(manifest, self._made(manifest))
        self.show(version)

    # Tables and the cold tier

    def _made(self, manifest: Manifest) -> dict[str, Table]:
        """The tables of a manifest, which the cold tier knows; those that are in it as they are stay."""
        before, tables = {table.index: table for table in self.tables.values()}, dict[str, Table]()
        for index, config in enumerate(manifest.tables):
            known = before.get(index)
            if known is not None and known.config == config:
                tables[config.name] = known
            elif not config.is_hidden:
                self._require_supported(config)
                tables[config.name] = made = self._new(config, index)
                if known is not None:
                    made.restore(known.state)
                    made.follows, made.converted = known.follows, known.converted
        return tables

    def _take(self, manifest: Manifest, tables: dict[str, Table]) -> None:
        """Have a manifest and what ``_made`` gave of it; again is fine."""
        before, self.tables, self.manifest, self._shown_shapes = self.tables, tables, manifest, self._entered
        for table in before.values():
            if tables.get(table.name) is not table:
                table.leave()
        store = self._store()
        for table in tables.values():
            if store is not None and store.recorder is not None and before.get(table.name) is not table:
                store.recorder.add_table(table.index, table.name)

    def _new(self, config: TableConfig, index: int) -> Table:
        store = self._store()
        assert store is not None, "the caller of a store has it"
        table = Table(store, config, index, self._kept(index, config))
        if config.ids is not None:
            table.ids = TableIds(config, index, self._cold, store.workers, lambda: self.minutes)
        return table

    def _enter(self, shapes: dict[int, tuple[RowLayout, int]]) -> None:
        """Have the cold tier know these tables, and no others."""
        known = self._entered
        if known == shapes:
            return
        if known.items() <= shapes.items():  # more of them: the map of the others' rows stays
            self._entered = dict(known)
            for index in sorted(shapes.keys() - known.keys()):
                self._cold.add_table(index, *shapes[index])
                self._entered[index] = shapes[index]
        else:
            self._cold.set_tables(shapes)
            self._entered = dict(shapes)

    def _kept(self, index: int, config: TableConfig) -> RowLayout:
        """How a table's rows lie in memory. TableError if they cannot as asked."""
        stored = config.layout(self.manifest.page_bytes)
        return stored if self._dtype is None else self._converter.keep(index, config.name, stored, self._dtype)

    def _require_supported(self, config: TableConfig) -> None:
        """TableError for a table that the tier in device memory, if there is one, cannot have."""
        if self._has_hbm:
            if self._dtype is not None and self._dtype != "stored":
                config = replace(config, dtype=self._dtype, optimizer=SGD())
            require_supported(config, readonly=self._readonly)


def _fields(config: TableConfig) -> dict[str, Any]:
    """What a configuration says, those of its parts by dotted names."""
    parts = {field.name: getattr(config, field.name) for field in fields(config)}
    return {
        name if inner is None else f"{name}.{inner.name}": part if inner is None else getattr(part, inner.name)
        for name, part in parts.items()
        for inner in ([each for each in fields(part) if each.compare] if is_dataclass(part) else (None,))
    } | {name: type(part).__name__ for name, part in parts.items() if is_dataclass(part)}


def _difference(known: Table, asked: TableConfig) -> str:
    """The error's text for a table that another one cannot be."""
    there, here, none = _fields(known.config), _fields(asked), "none"
    differing = [name for name in there | here if there.get(name, none) != here.get(name, none)]
    text = "; ".join(f"{name}: {there.get(name, none)!r} there, {here.get(name, none)!r} asked" for name in differing)
    if differing == ["optimizer.lr"]:
        way = f"create it with lr={known.config.optimizer.lr}, then set table.learning_rate = {asked.optimizer.lr}"
    elif all(name.split(".")[0] in _CHANGEABLE and name != "ids" for name in differing):
        way = "change it by Store.change_table (docs/tables.md), or choose another name"
    else:
        way = "choose another name, or move its rows to a new store by tierstore export and tierstore import"
    return f"table {asked.name!r} exists and differs in {text}. Keep its configuration, or {way}"
