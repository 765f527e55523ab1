"""The commits of a store open for writing: written one after another by a thread, while training goes on."""

import contextlib
import math
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from ..errors import TableError, TierstoreError
from ..io.base import ColdTier
from ..pool.writeback import WriteBack
from ..system.killpoints import reach
from ..system.processes import require_own
from ..system.signals import Flag, turns
from .catalog import Catalog
from .lifetime import Shown
from .pools import Pools
from .table_ids import TableIds
from .version import pack, unpack

_Frozen = Sequence[WriteBack | TableIds]  # until ``write_frozen``, or ``abandon``, which makes it the next version's


class PendingCommit(Future[int]):
    """The future of ``Store.commit_async``; ``version`` is its number from the start. ``wanted`` is set once somebody
    waits for it: until then its writer leaves most of the processor to others."""

    def __init__(self, version: int, writer: str = "") -> None:
        super().__init__()
        self.version = version
        self._writer = writer  # the name of the thread that writes it
        self.wanted: Final = Flag()
        self.was_seen = False  # what became of it
        self._process_id = os.getpid()

    def result(self, timeout: float | None = None) -> int:
        """Wait until the version is durable; its number. TimeoutError: it is not, after ``timeout`` seconds.
        DiskFullError: the last version stands, and the rows are still in memory, part of the next commit."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the version is durable, or has failed; the error, if there was one. ClosedError in a forked
        process, where no thread writes it."""
        require_own(self._process_id, f"the commit of version {self.version}", "ask for its result there")
        self.end(timeout)
        error = super().exception(0)
        self.was_seen = True
        return error

    def end(self, timeout: float | None = None) -> None:
        """Wait for its end, or so long. TierstoreError in a callback of a commit before it."""
        self.wanted.set()
        for seconds in turns(math.inf if timeout is None else timeout):
            if self.done():
                return
            _require_elsewhere(self._writer, f"version {self.version} is waited for")
            wait([self], seconds)

    def cancel(self) -> bool:
        """False: a version that has begun is written."""
        return False


class Commits:
    """Makes versions, which ``thread`` writes, and goes back to them. One thread at a time may call it."""

    def __init__(self, directory: Path, cold: ColdTier, catalog: Catalog, pools: Pools) -> None:
        self._directory = directory
        self._cold = cold
        self._catalog = catalog
        self._pools = pools
        self._pending: PendingCommit | None = None
        self._checkpoint = 0
        name = f"tierstore-commit-{id(self)}"
        self.thread: Final = ThreadPoolExecutor(1, name)  # begins with the first commit
        self._writer = f"{name}_0"

    def begin(
        self, extra: dict[str, Any] | None, tensors: Mapping[str, Tensor] | None, keep: int, dropped: Collection[int]
    ) -> PendingCommit:
        self.end_pending()
        catalog, version = self._catalog, self._catalog.version
        if version.has_checkpoint and version.number not in dropped:
            self._checkpoint = version.number
        if tensors is None:
            self._require_droppable(keep, dropped)
        lineage = version.lineage.following(version.number)
        payload = pack(catalog.states, extra or {}, dict(tensors or {}), lineage)
        self._pending = pending = PendingCommit(catalog.epoch, self._writer)
        try:
            with catalog.ids_locked():  # nothing is admitted between the two
                frozen: _Frozen = [*(pool.writeback for pool in self._pools.freeze(pending.wanted)), *catalog.ids]
                for ids in catalog.ids:
                    ids.freeze(pending.version)
            parts = pending, frozen, self._cold, catalog.shown, payload, keep, dropped, catalog.num_changes
            reach("commit: rows frozen")
            self.thread.submit(_finish, *parts).add_done_callback(
                lambda ended: None if pending.done() else _give_up(pending, frozen, ended.exception())
            )
        except BaseException:
            if Future.cancel(pending):  # the thread has not begun
                self._pending = None
                _give_up(None, [*(pool.writeback for pool in self._pools), *catalog.ids])
            raise
        return pending

    def _require_droppable(self, keep: int, dropped: Collection[int]) -> None:
        """ValueError if a commit of rows alone would drop the newest checkpoint of dense weights."""
        before = [version for version in self._cold.versions if version not in dropped]
        if self._checkpoint in before[: len(before) + 1 - keep]:
            raise ValueError(
                f"version {self._checkpoint} of {self._directory} has dense weights, which tierstore.checkpoint.save "
                f"wrote, and a commit without any would drop it (keep={keep}): call tierstore.checkpoint.save again, "
                f"open the store with keep={keep + 1} or more, or drop them by commit(tensors={{}})"
            )

    def end_writing(self) -> None:
        """Wait for the commit in flight, whether it fails or not. TierstoreError in a callback of one."""
        _require_elsewhere(self._writer, "the store is closed")
        if self._pending is not None:
            self._pending.end()

    def end_pending(self) -> None:
        """Wait for the commit in flight; raise its error if nobody has seen it."""
        pending = self._pending
        error = None if pending is None or pending.was_seen else pending.exception()
        self._pending = None  # not before: the next commit may not begin while one is written
        if self._catalog.version.number != self._cold.version:  # that commit was cut short before it said so
            self._catalog.shown.version = unpack(self._cold.version, self._cold.payload)
        if error is not None:
            raise error

    def rollback(self, version: int) -> None:
        self.end_pending()
        if version not in self._cold.versions:
            kept = ", ".join(map(str, self._cold.versions)) or "none"
            raise ValueError(
                f"version={version} of {self._directory} is not kept; kept: {kept}. Open with keep=N to keep more"
            )
        with (
            self._catalog.shown.changing(), self._catalog.ids_locked(), self._pools.lock,
            contextlib.ExitStack() as held,
        ):  # fmt: skip
            try:
                self._pools.require_unused("go back")
            except TableError as error:
                raise TableError(
                    f"{error}. Or end it: delete its output (del out), and look up under torch.no_grad() what stays; "
                    "zero_grad() of store.optimizer() releases the rows of a backward pass before its step"
                ) from None
            held.callback(self._show)  # the last first, each even if one before it fails
            held.callback(self._cold.rollback, version)
            for ids in self._catalog.ids:
                held.callback(ids.forget)
            held.callback(self._pools.close)

    def _show(self) -> None:
        self._catalog.show(unpack(self._cold.version, self._cold.payload))
        self._catalog.epoch = self._cold.last_version + 1


def _require_elsewhere(writer: str, what: str) -> None:
    """TierstoreError in the thread of that name, which writes a store's commits and would wait for itself."""
    if threading.current_thread().name == writer:
        raise TierstoreError(f"{what} in a callback of a commit, by the thread that writes commits; do so elsewhere")


def _finish(
    pending: PendingCommit, frozen: _Frozen, cold: ColdTier, shown: Shown, payload: bytes, keep: int,
    dropped: Collection[int], num_changes: dict[str, int],
) -> None:  # fmt: skip
    """The commit thread's part, which keeps no store alive: write what was frozen and make it the current version."""
    try:
        if not pending.set_running_or_notify_cancel():
            return
        for each in frozen:
            each.write_frozen()
        reach("commit: frozen rows written")
        version = unpack(pending.version, payload)
        try:
            cold.commit(payload, pending.version, keep=keep, dropped=dropped)
        finally:
            if cold.version == pending.version:
                shown.version, shown.committed = version, num_changes
        pending.set_result(pending.version)
    except BaseException as error:
        if shown.version.number == pending.version:
            error.add_note(f"version {pending.version} is durable")
        _give_up(pending, frozen, error)


def _give_up(pending: PendingCommit | None, frozen: _Frozen, error: BaseException | None = None) -> None:
    with contextlib.ExitStack() as stack:
        if pending is not None:
            stack.callback(pending.set_exception, error)
        for each in frozen:
            stack.callback(each.abandon)
