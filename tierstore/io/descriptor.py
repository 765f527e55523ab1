"""A descriptor that knows whether it is its own still."""

import os
import random
from typing import Final

from ..errors import ClosedError
from ..system.forks import disown_in_forks

__all__ = ["OwnDescriptor"]

_MAX_MARK: Final = 2**31 - 1
"""A position that every file system accepts."""


class OwnDescriptor:
    """An open file, by a descriptor that somebody else in the process may close (``os.closerange`` does).

    Its number may be another file's then. So it has a position of its own, which only copies of it share and which is
    looked at after each use. A forked child closes its copy.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: "str | os.PathLike[str]", flags: int) -> None:
        self._path = path
        self._mark = random.SystemRandom().randint(1, _MAX_MARK)
        self.number = -1
        disown_in_forks(self)
        self.number = os.open(path, flags | os.O_CLOEXEC, 0o644)
        os.lseek(self.number, self._mark, os.SEEK_SET)
        status = os.fstat(self.number)
        self.identity: Final = status.st_dev, status.st_ino

    def is_held(self) -> bool:
        """Whether nobody closed it."""
        try:
            return os.lseek(self.number, 0, os.SEEK_CUR) == self._mark
        except OSError:
            return False

    def lost(self) -> ClosedError:
        """What to raise if it is not held."""
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

    def disown(self) -> None:
        """See ``forks.Inherited``."""
        self.close()
