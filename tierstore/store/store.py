"""A store: a directory of embedding tables, one version at a time, larger than memory."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from ..config import TableConfig
from ..errors import ClosedError, ReadOnlyError, TableError, TierstoreError
from ..hbm.build import require_supported
from ..io import ColdTier, LmdbColdTier, MemoryColdTier, NewerVersion, VerifyReport
from ..kernels.threads import Workers
from ..optim import SGD
from ..pool import Pool
from ..pool.converting import Converter, RowSource
from ..pool.stats import Stats
from ..rows import DtypeName, RowLayout
from ..settings.names import nearest
from ..system.durable import make_directory
from ..system.killpoints import reach
from ..system.signals import shielded
from ..system.unpicklable import Unpicklable
from .beginning import open_manifest
from .manifest import Manifest
from .newer import Newer, changed_rows, require_same_tables
from .pending import PendingCommit
from .pools import Memory, Pools, require_unused, retire
from .table import Table
from .tiers import store_stats
from .version import TableState, Version, pack, unpack, unpack_tensors

if TYPE_CHECKING:
    from .backup import BackupReport
    from .recording import Recorder

__all__ = ["Store"]

_IN_MEMORY: Final = Path(":memory:")
"""In the place of a directory where there is none."""


class Store(Unpicklable):
    """An open store; made by ``tierstore.open``. A context manager that closes it.

    Any number of threads may read while one trains; commits, ``rollback``, ``create_table`` and ``close`` are for the
    latter. ``directory`` is where its files are, or ``:memory:``.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        readonly: bool,
        version: int | None,
        keep: int,
        slack: float,
        ddr: int | str,
        hbm: int | str,
        device: torch.device,
        policy: str,
        threads: int,
        dtype: DtypeName | Literal["stored"] | None,
    ) -> None:
        self.directory = _IN_MEMORY if directory is None else directory.absolute()
        self.readonly = readonly
        self._memory = Memory(ddr=ddr, hbm=hbm, device=device, policy=policy)
        self._keep = keep
        self._dtype = dtype
        self._converter = Converter()
        self.device = device
        self._closed = False
        self._pools: dict[RowLayout, Pool] = {}
        self._pools_lock = threading.RLock()
        self._moving = threading.RLock()  # taken before the other; held while a newer version is read or shown
        self._num_finds = 0
        self._reserved_bytes = 0
        self._version = Version(0, {}, {}, b"")
        self._tables: dict[str, Table] = {}
        self.recorder: Recorder | None = None
        self._added: dict[int, tuple[RowLayout, int]] = {}
        self._process_id = os.getpid()
        self._pending: PendingCommit | None = None
        self._committer: ThreadPoolExecutor | None = None
        self._found: NewerVersion | None = None
        self._files: LmdbColdTier | None = None
        if directory is not None and not readonly:
            make_directory(self.directory)
        self._manifest = open_manifest(None if directory is None else self.directory, readonly=readonly)
        self._workers = Workers(threads)
        if directory is not None:
            store_id = bytes.fromhex(self._manifest.store_id)
            self._files = LmdbColdTier(
                self.directory, store_id=store_id, readonly=readonly, version=version, slack=slack
            )
        self._cold: ColdTier = self._files or MemoryColdTier()
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    # Opening

    def _load(self) -> None:
        """Check that the files belong together, make the tables known, read the last version."""
        self._epoch = self._cold.last_version + 1
        if self._files is not None:
            self._manifest.require_row_file(self._files.path, self._files.page_bytes)
            if not self.readonly:
                # Another writer may have made tables before the lock was ours.
                self._manifest = Manifest.read(self.directory)
                if not self._manifest.has_rows:
                    self._save(replace(self._manifest, has_rows=True))
        version = unpack(self._cold.version, self._cold.payload)
        if self.readonly:
            # A writer may have made tables, and committed, after the manifest was read.
            self._manifest = version.manifest_of(Manifest.read(self.directory))
        for config in self._manifest.tables:
            self._require_supported(config)
            self._add(config)
        self._show(version)

    def _save(self, manifest: Manifest) -> None:
        """Have this be the store's manifest."""
        if self._files is not None:
            manifest.write(self.directory)
        self._manifest = manifest

    def _show(self, version: Version) -> None:
        """Take over what a version keeps beside rows."""
        version.require_of(self._tables.keys())
        for name, table in self._tables.items():
            table.restore(version.tables.get(name, TableState(0, table.config.optimizer.lr)))
        self._version = version

    def _require_supported(self, config: TableConfig) -> None:
        """TableError for a table that the tier in device memory, if there is one, cannot have."""
        if self._memory.has_hbm:
            if self._dtype is not None and self._dtype != "stored":
                config = replace(config, dtype=self._dtype, optimizer=SGD())
            require_supported(config, readonly=self.readonly)

    def _add(self, config: TableConfig) -> Table:
        index = len(self._tables)
        table = Table(self, config, index, self._enter(config, index))
        self._tables[config.name] = table
        if self.recorder is not None:
            self.recorder.add_table(config.name)
        return table

    def _enter(self, config: TableConfig, index: int) -> RowLayout:
        """Make a table known to the cold tier, unless it is; how its rows lie in memory."""
        stored = config.layout(self._manifest.page_bytes)
        kept = stored if self._dtype is None else self._converter.keep(index, config.name, stored, self._dtype)
        shape = stored, config.num_embeddings
        if self._added.get(index) != shape:
            self._cold.add_table(index, *shape)
            self._added[index] = shape
        return kept

    def _leave(self, first: int) -> None:
        """Have the cold tier of a store open for reading forget the tables from index ``first`` on."""
        if len(self._added) > first:
            self._cold.drop_tables(first)
            self._added = {index: shape for index, shape in self._added.items() if index < first}

    # Tables

    @shielded
    def create_table(self, config: TableConfig) -> Table:
        """Add a table, durably; a table of the same configuration is returned as it is.

        Creating a table is not part of a version: it is there, empty, whatever is committed.

        Raises:
            TableError: the name is taken by another configuration, rows are pinned by batches under way, or the tier
                in device memory cannot have the table.
            BudgetError: the system refuses memory for the map of the rows. ReadOnlyError, ClosedError.
        """
        self.require_writable()
        if not isinstance(config, TableConfig):
            raise TypeError(f"create_table takes a TableConfig, not {type(config).__name__}")
        known = self._tables.get(config.name)
        if known is not None:
            if known.config == config:
                return known
            raise TableError(
                f"table {config.name!r} exists as {known.config}; choose another name or the same configuration"
            )
        self._require_supported(config)
        config.layout(self._manifest.page_bytes).pages_per_block  # noqa: B018 - ValueError for rows too wide
        self._end_pending()
        with self._pools_lock:  # pools are made for all tables there are
            manifest = self._manifest.with_table(config)
            self._retire_pools()
            table = self._add(config)
            try:
                self._save(manifest)
            except BaseException:
                del self._tables[config.name]
                raise
        return table

    def __getitem__(self, name: str) -> Table:
        """The table of that name; TableError names the nearest one there is."""
        if table := self._tables.get(name):
            return table
        raise TableError(f"no table {name!r} in {self.directory}; {nearest(str(name), sorted(self._tables))}")

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    @property
    def tables(self) -> Mapping[str, Table]:
        """All tables by name, in order of creation."""
        return MappingProxyType(self._tables)

    # Pools

    def pool_of(self, layout: RowLayout) -> Pool:
        """The pool that rows of this layout live in; pools are made at first use, when all tables are known."""
        with self._pools_lock:
            self.require_open()
            if not self._pools:
                self._pools = self._build_pools()
            return self._pools[layout]

    def _build_pools(self) -> dict[RowLayout, Pool]:
        made = Pools.build(
            list(self._tables.values()),
            self._memory,
            self._cold,
            self._workers,
            epoch=self._epoch,
            readonly=self.readonly,
            read=self._source(self._cold.read),
        )
        self._reserved_bytes = made.reserved_bytes
        return made.by_layout

    def _source(self, read: RowSource) -> RowSource:
        """What reads rows as they are kept in memory, by what reads them as they are stored."""
        if self._dtype is None:
            return read
        return lambda keys, slots, weights, _state, present: self._converter.read(read, keys, slots, weights, present)

    def _retire_pools(self) -> None:
        """Write dirty rows back and forget the caches; the next use makes new ones."""
        with self._pools_lock:
            retire(self._pools.values())
            self._close_pools()

    def _close_pools(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    # Versions

    @shielded
    def commit(self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None) -> int:
        """Make all rows, optimizer state, ``extra`` and ``tensors`` the current version, atomically and durably.

        Args:
            extra: such as the reader's position; what Python's json gives back as it was: str keys, lists instead of
                tuples. NaN and infinity are kept.
            tensors: dense weights, random states and the like.

        Returns:
            the version's number, above those before.

        Raises:
            DiskFullError: nothing changed; the last version stands and the rows are still in memory.
            TypeError: ``extra`` or ``tensors`` cannot be stored.
        """
        return self.commit_async(extra=extra, tensors=tensors).result()

    @shielded
    def commit_async(
        self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None
    ) -> PendingCommit:
        """Commit what is there now, and go on while it is written.

        The caller waits until ``extra`` and ``tensors`` are copied and the rows to be written are marked. What changes
        afterwards belongs to the next version; whoever changes rows faster than they are written waits. A commit waits
        for the one before it. ``version`` and ``extra`` stay those of the last version until the new one is durable.

        Args, and errors about them: as for ``commit``. Returns:
            the future whose ``result()`` is the version's number once it is durable, or raises. An error that nobody
            asked it for is raised by the next commit, or by ``close``.
        """
        self.require_writable()
        self._end_pending()
        states = {name: table.state for name, table in self._tables.items()}
        payload = pack(states, extra or {}, dict(tensors or {}), self._version.next_lineage())
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._pools_lock)  # whatever pools are made later begin at the next epoch
            pools = list(self._pools.values())
            for pool in pools:
                pool.settle()
            pending = PendingCommit(self._epoch)
            for pool in pools:
                stack.enter_context(pool.writeback.gate)
            for pool in pools:
                stack.enter_context(pool.arena.lock)
            for pool in pools:
                pool.writeback.freeze()
            self._epoch += 1
        reach("commit: rows frozen")
        self._pending = pending
        if self._committer is None:
            self._committer = ThreadPoolExecutor(1, "tierstore-commit")
        self._committer.submit(self._finish, pending, pools, payload)
        return pending

    def _finish(self, pending: PendingCommit, pools: list[Pool], payload: bytes) -> None:
        """Write what was frozen and make it the current version; the commit thread's part."""
        try:
            for pool in pools:
                pool.writeback.write_frozen()
            reach("commit: frozen rows written")
            try:
                self._cold.commit(payload, pending.version, keep=self._keep)
            finally:
                if self._cold.version == pending.version:
                    self._version = unpack(pending.version, payload)
        except BaseException as error:
            for pool in pools:
                pool.writeback.abandon()
            pending.set_exception(error)
        else:
            pending.set_result(pending.version)

    def _end_pending(self) -> None:
        """Wait for the commit under way; raise its error if nobody has seen it."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.unseen_error()
        if error is not None:
            raise error

    @shielded
    def rollback(self, version: int) -> None:
        """Go back to a kept version: later ones, and what was not committed, are dropped.

        Numbers of dropped versions are not used again. Tables that were created later stay, empty.

        Args:
            version: one of ``versions``.

        Raises:
            ValueError: it is not kept.
            TableError: rows are in use by a batch under way.
            ReadOnlyError, ClosedError.
        """
        self.require_writable()
        self._end_pending()
        if version not in self.versions:
            kept = ", ".join(map(str, self.versions)) or "none"
            raise ValueError(
                f"version={version} of {self.directory} is not kept; kept: {kept}. Open with keep=N to keep more"
            )
        with self._pools_lock:
            require_unused(self._pools.values(), "go back")
            self._close_pools()
            self._cold.rollback(version)
            self._show(unpack(version, self._cold.payload))
            self._epoch = self._cold.last_version + 1

    def refresh(self) -> int:
        """Have a store opened with mode="r" show the newest commit of whoever writes it; returns its number.

        No lookup may be under way in this store meanwhile. What the caches hold stays, read anew where it changed. With
        ``version=``, or in a store open for writing, nothing happens.

        Raises: as ``find_newer`` and ``Newer.show``.
        """
        newer = self.find_newer()
        return self.version if newer is None else newer.show()

    @shielded
    def find_newer(self) -> Newer | None:
        """The first part of ``refresh``: make a newer commit ready; None if there is none. Lookups go on meanwhile.

        What an earlier call gave cannot be shown any more. Memory: for rows, at most the part of ``ddr`` that is for
        write staging; 4 bytes a stored row; 8 for each in memory that changed, and, for a moment, 12 for each there.

        Raises:
            DamagedError: what is there is not what was written. StoreReplacedError: its files were deleted, or others
                put in their place. The store goes on to show what it showed.
            TableError: a new table cannot be kept as ``dtype``. BudgetError: nor a map of its rows.
            ClosedError.
        """
        with self._moving:
            self.require_open()
            self.give_up_newer(self._num_finds)
            try:
                return self._find_newer()
            except BaseException:
                self.give_up_newer(self._num_finds)
                raise

    def _find_newer(self) -> Newer | None:
        self._leave(len(self._tables))  # those that an earlier call made ready, and nobody showed
        while True:
            self._found, num_added = self._cold.find_newer(), len(self._added)
            if (found := self._found) is None:
                return None
            version = unpack(found.version, found.payload)
            manifest = version.manifest_of(Manifest.read(self.directory))
            require_same_tables(self.directory, self._manifest, manifest)
            for index, config in enumerate(manifest.tables[len(self._tables) :], len(self._tables)):
                self._require_supported(config)
                self._enter(config, index)
            if len(self._added) == num_added:  # else what was found lacks the rows of a new table
                break
        version.require_of({config.name for config in manifest.tables})
        rows = None
        if manifest.tables == self._manifest.tables:
            pools, room, read = list(self._pools.values()), self._reserved_bytes, self._source(found.read)
            rows = changed_rows(pools, found.is_changed, read, room)
        return Newer(self, self._num_finds, found, version, manifest, rows)

    def give_up_newer(self, number: int) -> None:
        """Drop what the call of ``find_newer`` with this number made ready, if that is still there."""
        if self._closed or self._process_id != os.getpid():
            return
        with self._moving:
            if number == self._num_finds:
                self._num_finds += 1
                for pool in list(self._pools.values()):
                    with pool.arena.lock:
                        pool.filler.arrivals = None
                if self._found is not None:
                    self._found.close()
                    self._found = None

    @shielded
    def show_newer(self, newer: Newer) -> int:
        """See ``Newer.show``."""
        with self._moving, self._pools_lock:
            self.require_open()
            newer.require_of(self._num_finds)
            require_unused(self._pools.values(), "move to a newer version")
            try:
                for rows in newer.rows or ():
                    rows.show()
                newer.found.show()
            except BaseException:
                self._close_pools()
                raise
            finally:
                self.give_up_newer(newer.number)
            if newer.rows is None:
                self._close_pools()
            for name in list(self._tables)[len(newer.manifest.tables) :]:
                self._tables.pop(name).leave()
            self._leave(len(newer.manifest.tables))
            for config in newer.manifest.tables[len(self._tables) :]:
                self._add(config)
            self._manifest = newer.manifest
            self._show(newer.version)
            return self.version

    @property
    def version(self) -> int:
        """Number of the last commit; 0 before the first."""
        return self._version.number

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the kept versions, ascending; the last is the newest."""
        return self._cold.versions

    @property
    def extra(self) -> dict[str, Any]:
        """``extra`` of the last commit."""
        return dict(self._version.extra)

    def tensors(self) -> dict[str, Tensor]:
        """``tensors`` of the last commit, on the CPU; DamagedError if they cannot be read."""
        return unpack_tensors(self._version)

    # Looking at it

    def stats(self) -> Stats:
        """Running totals of each tier since the store was opened."""
        self.require_open()
        pools = list(self._pools.values())
        num_rows = sum(table.config.num_embeddings for table in list(self._tables.values()))
        return store_stats(pools, self._cold, num_rows, self._reserved_bytes if pools else 0)

    def record(self, path: str | os.PathLike[str], *, rate: float = 0.01, max_bytes: int | str = "64MiB") -> "Recorder":
        """Write down which rows are looked up from now on, as a trace; ``recording.Recorder`` says more, and errors.

        Args:
            path: the file, NAME.npz; there must be none yet.
            rate: the share of all rows whose lookups are recorded; 1: every row.
            max_bytes: bound on memory and file; the rate is halved whenever it is reached.
        """
        from .recording import Recorder

        self.recorder = Recorder(self, path, rate=rate, max_bytes=max_bytes)
        return self.recorder

    def verify(self, *, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check the rows of all versions on SSD; count those of now. ``progress(done_bytes, total_bytes)``.

        Raises:
            DamagedError: names the file, the place and the way out.
        """
        self.require_open()
        return self._cold.verify(progress)

    def backup(
        self,
        target: str | os.PathLike[str],
        *,
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> "BackupReport":
        """Copy the store and all versions it keeps into another directory, while others train: ``backup.back_up``."""
        from .backup import back_up

        self.require_open()
        if self._files is None:
            raise TierstoreError('a store in memory has no files to copy; give it a directory, without cold="memory"')
        return back_up(self._files, self.directory, target, verify=verify, progress=progress)

    @property
    def workers(self) -> Workers:
        """Threads for kernels over many rows."""
        return self._workers

    def require_open(self) -> None:
        """ClosedError after ``close``, and in a process forked since the store was opened."""
        if self._process_id != os.getpid():
            raise ClosedError(
                f"the store at {self.directory} was opened by process {self._process_id}, of which this is a fork; "
                'open it anew here, with mode="r" if the other goes on writing'
            )
        if self._closed:
            raise ClosedError(f"the store at {self.directory} is closed; open it again with tierstore.open")

    def require_writable(self) -> None:
        """ClosedError, or ReadOnlyError for mode="r"."""
        self.require_open()
        if self.readonly:
            raise ReadOnlyError(
                f'the store at {self.directory} was opened with mode="r"; open it with mode="w" to change it'
            )

    @shielded
    def close(self) -> None:
        """End the commit under way, then release files, memory and threads; what was not committed is dropped. A
        recorder is stopped. A second call does nothing.

        Raises:
            the error of a commit, if nobody has seen it, or of a recorder; everything is released all the same.
        """
        if self._closed:
            return
        if self._process_id != os.getpid():
            self._closed = True
            return
        try:
            self._end_pending()
        finally:
            with self._moving, contextlib.ExitStack() as stack:  # each, also if one before it fails; the last first
                self._closed = True
                if self.recorder is not None:
                    stack.callback(self.recorder.stop)
                stack.callback(self._cold.close)
                stack.callback(self._workers.close)
                stack.callback(self._close_pools)
                if self._committer is not None:
                    stack.callback(self._committer.shutdown)

    def __del__(self) -> None:
        if hasattr(self, "_cold"):
            self.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        mode = "r" if self.readonly else "w"
        return f"<Store {str(self.directory)!r} mode={mode!r} version={self.version} tables={list(self._tables)}>"
