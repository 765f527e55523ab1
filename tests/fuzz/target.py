"""Hostile input for everything that reads a file: what a target is, the bounds it runs within, and random changes.

A target feeds bytes to a reader. Only what its documentation names may leave it; anything else, a crash, a hang or
memory out of proportion is a finding.
"""

import atexit
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

MEMORY_BYTES = 256 * 2**20
"""More than any target needs beyond what its start took; no input is larger than a few hundred KB."""
SECONDS = 20
INPUT_BYTES_MAX = 1 << 16
INTERESTING = (
    *(0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)


@dataclass(frozen=True, kw_only=True)
class Target:
    read: Callable[[bytes], Any]
    check: Callable[[Any], None] = lambda found: None  # of what ``read`` returns
    seeds: Callable[[], list[bytes]]  # valid inputs, built by code
    errors: tuple[type[Exception], ...] = ()  # that may leave ``read``, with messages of bounded length
    cost: int = 1  # of an input: so many times fewer are tried
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
    folder = tempfile.mkdtemp(prefix="tierstore-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def bounded() -> Iterator[None]:
    """FindingError if the block takes more memory or time than any input may."""

    def expired(*_: object) -> None:
        raise FindingError(f"more than {SECONDS} s for one input")

    before = _peak_bytes()
    previous = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if _peak_bytes() > before + MEMORY_BYTES:
        raise FindingError(f"{(_peak_bytes() - before) >> 20} MiB for one input")


def mutations(seeds: Sequence[bytes], words: Sequence[bytes], count: int) -> Iterator[bytes]:
    random = Random(0)
    for _ in range(count):
        data = bytearray(random.choice(seeds))
        for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
            _change(data, seeds, words, random)
        yield bytes(data[:INPUT_BYTES_MAX])


def _change(data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes], random: Random) -> None:
    place, width = random.randrange(len(data) + 1), random.choice((1, 2, 4, 8))
    match random.randrange(6):
        case 0 if data:
            data[place % len(data)] ^= 1 << random.randrange(8)
        case 1:
            value = random.choice(INTERESTING) % 2 ** (8 * width)
            data[place : place + width] = value.to_bytes(width, random.choice(("little", "big")))
        case 2:
            del data[place : place + random.randrange(1, 64)]
        case 3:
            data[place:place] = data[place : place + random.randrange(1, 64)] * random.choice((1, 2, 200))
        case 4 if words:
            data[place:place] = random.choice(words) * random.choice((1, 1, 1, 500))
        case _:
            other = random.choice(seeds)
            start = random.randrange(len(other) + 1)
            data[place:] = other[start : start + 4096]
