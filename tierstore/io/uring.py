"""Reads of a file, many in flight from one thread: io_uring, set up by its system calls.

A ring is a queue of requests and one of completions, in memory shared with the kernel, which takes requests within
``io_uring_enter``, and adds completions at any time. It looks up the file and the buffers once, and pins the buffers:
until a read in flight ends, nobody else gets the memory that it writes to.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import JIT_ENABLED
from ..kernels.jit import uncounted_helper as inline
from ..system.page_cache import map_shared, unmap
from ..system.processes import OwnDescriptor, disown_in_forks
from ..system.signals import ClosedWhenDropped

DEPTH: Final = 128  # reads in flight
BUFFER_WORDS: Final = DEPTH * 512
_REQUEST_WORDS: Final = 8
_AT_ONCE: Final = 32  # reads that are waited for
_MOST_FAILURES: Final = 3  # one after another, before a file has no rings any more; a read may be cut short once
_MOST_REFUSALS: Final = 10_000  # one after another; the system refuses to wait while a signal is there, for one
_IN_FLIGHT, _UINT32 = 1 << 40, 2**32 - 1
CACHED, DIRECT = 0, 1  # the registered files: pages that are read stay in the page cache, or pass it by
_SETUP, _ENTER, _REGISTER = 425, 426, 427  # system calls, on every processor
_REQUESTS_AT: Final = 0x10000000  # IORING_OFF_SQES
_GET_EVENTS, _BUFFERS, _FILES = 1, 0, 2  # what is waited for; what is registered
_READ_FIXED: Final = 4 | 1 << 8  # IORING_OP_READ_FIXED, IOSQE_FIXED_FILE

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.argtypes = [ctypes.c_long] * 7


class Queues(NamedTuple):
    """What kernels need of a ring, and what they know of its reads; with descriptor -1 of none, which reads a map."""

    descriptor: int
    buffers: Words  # or the map
    reads: Int64s  # int64 [reads in flight, 4]: of each, first row, where rows stop, first page, bytes
    got: Int64s = np.empty(0, np.int64)  # int64 [reads in flight]: bytes, below 0 an error
    requests: Words = np.empty(0, np.uint64)  # uint64 [DEPTH * _REQUEST_WORDS]
    shared: NDArray[np.uint32] = np.empty(0, np.uint32)
    places: tuple[int, ...] = (0, 0, 0, 0, 0)  # in ``shared``: head and tail of requests, of completions, and those


if JIT_ENABLED:
    from numba import types
    from numba.core.types import ExternalFunction
    from numba.extending import intrinsic

    _syscall: Any = ExternalFunction("syscall", types.int64(*[types.int64] * 7))

    @intrinsic
    def fence(typing_context: Any) -> Any:  # noqa: ARG001
        """What is read or written before it is so before what comes after."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

else:
    _syscall, fence = _libc.syscall, lambda: None


@inline
def begin_read(queues: Queues, file: int, slot: int, start: int, size: int, room: int) -> None:
    """Have so many bytes of a registered file read when ``wait`` is called, into the buffers from word slot * room."""
    tail = np.int64(queues.shared[queues.places[1]])
    request = _REQUEST_WORDS * (tail & (DEPTH - 1))
    queues.requests[request] = np.uint64(_READ_FIXED | file << 32)
    queues.requests[request + 1] = np.uint64(start)
    queues.requests[request + 2] = np.uint64(np.int64(queues.buffers.ctypes.data) + 8 * room * slot)
    queues.requests[request + 3] = np.uint64(size)
    queues.requests[request + 4] = np.uint64(slot)
    queues.shared[queues.places[1]] = np.uint32((tail + 1) & _UINT32)
    queues.got[slot] = _IN_FLIGHT


@inline
def wait(queues: Queues, slot: int) -> int:
    """What a read got: bytes, or below 0 an error; _IN_FLIGHT if the ring is lost."""
    shared, got, refusals = queues.shared, queues.got, 0
    first, end, done_first, done_end, all_done = queues.places
    while got[slot] == _IN_FLIGHT and refusals < _MOST_REFUSALS:
        requests = (np.int64(shared[end]) - np.int64(shared[first])) & _UINT32
        head = np.int64(shared[done_first])
        in_flight = (np.int64(shared[end]) - head) & _UINT32
        entered = _syscall(_ENTER, queues.descriptor, requests, min(_AT_ONCE, in_flight), _GET_EVENTS, 0, 0)
        refusals = 0 if entered >= 0 else refusals + 1
        tail = np.int64(shared[done_end])
        fence()
        while head != tail:
            done = all_done + 4 * (head & (2 * DEPTH - 1))
            got[np.int64(shared[done])] = np.int64(np.int32(shared[done + 2]))
            head = (head + 1) & _UINT32
        fence()
        shared[done_first] = np.uint32(head)
    return int(got[slot])


def _call(*arguments: int) -> int:
    if (result := int(_libc.syscall(*arguments, *[0] * (7 - len(arguments))))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Ring(ClosedWhenDropped):
    """Reads of an open file, by one thread at a time. OSError: the system refuses io_uring or so much pinned memory, or
    the file system direct reads."""

    def __init__(self, file: int) -> None:
        given = np.zeros(30, np.uint32)  # struct io_uring_params
        self._descriptor = ring = _call(_SETUP, DEPTH, given.ctypes.data)
        disown_in_forks(self)
        numbers, *places = (given[[16, 10, 11, 20, 21, 25]] // 4).tolist()
        self._maps: list[tuple[int, int]] = []
        shared = self._map(max(numbers + DEPTH, places[-1] + 8 * DEPTH), np.uint32, 0)
        shared[numbers : numbers + DEPTH] = np.arange(DEPTH)
        requests = self._map(_REQUEST_WORDS * DEPTH, np.uint64, _REQUESTS_AT)
        # Shared memory: a fork while it is read into leaves it to this process.
        buffers = np.frombuffer(mmap.mmap(-1, 8 * BUFFER_WORDS), np.uint64)
        buffers.flags.writeable = False
        parts = np.array([buffers.ctypes.data, buffers.nbytes])
        _call(_REGISTER, ring, _BUFFERS, parts.ctypes.data, 1)
        path = f"/proc/self/fd/{file}"
        with open(path, "rb", 0) as cached, open(os.open(path, os.O_RDONLY | os.O_DIRECT), "rb", 0) as direct:
            os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            files = np.array([cached.fileno(), direct.fileno()], np.int32)
            _call(_REGISTER, ring, _FILES, files.ctypes.data, 2)
        room = np.empty((DEPTH, 4), np.int64), np.empty(DEPTH, np.int64)
        self.queues: Queues | None = Queues(ring, buffers, *room, requests, shared, tuple(places))

    def _map(self, length: int, dtype: Any, offset: int) -> NDArray[Any]:
        size = length * np.dtype(dtype).itemsize
        address = map_shared(self._descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        self._maps.append((address, size))
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)

    def close(self) -> None:
        """Unmap it, and close it unless somebody did (``os.closerange``)."""
        self.queues = None
        with contextlib.suppress(OSError, AttributeError):
            while self._maps:
                unmap(*self._maps.pop())
            if os.readlink(f"/proc/self/fd/{self._descriptor}") == "anon_inode:[io_uring]":
                os.close(self._descriptor)
        self._descriptor = -1

    disown = close  # what a forked process has of it


class Rings:
    """The rings of an open file: one for each thread that reads at a time, made when it is wanted."""

    def __init__(self, file: OwnDescriptor) -> None:
        self._file = file
        self._lock = threading.RLock()
        self.idle: list[Ring] = []  # that nobody has
        self._is_refused = self._had_one = False
        self._failures = 0

    def take(self) -> Ring | None:
        """A ring for the caller, to be put back; None if the system refuses one, for good if it is the first.
        ClosedError: somebody closed the file's descriptor."""
        with self._lock:
            if self.idle or self._is_refused:
                return self.idle.pop() if self.idle else None
            try:
                ring = Ring(self._file.number)
            except OSError:
                self._is_refused = not self._had_one  # else others pin as much memory as the user may, for now
                return None
            if not self._file.is_held():  # it may be of another file
                raise self._file.lost()
            self._had_one = True
            return ring

    def put_back(self, ring: Ring, *, has_failed: bool) -> None:
        """One of which a read failed is dropped; after some failures in a row none is made any more."""
        with self._lock:
            self._failures = self._failures + 1 if has_failed else 0
            if self._failures >= _MOST_FAILURES:
                self.close()
            elif self._is_refused:
                ring.close()
            elif not has_failed:
                self.idle.append(ring)

    def close(self) -> None:
        """Close the idle ones; no more are made."""
        with self._lock:
            self._is_refused = True
            while self.idle:
                self.idle.pop().close()
