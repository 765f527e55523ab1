"""How long a store may be used: until it is closed, and in the process that opened it."""

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

from ..errors import ClosedError, ReadOnlyError
from ..system.unpicklable import Unpicklable

__all__ = ["Lifetime"]


class Lifetime(Unpicklable, ABC):
    """Base of an open store: a context manager that closes it.

    Attributes:
        directory: of the store, absolute.
        readonly: whether it was opened with mode="r".
    """

    def __init__(self, directory: Path, *, readonly: bool) -> None:
        self.directory = directory
        self.readonly = readonly
        self._process_id = os.getpid()
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether the store was closed, or this process was forked since it was opened."""
        return self._is_closed or self._process_id != os.getpid()

    def end(self) -> None:
        """Refuse further use."""
        self._is_closed = True

    def require_open(self) -> None:
        """ClosedError after ``close``, and in a process forked since the store was opened."""
        if self._process_id != os.getpid():
            raise ClosedError(
                f"the store at {self.directory} was opened by process {self._process_id}, of which this is a fork; "
                'open it anew here, with mode="r" if the other goes on writing'
            )
        if self._is_closed:
            raise ClosedError(f"the store at {self.directory} is closed; open it again with tierstore.open")

    def require_writable(self) -> None:
        """ClosedError, or ReadOnlyError for mode="r"."""
        self.require_open()
        if self.readonly:
            raise ReadOnlyError(
                f'the store at {self.directory} was opened with mode="r"; open it with mode="w" to change it'
            )

    @abstractmethod
    def close(self) -> None:
        """Release what the store holds; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
