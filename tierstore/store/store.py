"""A store: a directory of embedding tables, one version at a time, larger than memory."""

import atexit
import contextlib
import copy
import html
import logging
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor

from ..cache.ddr import AUTO
from ..config import Pooling, TableConfig
from ..errors import PartlyTrainedError, TableError, TierstoreError
from ..ids import DynamicIds
from ..ids.id_map import MAX_SCORE
from ..io.base import ColdTier, MemoryColdTier, VerifyReport
from ..io.lmdb import LmdbColdTier
from ..kernels.arrays import Int64s
from ..kernels.threads import Workers
from ..layout import RowLayout
from ..lookup.finite import CheckFinite
from ..optim import Optimizer
from ..pool.pool import Pool
from ..pool.stats import Stats
from ..settings.sections import nearest
from ..system.checks import Unpicklable, require_int
from ..system.signals import ClosedWhenDropped, settle, shielded
from ..system.sizes import format_count
from ..system.terminal import html_table
from .arguments import OffsetsType
from .catalog import Catalog, KeptAs
from .changes import FOLDER, ChangeFeed, Cursor, folder_of, forget
from .commits import Commits, PendingCommit
from .directory import BackupReport, Opened, back_up, open_files
from .lifetime import Lifetime, Shown
from .manifest import Manifest
from .optimizer import TieredOptimizer
from .pools import Memory, Pools
from .recording import Recorder
from .refresh import Follower, Newer
from .table import OF_MODULES, Table
from .version import RANK_KEY, event_time_of, unpack_tensors

_LOG: Final = logging.getLogger("tierstore")
_IN_MEMORY: Final = Path(":memory:")  # in the place of a directory where there is none
_END_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 30.0  # for passes over batches that were dropped to release their rows
_MAX_NAMED: Final = 5  # Tables, in a line of the log


class Store(ClosedWhenDropped, Unpicklable):
    """An open store; made by ``tierstore.open``. A context manager that closes it.

    Any number of threads may read while one trains. Only that one may commit, roll back, create tables and close.

    Attributes:
        directory: absolute. readonly: opened with mode="r". device: where results live.
        keep: how many versions stay after a commit of this process. check_finite: as for ``tierstore.open``.
        dropped: versions that the next commit drops, and that do not count; set by a sharded store.
        recorder: records lookups, or None; see ``record``.
        optimizer_in_use: what ``optimizer`` gave last, or None: backward updates rows.
        shown: counts moves to other versions.
    """

    _lifetime: Lifetime = Lifetime(_IN_MEMORY, readonly=True)  # of one that could not be opened

    def __init__(
        self, directory: Path | None, memory: Memory, *, readonly: bool, version: int | None, keep: int, slack: float,
        threads: int, dtype: KeptAs, check_finite: CheckFinite | None,
    ) -> None:  # fmt: skip
        self.directory = _IN_MEMORY if directory is None else directory.absolute()
        self.readonly = readonly
        self.keep = keep
        self.check_finite = check_finite
        self.dropped: Collection[int] = ()
        self.device = memory.device
        self.offsets_type: OffsetsType = np.int32 if memory.has_hbm else np.int64  # of lookups; int32 for the device
        self.recorder: Recorder | None = None
        self.optimizer_in_use: TieredOptimizer | None = None
        self.shown = Shown()
        self._feeds: dict[str, weakref.ref[ChangeFeed]] = {}
        self._follows = readonly and version is None and dtype is None
        self._partly_trained: BaseException | None = None
        self._lifetime = Lifetime(self.directory, readonly=readonly)
        self.require_open, self.require_writable = self._lifetime.require_open, self._lifetime.require_writable
        self.calling = self._lifetime.calling
        with contextlib.ExitStack() as held:  # released if a later step fails, else by close, the last first
            held.callback(self._lifetime.let_go)
            if directory is None:
                tier = MemoryColdTier()
                manifest = Manifest.new(tier.page_bytes)
                files = Opened(manifest, tier, lambda: manifest)
            else:
                files = open_files(self.directory, readonly=readonly, version=version, slack=slack)
            self._cold: ColdTier = files.cold
            held.callback(self._cold.close)
            self.workers = Workers(threads)
            held.callback(self.workers.close)
            self._catalog = Catalog(
                weakref.ref(self), self.directory, files, self.shown, readonly=readonly, has_hbm=memory.has_hbm,
                dtype=dtype,
            )  # fmt: skip
            self._pools = Pools(memory, self._cold, self.workers, self._catalog, readonly=readonly)
            held.callback(self._pools.close)
            self._commits = Commits(self.directory, self._cold, self._catalog, self._pools)
            held.callback(self._commits.thread.shutdown)
            self._follower = Follower(self._lifetime, self._cold, self._catalog, self._pools)
            self._lifetime.keep(self._cold, self.workers, self._commits.thread)
            self._held = held.pop_all()
        self._lifetime.is_closed = False
        _STORES.add(weakref.ref(self, _STORES.discard))

    @shielded
    def create_table(self, config: TableConfig) -> Table:
        """Add a table, durably; a table of the same configuration is returned as it is, with the learning rate of its
        last commit (a WARNING is logged if the configuration has another).

        A new table is part of no version: it is there, empty, whatever is committed.

        Raises:
            TableError: the name is taken by another configuration, in-flight batches pin rows, or the tier in device
                memory cannot have the table.
            BudgetError: the system refuses memory for the map of the rows. ReadOnlyError, ClosedError.
        """
        if (known := self.find_or_require(config)) is not None:
            return known
        with self._retired():
            return self._catalog.create(config)

    def find_or_require(self, config: TableConfig) -> Table | None:
        """The table of this configuration; None if ``create_table`` can make it, else its errors."""
        self.require_open()
        if not isinstance(config, TableConfig):
            raise TypeError(f"create_table takes a TableConfig, not {type(config).__name__}")
        if (known := self._catalog.find(config)) is None:
            self.require_writable()
            self._catalog.require_possible(config)
        return known

    def has_rows_of(self, name: str) -> bool:
        """Whether the version shown knows a table of that name, or it was changed since."""
        return name in self._catalog.version.tables or name in self.changed_tables

    @shielded
    def change_table(
        self, table: str, *, name: str | None = None, num_embeddings: int | None = None,
        feature_names: Sequence[str] | None = None, pooling: Pooling | None = None, optimizer: Optimizer | None = None,
        ids: DynamicIds | None = None,
    ) -> Table:  # fmt: skip
        """Give a table another name, more rows, other features, pooling, optimizer or rules of ids, durably.

        The change is part of no version: all that are kept show the table as it is now, and ``rollback`` does not undo
        it. A process that is killed leaves the old table or the new one. ``Table`` objects of before, and modules over
        them, refuse further use; make them again.

        Args:
            table: its name now.
            name: the new one; feature names that are the default follow.
            num_embeddings: at least what it has. New rows have first values, and no ids if those are dynamic.
            optimizer: of the same kind, with other parameters: rows keep their state, and the learning rate in force
                stays.

        Raises:
            TableError: rows are in use, changed since the last commit, or trained by ``optimizer()``; another table has
                the name; the optimizer is of another kind; or others decide about the tables: the store is a replica,
                or a rank's part.
            ValueError: wrong values. DiskFullError: the table is as it was. ReadOnlyError, ClosedError.
        """
        with self._changing(table) as known:
            before = known.config
            if feature_names is None and name is not None and before.feature_names == (before.name,):
                feature_names = ()
            asked: dict[str, Any] = {
                "num_embeddings": num_embeddings, "pooling": pooling, "optimizer": optimizer, "ids": ids, "name": name,
                "feature_names": feature_names,
            }  # fmt: skip
            config = replace(before, **{field: value for field, value in asked.items() if value is not None})
            return known if config == before else self._catalog.change(known, config)

    @shielded
    def drop_table(self, name: str) -> None:
        """Drop a table with all its rows, in place and durably, from all versions that are kept: ``backup`` first if it
        may be wanted again. Its space on SSD is reused after the next commits. Errors as of ``change_table``."""
        with self._changing(name) as table:
            self._catalog.drop(table)

    @contextlib.contextmanager
    def _changing(self, name: str) -> Iterator[Table]:
        self.require_writable()
        table = self[name]
        if self.optimizer_in_use is not None:
            raise TableError(
                "store.optimizer() trains the tables: close the store, open it again, and change them first"
            )
        self._commits.end_pending()
        self._catalog.require_changeable()
        with self._retired():
            yield table

    @contextlib.contextmanager
    def _retired(self) -> Iterator[None]:
        """Within it there are no pools."""
        settle(_SETTLE_SECONDS)
        self._commits.end_pending()
        with self._pools.lock:
            self._pools.retire()
            yield

    def __getitem__(self, name: str) -> Table:
        """The table of that name; TableError names the nearest one there is."""
        tables = self._catalog.tables
        if name in tables:
            return tables[name]
        raise TableError(f"no table {name!r} in {self.directory}; {nearest(str(name), sorted(tables))}")

    def __iter__(self) -> Iterator[str]:
        """Names of the tables."""
        return iter(self.tables)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tables

    @property
    def tables(self) -> Mapping[str, Table]:
        """All tables by name, in order of creation."""
        return MappingProxyType(self._catalog.tables)

    def pool_of(self, layout: RowLayout) -> Pool:
        """The pool of rows of this layout; pools are made at first use, when all tables are known."""
        self.require_open()  # in a forked process nobody may be there who could release the lock
        with self._pools.lock:
            self.require_open()
            return self._pools.of(layout)

    def written_rows(self, table: Table) -> Iterator[Int64s]:
        """Rows of the table that were ever trained or written, int64 [n], ascending, in parts."""
        self.require_open()
        if not self.readonly:
            self._commits.end_pending()
            table.pool.flush()
        for part in self._cold.stored_rows(table.index):
            if table.is_gone:
                break
            yield part
        if table.is_gone:
            _ = table.pool  # TableError

    def optimizer(self, dense: torch.optim.Optimizer | None = None) -> TieredOptimizer:
        """A ``torch.optim.Optimizer`` of all tables; from now on backward collects gradients and ``step`` applies them.

        Without it, each backward pass updates the rows at its end; learning-rate schedulers, accumulation, clipping and
        ``GradScaler`` then do not reach them. Rates begin as ``TableConfig.optimizer`` has them; a resumed job loads
        its own. ``dense``: the optimizer of the other parameters, to have one for all.

        Raises:
            ReadOnlyError: the store was opened for reading. ClosedError. TypeError: ``dense`` is no optimizer.
        """
        return self.use_optimizer(TieredOptimizer(self, dense))

    def use_optimizer(self, optimizer: TieredOptimizer) -> TieredOptimizer:
        """From now on backward collects gradients for it; errors as of ``optimizer``."""
        self.require_writable()
        self.optimizer_in_use = optimizer
        return optimizer

    def note_partly_trained(self, error: BaseException) -> None:
        """A step failed after some of its rows were, or may have been, trained."""
        self._partly_trained = error

    def require_whole_steps(self) -> None:
        """PartlyTrainedError if a step failed after some of its rows were trained, until ``rollback``."""
        if (error := self._partly_trained) is not None:
            reopen = "close the store and open it again"
            way = f"store.rollback({self.version}), or {reopen}," if self.versions else reopen
            raise PartlyTrainedError(
                f"{self.directory}: a training step failed when some of its rows were trained; to drop what was "
                f"trained since the last commit, {way} and then repeat those steps. It failed by "
                f"{type(error).__name__}: {error}"
            ) from error

    @shielded
    def commit(self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None) -> int:
        """Make all rows, optimizer state, ``extra`` and ``tensors`` the current version, atomically and durably.

        Args:
            extra: such as the reader's position; what Python's json gives back as it was: str keys, lists instead of
                tuples. NaN and infinity are kept. None is {}: the last commit's is not carried over.
            tensors: dense weights, random states and the like. None is {}, likewise.

        Returns:
            the version's number, above those before.

        Raises:
            DiskFullError: nothing changed; the last version stands and the rows are still in memory.
            PartlyTrainedError: a step failed half way; go back before.
            TypeError: ``extra`` or ``tensors`` cannot be stored.
            ValueError: ``tensors`` is None, and the last checkpoint of ``tierstore.checkpoint.save`` would be dropped,
                as not more than ``keep`` versions stay.
        """
        return self.commit_async(extra=extra, tensors=tensors).result()

    @shielded
    def commit_async(
        self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> PendingCommit:
        """Commit what is there now, and go on while it is written. Arguments, and errors about them, as for ``commit``.

        The caller waits until ``extra`` and ``tensors`` are copied and the rows to be written are marked. Whatever is
        written or trained afterwards belongs to the next version. Threads that change rows faster than they are
        written wait for the writer, and a commit for the one before it.

        Returns:
            the future whose ``result()`` is the version's number once it is durable, or raises; until then ``version``
            and ``extra`` are the last one's. Until somebody calls it, the writer rests most of the time. An error that
            nobody asked it for is raised by the next commit, or by ``close``.
        """
        self.require_writable()
        self.require_whole_steps()
        return self._commits.begin(extra, tensors, self.keep, self.dropped)

    @shielded
    def rollback(self, version: int) -> None:
        """Go back to a kept version: later ones, and what was not committed, are dropped.

        Numbers of dropped versions are not used again. Tables that were created later stay, empty. ValueError: it is
        not one of ``versions``. TableError: an in-flight batch uses rows. ReadOnlyError, ClosedError.
        """
        self.require_writable()
        settle(_SETTLE_SECONDS)
        self._commits.rollback(version)
        self._partly_trained = None

    def refresh(self) -> int:
        """Have a store opened with mode="r" show the newest commit of its writer; returns its number.

        Lookups in other threads may go on: each shows rows of one version. Rows in memory stay, read again where they
        changed. With ``version=``, or in a store open for writing, nothing happens. Errors as of ``find_newer`` and
        ``Newer.show``.
        """
        newer = self.find_newer()
        return self.version if newer is None else newer.show()

    def find_newer(self) -> Newer | None:
        """The first part of ``refresh``: make a newer commit ready; None if there is none. Lookups go on meanwhile.

        What an earlier call gave cannot be shown any more. Memory: for rows, at most the part of ``ddr`` that write
        staging has in a store open for writing; some 50 bytes for each row that was written since; after a
        rollback, a second map of the rows.

        Raises, and goes on to show what it showed:
            DamagedError: what is there is not what was written. StoreReplacedError: its files were deleted, or others
                put in their place. TableError: a new table cannot be kept as ``dtype``. BudgetError: nor a map of its
                rows. ClosedError.
        """
        return self._follower.find()

    def rehearse_newer(self) -> None:
        """Compile what ``find_newer`` and ``Newer.show`` use; errors as of these. No lookup may run meanwhile."""
        self._follower.rehearse()

    @property
    def version(self) -> int:
        """Number of the last commit; 0 before the first."""
        return self._catalog.version.number

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the kept versions, ascending; the last is the newest."""
        return self._cold.versions

    def commit_id(self, version: int) -> str:
        """The identity of a version's commit, 16 hex digits; "" unless it is the last one or among the 256 before it.
        A store restored from a copy uses numbers again."""
        last = self._catalog.version
        return last.lineage.commit_id if version == last.number else last.lineage.id_of(version)

    @property
    def extra(self) -> dict[str, Any]:
        """``extra`` of the last commit."""
        return copy.deepcopy(self._catalog.version.extra)

    @property
    def changed_tables(self) -> tuple[str, ...]:
        """Names of the tables whose rows were updated or written since the last commit."""
        return self._catalog.changed_tables

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the last commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self._catalog.version)

    def changes(self, consumer: str, since: int | None = None) -> ChangeFeed:
        """What changed since the cursor of a consumer, which the store keeps by name; iterate it, and acknowledge each
        change. A store opened for reading moves on to the version of each (``refresh``). It closes what an earlier call
        gave for the name, and the store's ``close`` closes it.

        Args:
            since: the version that the receiver has, if it keeps that itself: where the cursor is elsewhere, a full
                copy comes.

        Raises:
            ValueError, TypeError: no name, or version. TierstoreError: the name is in use elsewhere; or the store is in
            memory, or sharded. DiskFullError, ReadOnlyError: the cursor cannot be kept. ClosedError.
        """
        self.require_open()
        if not isinstance(self._cold, LmdbColdTier) or RANK_KEY in self._catalog.version.extra:
            raise TierstoreError(
                f"{self.directory} is in memory, or sharded, and has no feed of changes: give the store a directory; "
                "make one store of all ranks' parts by tierstore reshard DIR NEW_DIR --plain"
            )
        since = None if since is None else require_int(since, "since", 0, 2**40)
        folder, reader = self._end_feed(consumer), self
        if not self._follows:
            reader = Store(
                self.directory, Memory(ddr=0, hbm=0, device=torch.device("cpu"), policy=AUTO), readonly=True,
                version=None, keep=1, slack=2.0, threads=1, dtype=None, check_finite=None,
            )  # fmt: skip
        feed = ChangeFeed(reader, reader._cold, folder, since, is_own=reader is not self)
        self._feeds[consumer] = weakref.ref(feed)
        return feed

    def _end_feed(self, consumer: str) -> Path:
        """The consumer's folder, of which no feed of this store is open."""
        folder = folder_of(self.directory, consumer)
        if (known := self._feeds.get(consumer)) and (feed := known()):
            feed.close()
        settle(_SETTLE_SECONDS)
        return folder

    def consumers(self) -> dict[str, int]:
        """The version that each consumer of ``changes`` acknowledged, by name; 0: a full copy is next."""
        self.require_open()
        folders = sorted(path.parent for path in (self.directory / FOLDER).glob("*/cursor.json"))
        return {folder.name: Cursor.load(folder).since(self.commit_id) for folder in folders}

    def forget_consumer(self, consumer: str) -> None:
        """Delete a consumer's cursor, durably, and end its feed here. ValueError: there is none. TierstoreError: its
        changes are being taken elsewhere."""
        self.require_open()
        folder = self._end_feed(consumer)
        if not (folder / "cursor.json").exists():
            raise ValueError(f"{self.directory} has no consumer {consumer!r}; consumers() lists them")
        forget(folder)

    def set_time(self, seconds: float) -> None:
        """Set the time of the batches from now on, for ``TTL(minutes=)``: seconds since 1970, or since any other time.
        A run that is resumed, or repeated, is the same if its times are. ValueError: it goes back, or is no number."""
        self.require_open()
        if not math.isfinite(seconds):
            raise ValueError(f"seconds={seconds} must be a finite number")
        minutes = int(seconds // 60) + 1
        least = max([1, *(ids.clock for ids in self._catalog.ids if ids.goes_by_time)])
        if not least <= minutes <= MAX_SCORE:
            raise ValueError(
                f"seconds={seconds}: batches from now on are of {60 * (least - 1)} to {60 * MAX_SCORE - 1} seconds, as "
                "time does not go back"
            )
        self._catalog.minutes = minutes

    def stats(self) -> Stats:
        """Running totals of each tier since the store was opened, and the event time of the version shown."""
        self.require_open()
        return self._pools.stats()._replace(event_time=event_time_of(self._catalog.version.extra))

    def record(self, path: str | os.PathLike[str], *, rate: float = 0.01, max_bytes: int | str = "64MiB") -> Recorder:
        """Record which rows are looked up from now on, as a trace.

        Args:
            path: the file, NAME.npz; there must be none yet.
            rate: the share of all rows whose lookups are recorded; 1: every row.
            max_bytes: bound on memory and file; the rate is halved whenever it is reached.

        Raises:
            ValueError: the store has no table, or is recorded already; others as of ``Recorder``. ClosedError.
        """
        self.require_open()
        if self.recorder is not None:
            raise ValueError(f"the store is being recorded to {self.recorder.path}; stop that first")
        if not self.tables:
            raise ValueError(f"{self.directory} has no table yet; make its tables, then record")
        names = {table.index: name for name, table in self.tables.items()}
        self.recorder = Recorder(names, path, rate=rate, max_bytes=max_bytes, store=weakref.ref(self))
        return self.recorder

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check the rows of all versions on SSD; count those of now. ``progress(done_bytes, total_bytes)``.
        DamagedError: names the file, the place and the way out."""
        self.require_open()
        with self.calling("verify"):
            return self._cold.verify(progress)

    def backup(
        self, target: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
    ) -> BackupReport:
        """Copy the store with all kept versions into another directory, while others train: ``directory.back_up``."""
        self.require_open()
        if isinstance(self._cold, MemoryColdTier):
            raise TierstoreError('a store in memory has no files to copy; give it a directory, without cold="memory"')
        if not isinstance(self._cold, LmdbColdTier):
            raise TierstoreError(
                f"{self.directory} is a sharded store: copy each rank's part by itself, or back up the store that "
                f"tierstore reshard {self.directory} NEW_DIR --plain makes"
            )
        with self.calling("backup"):
            return back_up(self._cold, self.directory, target, progress=progress)

    def close(self) -> None:
        """End the commit in flight, then release files, memory and threads, and stop a recorder. Again is fine.

        Raises the error of a commit that nobody has seen, or of a recorder, and, unless an exception ends a ``with``
        block, that of ids on a device that were wrong; everything is released even so. What was not committed is
        dropped, which the logger "tierstore" warns of, but for a store in memory or an exception that ends a ``with``
        block."""
        self.__exit__(None)

    def __enter__(self) -> Self:
        return self

    @shielded
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._lifetime.is_over:
            self._lifetime.is_closed = True  # in a fork, what is held is the parent's
            return
        with contextlib.ExitStack() as last:
            last.callback(self._end, kind)
            for feed in filter(None, [known() for known in self._feeds.values()]):
                last.callback(feed.close)

    def _end(self, kind: type[BaseException] | None) -> None:
        self._lifetime.end_calls()
        self._commits.end_writing()
        try:
            self._commits.end_pending()
            if kind is None:
                names = self.changed_tables
                if names and not self.readonly and self.directory is not _IN_MEMORY:
                    _LOG.warning(
                        "%s: changes of %s since the last commit are dropped (%s); call store.commit() before close",
                        self.directory, format_count(len(names), "table"), ", ".join(names[:_MAX_NAMED]),
                    )  # fmt: skip
                self._pools.look()
        finally:
            with self._follower.lock, self._held as held:
                self._lifetime.is_closed = True
                if self.recorder is not None:
                    held.callback(self.recorder.stop)

    def __repr__(self) -> str:
        mode = "r" if self.readonly else "w"
        return f"<Store {str(self.directory)!r} mode={mode!r} version={self.version} tables={list(self.tables)}>"

    def _repr_html_(self) -> str:
        each = (table.config for table in self.tables.values())
        rows = ((c.name, f"{c.num_embeddings:,}", c.embedding_dim, c.dtype, c.optimizer.kind) for c in each)
        shown = html_table(("table", "rows", "columns", "dtype", "optimizer"), *rows)
        return f"{html.escape(str(self.directory))}, version {self.version} of {[*self.versions]}{shown}"

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in OF_MODULES]


_STORES: Final[set[weakref.ref[Store]]] = set()


@atexit.register
def _close_all() -> None:
    """As the process ends, close what nobody closed, but do not wait for ever: a device may never answer."""
    for store in [known() for known in list(_STORES)]:
        if store is not None:
            store.__del__()
    settle(_END_SECONDS)
