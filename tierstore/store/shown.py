"""Lookups beside a change of version: each shows rows of one version."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

_T = TypeVar("_T")


class Shown:
    """How often a store moved to another version. A lookup that one of them met is made again, so lookups need no lock
    (a sequence lock: the Linux kernel's documentation, seqlock).

    Attributes:
        changes: twice the number of moves; odd during one.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Within it, rows become those of another version. Order: the follower's lock, this, that of the pools."""
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
