"""Processes of this package: children, what forks must not keep of their parent's, and addresses of hosts.

A lock of an open file lasts until the last copy of its descriptor is closed, and a fork copies all: a DataLoader's
worker would keep a store locked after its parent has ended. So an object that holds a lock, or a connection, registers
here, and a child closes its copies before anything else runs in it.
"""

import ctypes
import ipaddress
import os
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Final

from ..errors import ClosedError

_MAX_MARK: Final = 2**31 - 1  # a position that every file system accepts
_ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INHERITED: Final[set[weakref.ref[Any]]] = set()  # a WeakSet's callbacks are in Python


def child_options(stdin: int = subprocess.DEVNULL, /, **variables: str) -> dict[str, Any]:
    """Options of ``subprocess.Popen`` for an interpreter with ``-P``; ``variables``: of its environment.

    It runs the package that was imported here, however that was found, and begins in ``/``: the folder in which this
    process began may be deleted by then, and in a deleted folder torch does not load. So its arguments are absolute.
    """
    found = sys.path[0 if sys.flags.safe_path else 1 :]  # what lies in the folder of the start is no module of ours
    paths = [str(Path(__file__).parents[2]), *(each for each in found if isinstance(each, str) and os.path.isabs(each))]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    return {"cwd": "/", "stdin": stdin, "env": environment}


def launched_rank() -> int | None:
    """Its rank, if torchrun, or what gives torchrun's environment, started it; else None."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in _ENVIRONMENT) else None


def address(host: str, port: int) -> str:
    """As URLs and gRPC have it: "HOST:PORT", an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str, *, may_be_name: bool = True) -> bool:
    """Whether this is an address of this machine's alone, or a host's name for one."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return may_be_name and host.lower() == "localhost"
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def disown_in_forks(inherited: Any) -> None:
    """Have ``inherited.disown()`` called in each process that is forked from this one by Python, while it exists. It
    lets go without changing what the parent goes on using."""
    _INHERITED.add(weakref.ref(inherited, _INHERITED.discard))


def keep_for_ever(*parts: object) -> None:
    """Have these never finalised, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parts))


def _disown_all() -> None:
    for known in list(_INHERITED):
        if (inherited := known()) is not None:
            inherited.disown()
    _INHERITED.clear()


os.register_at_fork(after_in_child=_disown_all)


def require_own(process_id: int, what: str, way: str) -> None:
    """ClosedError, which says the way, if this process is a fork of the one that made it."""
    if process_id != os.getpid():
        raise ClosedError(f"{what} is of process {process_id}, of which this is a fork; {way}")


class OwnDescriptor:
    """An open file, by a descriptor that somebody else in the process may close (``os.closerange`` does). Its number
    may be another file's then. So it has a position of its own, which is looked at after each use. A forked child
    closes its copy. OSError: the file cannot be opened."""

    def __init__(self, path: "str | os.PathLike[str]", flags: int) -> None:
        self._path = path
        self._mark = random.SystemRandom().randint(1, _MAX_MARK)
        self.number = -1
        disown_in_forks(self)
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o666)
        os.lseek(self.number, self._mark, os.SEEK_SET)
        status = os.fstat(self.number)
        self.identity: Final = status.st_dev, status.st_ino

    def is_held(self) -> bool:
        try:
            return os.lseek(self.number, 0, os.SEEK_CUR) == self._mark
        except OSError:
            return False

    def lost(self) -> ClosedError:
        return ClosedError(
            f"{self._path}: somebody in this process closed descriptors of the store (os.closerange does); close the "
            "store, and open it in another process"
        )

    def close(self) -> None:
        """Close it if it is held; again is fine."""
        is_held = self.is_held()
        number, self.number = self.number, -1
        if is_held:
            os.close(number)

    disown = close
