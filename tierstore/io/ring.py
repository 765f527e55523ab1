"""Reads of a file past the page cache, many in flight from one thread: io_uring, set up by its system calls.

A ring is a queue of requests and one of completions, in memory shared with the kernel. The kernel looks up the file and
the buffers once, and pins the buffers: until a read in flight ends, nobody else gets the memory that it writes to.
The kernel takes requests within ``io_uring_enter``, and adds completions at any time.
"""

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kernels.arrays import Int64s, Words
from ..kernels.jit import JIT_ENABLED
from ..kernels.jit import uncounted_helper as inline
from ..system.forks import OwnDescriptor, disown_in_forks

DEPTH: Final = 128  # reads in flight
BUFFER_WORDS: Final = DEPTH * 512
_REQUEST_WORDS: Final = 8
_AT_ONCE: Final = 32  # reads that are waited for
_MOST_REFUSALS: Final = 10_000  # one after another; the system refuses to wait while a signal is there, for one
_IN_FLIGHT: Final = 1 << 40
_UINT32: Final = 2**32 - 1
_SETUP, _ENTER, _REGISTER = 425, 426, 427  # system calls, on every processor
_REQUESTS_AT: Final = 0x10000000  # IORING_OFF_SQES
_GET_EVENTS: Final = 1
_BUFFERS, _FILES = 0, 2  # what is registered
_READ_FIXED: Final = 4 | 1 << 8  # IORING_OP_READ_FIXED, IOSQE_FIXED_FILE

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long] * 7


class Queues(NamedTuple):
    """What kernels need of a ring, and what they know of its reads; with descriptor -1 of none, which reads a map."""

    descriptor: int
    buffers: Words  # or the map
    reads: Int64s  # int64 [reads in flight, 4]: of each, first row, where rows stop, first page, bytes
    got: Int64s = np.empty(0, np.int64)  # int64 [reads in flight]: bytes, below 0 an error
    requests: Words = np.empty(0, np.uint64)  # uint64 [DEPTH * _REQUEST_WORDS]
    shared: NDArray[np.uint32] = np.empty(0, np.uint32)
    head: int = 0  # places in ``shared``: of the ends of the requests,
    tail: int = 0
    done_head: int = 0
    done_tail: int = 0
    done: int = 0  # and of the completions


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
    _syscall = _libc.syscall

    def fence() -> None:
        pass


@inline
def begin_read(queues: Queues, slot: int, start: int, size: int, room: int) -> None:
    """Have so many bytes of the file read when ``wait`` is called, into the words of the buffers from slot * room."""
    tail = np.int64(queues.shared[queues.tail])
    request = _REQUEST_WORDS * (tail & (DEPTH - 1))
    queues.requests[request + 1] = np.uint64(start)
    queues.requests[request + 2] = np.uint64(np.int64(queues.buffers.ctypes.data) + 8 * room * slot)
    queues.requests[request + 3] = np.uint64(size)
    queues.requests[request + 4] = np.uint64(slot)
    queues.shared[queues.tail] = np.uint32((tail + 1) & _UINT32)
    queues.got[slot] = _IN_FLIGHT


@inline
def wait(queues: Queues, slot: int) -> int:
    """What a read got: bytes, or below 0 an error; _IN_FLIGHT if the ring is lost."""
    shared, got, refusals = queues.shared, queues.got, 0
    while got[slot] == _IN_FLIGHT and refusals < _MOST_REFUSALS:
        requests = (np.int64(shared[queues.tail]) - np.int64(shared[queues.head])) & _UINT32
        head = np.int64(shared[queues.done_head])
        in_flight = (np.int64(shared[queues.tail]) - head) & _UINT32
        entered = _syscall(_ENTER, queues.descriptor, requests, min(_AT_ONCE, in_flight), _GET_EVENTS, 0, 0)
        refusals = 0 if entered >= 0 else refusals + 1
        tail = np.int64(shared[queues.done_tail])
        fence()
        while head != tail:
            done = queues.done + 4 * (head & (2 * DEPTH - 1))
            got[np.int64(shared[done])] = np.int64(np.int32(shared[done + 2]))
            head = (head + 1) & _UINT32
        fence()
        shared[queues.done_head] = np.uint32(head)
    return int(got[slot])


def _call(*arguments: int) -> int:
    if (result := int(_libc.syscall(*arguments, *[0] * (7 - len(arguments))))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Ring:
    """Reads of an open file, by one thread at a time. OSError: the system refuses io_uring or so much pinned memory, or
    the file system direct reads."""

    def __init__(self, file: int) -> None:
        given = np.zeros(30, np.uint32)  # struct io_uring_params
        self._descriptor = ring = _call(_SETUP, DEPTH, given.ctypes.data)
        disown_in_forks(self)
        try:
            numbers, *places = (given[[16, 10, 11, 20, 21, 25]] // 4).tolist()
            shared = np.frombuffer(mmap.mmap(ring, 4 * max(numbers + DEPTH, places[-1] + 8 * DEPTH)), np.uint32)
            shared[numbers : numbers + DEPTH] = np.arange(DEPTH)
            requests = np.frombuffer(mmap.mmap(ring, 8 * _REQUEST_WORDS * DEPTH, offset=_REQUESTS_AT), np.uint64)
            requests[::_REQUEST_WORDS] = _READ_FIXED
            # Shared memory: a fork while it is read into leaves it to this process.
            buffers = np.frombuffer(mmap.mmap(-1, 8 * BUFFER_WORDS), np.uint64)
            buffers.flags.writeable = False
            self._register(_BUFFERS, np.array([buffers.ctypes.data, buffers.nbytes]))
            direct = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            try:
                self._register(_FILES, np.array([direct], np.int32))
            finally:
                os.close(direct)
            room = np.empty((DEPTH, 4), np.int64), np.empty(DEPTH, np.int64)
            self.queues = Queues(ring, buffers, *room, requests, shared, *places)
        except BaseException:
            self.close()
            raise

    def _register(self, kind: int, what: NDArray[Any]) -> None:
        _call(_REGISTER, self._descriptor, kind, what.ctypes.data, 1)

    def close(self) -> None:
        """Unmap it, and close it unless somebody did (``os.closerange``). In a forked process, what that has of it."""
        vars(self).pop("queues", None)
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{self._descriptor}") == "anon_inode:[io_uring]":
                os.close(self._descriptor)
        self._descriptor = -1

    disown = close


class Rings:
    """The rings of an open file: one for each thread that reads at a time, made when it is wanted."""

    def __init__(self, file: OwnDescriptor) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._idle: list[Ring] = []
        self._is_refused = False

    @contextlib.contextmanager
    def lent(self, is_wanted: bool) -> Iterator[Ring | None]:
        """A ring for the block alone; None if the system refuses one, or it is not wanted."""
        with self._lock:
            if is_wanted and not self._idle and not self._is_refused:
                try:
                    self._idle.append(Ring(self._file.number))
                except OSError:
                    self._is_refused = True
            ring = self._idle.pop() if is_wanted and self._idle else None
        try:
            yield ring
        finally:
            if ring:
                self._idle.append(ring)

    def close(self) -> None:
        """Close those that are not lent; no more are made."""
        with self._lock:
            self._is_refused = True
            while self._idle:
                self._idle.pop().close()
