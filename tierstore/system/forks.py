"""What a forked process must not keep of its parent's.

A lock of an open file (``flock``, or an open-file-description lock) lasts until the last copy of its descriptor is
closed, and a fork copies all. So a DataLoader's worker would keep a store locked after its parent has ended. Whoever
holds such a lock registers here, and a child closes its copies before anything else runs in it.
"""

import ctypes
import os
import weakref
from typing import Final, Protocol

__all__ = ["Inherited", "disown_in_forks", "keep_for_ever"]


class Inherited(Protocol):
    """Something that only the process that made it may use."""

    def disown(self) -> None:
        """Called in a forked process: let go without changing what the parent goes on using."""
        ...


_INHERITED: Final["weakref.WeakSet[Inherited]"] = weakref.WeakSet()


def disown_in_forks(inherited: Inherited) -> None:
    """Have ``inherited.disown()`` called in each process that is forked from this one by Python, while it exists."""
    _INHERITED.add(inherited)


def keep_for_ever(*parts: object) -> None:
    """Have these never finalised, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parts))


def _disown_all() -> None:
    for inherited in list(_INHERITED):
        inherited.disown()
    _INHERITED.clear()


os.register_at_fork(after_in_child=_disown_all)
