"""The tables of an open store, and the version of them that it shows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ..config import TableConfig
from ..errors import StoreReplacedError, TableError
from ..hbm.build import require_supported
from ..optim import SGD
from ..pool.converting import Converter, RowSource
from ..rows import DtypeName, RowLayout
from .manifest import Manifest
from .opened import Opened
from .table import Table
from .version import TableState, Version

__all__ = ["Catalog", "KeptAs", "MakeTable"]

MakeTable = Callable[[TableConfig, int, RowLayout], Table]
"""Makes a table of its configuration, its index, and how its rows lie in memory."""
KeptAs = DtypeName | Literal["stored"] | None
"""What rows are kept in memory as; see ``open_store``."""


class Catalog:
    """The tables of an open store. Each is in the manifest, in the cold tier, and a ``Table``, all in one order.

    Args:
        directory: of the store.
        has_hbm: whether there is a tier in device memory, which cannot have every table.

    Attributes:
        tables: by name, in order of creation.
        version: the one that is shown: the part that is not rows.
    """

    def __init__(
        self, directory: Path, opened: Opened, make: MakeTable, *, readonly: bool, has_hbm: bool, dtype: KeptAs
    ) -> None:
        self.directory = directory
        self.tables: dict[str, Table] = {}
        self.version = opened.version
        self._manifest = replace(opened.manifest, tables=())
        self._cold = opened.cold
        self._save = opened.save
        self._make = make
        self._readonly = readonly
        self._has_hbm = has_hbm
        self._dtype = dtype
        self._converter = Converter()
        self._entered: dict[int, tuple[RowLayout, int]] = {}
        self._grow(opened.manifest)
        self.show(opened.version)

    @property
    def states(self) -> dict[str, TableState]:
        """What a commit keeps of each table beside its rows."""
        return {name: table.state for name, table in self.tables.items()}

    def source(self, read: RowSource) -> RowSource:
        """Reads rows as they are kept in memory, by what reads them as they are stored."""
        if self._dtype is None:
            return read
        return lambda keys, slots, weights, _state, present: self._converter.read(read, keys, slots, weights, present)

    def show(self, version: Version) -> None:
        """Take over what a version keeps beside rows. FormatError if a table of it is not here."""
        version.require_of(self._manifest)
        for name, table in self.tables.items():
            table.restore(version.tables.get(name, TableState(0, table.config.optimizer.lr)))
        self.version = version

    # One more table

    def find(self, config: TableConfig) -> Table | None:
        """The table of this configuration, or None. TableError if another table has its name."""
        known = self.tables.get(config.name)
        if known is not None and known.config != config:
            raise TableError(
                f"table {config.name!r} exists as {known.config}; choose another name or the same configuration"
            )
        return known

    def manifest_with(self, config: TableConfig) -> Manifest:
        """The manifest with one more table. Nothing changes.

        Raises:
            ValueError: its rows are too wide, or there are too many tables. TableError: the tier in device memory
                cannot have it.
        """
        self._require_supported(config)
        config.layout(self._manifest.page_bytes).pages_per_block  # noqa: B018 - ValueError for rows too wide
        return self._manifest.with_table(config)

    def create(self, manifest: Manifest) -> Table:
        """Make the last table of a manifest with one more, durably. If that fails, nothing changes."""
        config, index = manifest.tables[-1], len(self.tables)
        try:
            layout = self._enter(config, index)
            self._save(manifest)
        except BaseException:
            self._leave(index)
            raise
        self._manifest = manifest
        return self._add(config, layout)

    # Following a writer

    def prepare(self, version: Version) -> tuple[Manifest, bool]:
        """Make ready the tables of a newer version: the cold tier knows them, empty, and nothing shows them.

        Returns:
            the manifest that goes with the version, and whether the cold tier knows tables that it did not know before.

        Raises:
            StoreReplacedError: a table is in the place of another. TableError: a table cannot be kept in memory as
                asked. BudgetError: the system refuses memory for the map of its rows.
        """
        manifest, num_entered = version.manifest_of(Manifest.read(self.directory)), len(self._entered)
        self._require_same(manifest)
        for index, config in enumerate(manifest.tables[len(self.tables) :], len(self.tables)):
            self._require_supported(config)
            self._enter(config, index)
        return manifest, len(self._entered) != num_entered

    def drop_prepared(self) -> None:
        """Forget the tables of a newer version that was not shown."""
        self._leave(len(self.tables))

    def has_tables_of(self, manifest: Manifest) -> bool:
        """Whether these are the tables of a manifest."""
        return manifest.tables == self._manifest.tables

    def move(self, manifest: Manifest, version: Version) -> None:
        """Show a newer version, for which ``prepare`` gave the manifest."""
        for name in list(self.tables)[len(manifest.tables) :]:
            self.tables.pop(name).leave()
        self._leave(len(manifest.tables))
        self._grow(manifest)
        self.show(version)

    def _require_same(self, newer: Manifest) -> None:
        """StoreReplacedError where a table is in another's place. A replica's tables go with the versions that brought
        them, and others may have come before anybody looked."""
        for before, after in zip(self._manifest.tables, newer.tables, strict=False):
            if before != after:
                raise StoreReplacedError(
                    f"{self.directory}: table {after.name!r} is in the place of {before.name!r}, which is shown; open "
                    "the store again"
                )

    # Tables and the cold tier

    def _grow(self, manifest: Manifest) -> None:
        """Add the manifest's tables that are not here yet; those that are here are its first."""
        for index, config in enumerate(manifest.tables[len(self.tables) :], len(self.tables)):
            self._require_supported(config)
            self._add(config, self._enter(config, index))
        self._manifest = manifest

    def _add(self, config: TableConfig, layout: RowLayout) -> Table:
        table = self.tables[config.name] = self._make(config, len(self.tables), layout)
        return table

    def _enter(self, config: TableConfig, index: int) -> RowLayout:
        """Make a table known to the cold tier, unless it is. Returns how its rows lie in memory."""
        stored = config.layout(self._manifest.page_bytes)
        kept = stored if self._dtype is None else self._converter.keep(index, config.name, stored, self._dtype)
        shape = stored, config.num_embeddings
        if self._entered.get(index) != shape:
            self._cold.add_table(index, *shape)
            self._entered[index] = shape
        return kept

    def _leave(self, first: int) -> None:
        """Have the cold tier forget the tables from index ``first`` on."""
        if len(self._entered) > first:
            self._cold.drop_tables(first)
            self._entered = {index: shape for index, shape in self._entered.items() if index < first}

    def _require_supported(self, config: TableConfig) -> None:
        """TableError for a table that the tier in device memory, if there is one, cannot have."""
        if self._has_hbm:
            if self._dtype is not None and self._dtype != "stored":
                config = replace(config, dtype=self._dtype, optimizer=SGD())
            require_supported(config, readonly=self._readonly)
