"""The commits of a store open for writing: written one after another by a thread, while training goes on."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from ..errors import TableError
from ..io import ColdTier
from ..pool import Pool
from ..system.forks import require_own
from ..system.killpoints import reach
from .catalog import Catalog, Shown
from .pools import Pools
from .version import pack, unpack


class PendingCommit(Future[int]):
    """The future of ``Store.commit_async``; its result is the version's number, which ``version`` is from the start.

    Knows whether anybody has looked at how it ended: an error that nobody saw must not be lost.
    """

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self._was_seen = False
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
        error = super().exception(timeout)
        self._was_seen = True
        return error

    def unseen_error(self) -> BaseException | None:
        """Wait for the end; the error, if nobody has seen it. It has been seen then."""
        seen, error = self._was_seen, self.exception()
        return None if seen else error


class Commits:
    """Makes versions and goes back to them. One thread at a time may call it.

    Attributes:
        thread: writes them.
    """

    def __init__(self, directory: Path, cold: ColdTier, catalog: Catalog, pools: Pools) -> None:
        self._directory = directory
        self._cold = cold
        self._catalog = catalog
        self._pools = pools
        self._pending: PendingCommit | None = None
        self._checkpoint = 0
        self.thread: Final = ThreadPoolExecutor(1, "tierstore-commit")  # begins with the first commit

    def begin(self, extra: dict[str, Any] | None, tensors: Mapping[str, Tensor] | None, keep: int) -> PendingCommit:
        """See ``Store.commit_async``. ``keep`` versions stay."""
        self.end_pending()
        if tensors is None:
            self._require_droppable(keep)
        lineage = self._catalog.version.lineage.following(self._catalog.version.number)
        payload = pack(self._catalog.states, extra or {}, dict(tensors or {}), lineage)
        pending = PendingCommit(self._pools.epoch)
        frozen = self._pools.freeze()
        num_changes = self._catalog.num_changes
        reach("commit: rows frozen")
        self._pending = pending
        self.thread.submit(_finish, pending, frozen, self._cold, self._catalog.shown, payload, keep, num_changes)
        return pending

    def _require_droppable(self, keep: int) -> None:
        """ValueError if a commit of rows alone would drop the newest checkpoint of dense weights."""
        version = self._catalog.version
        if version.has_checkpoint:
            self._checkpoint = version.number
        dropped = self._cold.versions[: len(self._cold.versions) + 1 - keep]
        if self._checkpoint in dropped:
            raise ValueError(
                f"version {self._checkpoint} of {self._directory} has dense weights, which tierstore.checkpoint.save "
                f"wrote, and a commit without any would drop it (keep={keep}): call tierstore.checkpoint.save again, "
                f"open the store with keep={keep + 1} or more, or drop them by commit(tensors={{}})"
            )

    def end_pending(self) -> None:
        """Wait for the commit under way; raise its error if nobody has seen it."""
        pending, self._pending = self._pending, None
        error = None if pending is None else pending.unseen_error()
        if error is not None:
            raise error

    def rollback(self, version: int) -> None:
        """See ``Store.rollback``."""
        self.end_pending()
        if version not in self._cold.versions:
            kept = ", ".join(map(str, self._cold.versions)) or "none"
            raise ValueError(
                f"version={version} of {self._directory} is not kept; kept: {kept}. Open with keep=N to keep more"
            )
        with self._pools.lock:
            try:
                self._pools.require_unused("go back")
            except TableError as error:
                raise TableError(
                    f"{error}. Or end it: delete its output (del out), and look up under torch.no_grad() what stays"
                ) from None
            self._pools.close()
            self._cold.rollback(version)
            self._catalog.show(unpack(version, self._cold.payload))
            self._pools.epoch = self._cold.last_version + 1

    def close(self) -> None:
        """Let the thread end."""
        self.thread.shutdown()


def _finish(
    pending: PendingCommit,
    pools: Sequence[Pool],
    cold: ColdTier,
    shown: Shown,
    payload: bytes,
    keep: int,
    num_changes: dict[str, int],
) -> None:
    """Write what was frozen and make it the current version; the commit thread's part, which does not keep a store that
    is dropped meanwhile."""
    try:
        for pool in pools:
            pool.writeback.write_frozen()
        reach("commit: frozen rows written")
        try:
            cold.commit(payload, pending.version, keep=keep)
        finally:
            if cold.version == pending.version:
                shown.version, shown.committed = unpack(pending.version, payload), num_changes
    except BaseException as error:
        for pool in pools:
            pool.writeback.abandon()
        pending.set_exception(error)
    else:
        pending.set_result(pending.version)
