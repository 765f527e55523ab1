"""How long a store may be used, and how often it moved to another version meanwhile."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from ..errors import ClosedError, ReadOnlyError, TierstoreError
from ..system.signals import turns
from .version import Version

_T = TypeVar("_T")


class Lifetime:
    """Of one store. Its parts have this in place of the store, which they would keep alive once nobody uses it."""

    def __init__(self, directory: Path, *, readonly: bool) -> None:
        self.directory = directory
        self.place: Final = directory.resolve() if directory.is_absolute() else directory
        """Found once: later its file system may be dead."""
        self.readonly = readonly
        self._process_id = os.getpid()
        self.is_closed = True  # until all parts of the store are there
        self._calls: list[tuple[int, str]] = []

    @contextlib.contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Within it, what ``close`` would release is in use, perhaps by the caller of ``close``."""
        call = threading.get_ident(), name
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def end_calls(self) -> None:
        """Wait for those of other threads. TierstoreError if one is this thread's."""
        for seconds in turns():
            calls = list(self._calls)
            if own := [name for ident, name in calls if ident == threading.get_ident()]:
                raise TierstoreError(
                    f"the store at {self.directory} cannot be closed within its {own[0]}, by what that calls or a "
                    "signal's handler; let it return or raise, and close the store then"
                )
            if not calls:
                return
            time.sleep(seconds)

    def keep(self, *parts: object) -> None:
        """Keep what closing needs until ``let_go``: the garbage collector clears weak references to what it finds."""
        _KEPT[self] = parts

    def let_go(self) -> None:
        _KEPT.pop(self, None)

    @property
    def is_over(self) -> bool:
        return self.is_closed or self._process_id != os.getpid()

    def require_open(self) -> None:
        """ClosedError after ``close``, and in a process forked since the store was opened."""
        if self._process_id != os.getpid():
            raise ClosedError(
                f"the store at {self.directory} was opened by process {self._process_id}, of which this is a fork; "
                'open it again here, with mode="r" if the other goes on writing'
            )
        if self.is_closed:
            raise ClosedError(f"the store at {self.directory} is closed; open it again with tierstore.open")

    def require_writable(self) -> None:
        """ClosedError, or ReadOnlyError for mode="r"."""
        self.require_open()
        if self.readonly:
            raise ReadOnlyError(
                f'the store at {self.directory} was opened with mode="r"; open it with mode="w" to change it'
            )


_KEPT: Final[dict[Lifetime, tuple[object, ...]]] = {}
os.register_at_fork(after_in_child=_KEPT.clear)


def is_open_here(directory: Path) -> bool:
    """Whether this process has the store in ``directory`` open for writing, even if nobody refers to it any more."""
    found = directory.resolve()
    return any(not each.readonly and each.place == found for each in list(_KEPT))


class Shown:
    """What a store shows besides rows, and a count of its moves to other versions: ``changes`` is twice their number,
    odd during one. A lookup that met one is made again, so lookups need no lock (a sequence lock: the Linux kernel's
    documentation, seqlock). The commit thread has this and not the catalog, which keeps the store alive."""

    version: Version  # the part of it that is not rows
    committed: dict[str, int]  # ``num_changes`` of each table as of that version

    def __init__(self) -> None:
        self.changes = 0
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Within it rows become another version's. Locks: the follower's, this, of dynamic ids, of the pools."""
        with self._lock:
            self.changes += 1
            try:
                yield
            finally:
                self.changes += 1

    def at_one(self, look_up: Callable[[], _T], undo: Callable[[], None] | None = None) -> _T:
        """``look_up()``, with rows of one version. It may be called a second time, after ``undo()``."""
        before = self.changes
        if not before & 1:
            try:
                found = look_up()
            except Exception:
                if self.changes == before:
                    raise
            else:
                if self.changes == before:
                    return found
            if undo is not None:
                undo()
        with self._lock:
            return look_up()
