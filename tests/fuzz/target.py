"""What a fuzz target is, and the bounds it runs within."""

import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_BYTES = 256 * 2**20
"""More than any target needs beyond what its start took; no input is larger than a few hundred KB."""
SECONDS = 20


@dataclass(frozen=True, kw_only=True)
class Target:
    read: Callable[[bytes], Any]
    check: Callable[[Any], None] = lambda found: None  # of what ``read`` returns
    seeds: Callable[[], list[bytes]]  # valid inputs, built by code
    errors: tuple[type[Exception], ...] = ()  # that may leave ``read``, with messages of bounded length
    mutations: int = 400  # inputs that the suite tries
    words: bytes = b""  # that the format is made of, for mutations, with | between

    @property
    def dictionary(self) -> tuple[bytes, ...]:
        return tuple(self.words.split(b"|")) if self.words else ()

    def run(self, data: bytes) -> None:
        try:
            found = self.read(data)
        except self.errors as error:
            if len(str(error)) > 1000:
                raise FindingError("an error without bound") from error
        else:
            self.check(found)


class FindingError(AssertionError):
    """An input that a target takes too long or too much memory for, or reads wrongly."""


def scratch_folder() -> Path:
    """An empty folder in memory, where the system has one; the process that asked removes it at its end."""
    import atexit
    import shutil

    memory = Path("/dev/shm")
    folder = tempfile.mkdtemp(prefix="tierstore-fuzz-", dir=memory if os.access(memory, os.W_OK) else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def bounded() -> Iterator[None]:
    """FindingError if the block takes more memory or time than any input may."""

    def expired(*_: object) -> None:
        raise FindingError(f"more than {SECONDS} s for one input")

    before = peak_bytes()
    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if peak_bytes() > before + MEMORY_BYTES:
        raise FindingError(f"{(peak_bytes() - before) >> 20} MiB for one input")
