"""Reads through a map of a file that end in an error where the system would end the process (SIGBUS).

A page that the device refuses to read, or that lies beyond the end of a file that was cut short, faults where it is
touched. A handler in machine code, which needs no GIL, notes the page and maps zeros over it; the load is repeated and
finds them. A page may turn to zeros and back between two loads of one read. So nothing that was read counts before
``Guard.require`` or ``Guard.refused`` told, whatever its checksum, what was refused since ``Guard.begin``, which maps
the file over refused pages again. A page is noted before its zeros can be seen: each reader of zeros finds it.

The handler takes faults at addresses of its table. It hands all others to the handler that was there before, by putting
that one back and letting the load fault again. Another one may be put over it later (``faulthandler.enable()``):
``begin`` puts ours over that. A forked child has the handler, and a table without its maps. Without compiled code
(``NUMBA_DISABLE_JIT=1``) there is no handler, and a refused page ends the process. Nor is LMDB's own map guarded, as
LMDB moves memory by what it reads: writers first read, through our map, what it is going to read.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DamagedError, TruncatedError, UnreadableError
from ..kernels.jit import JIT_ENABLED
from ..system.files import RESTORE
from ..system.processes import disown_in_forks

_SLOTS: Final = 256  # maps guarded at a time, two or more a store; a fault in a map beyond them ends the process
_NOTES: Final = 4096  # refused pages of a map that are remembered
_MAX_PASSED: Final = 8  # faults handed on to a handler that only hands them back

_ACTION_WORDS: Final = 19  # of ``struct sigaction``
_FLAGS: Final = 17
_PASSED, _BEFORE, _DEFAULT, _TABLE = 0, 1, 1 + _ACTION_WORDS, 1 + 2 * _ACTION_WORDS
"""Places in the handler's memory, in words: faults handed on since the handler was put in place, the handler that was
there before, that of the system (zeros), and the table."""
_START, _LENGTH, _MET, _COVERED, _HEALED, _NOTED = range(6)
"""Places in a slot of the table: where a map starts, and its bytes, 0 where the slot is free; how many pages were
refused so far, of which so many are covered by zeros, and so many are the file's again; address and length of what was
covered, for each of the last _NOTES."""
_SLOT_WORDS: Final = _NOTED + 2 * _NOTES
_WORDS: Final = _TABLE + _SLOTS * _SLOT_WORDS

_SIGBUS: Final = int(signal.SIGBUS)
_SA_SIGINFO: Final = 0x4
_SA_ONSTACK: Final = 0x08000000
_PROT_READ: Final = np.int32(1)
_FIXED_ZEROS: Final = np.int32(0x02 | 0x10 | 0x20)  # MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS
_PAGE_BYTES: Final = mmap.PAGESIZE
ASK_AGAIN: Final = "The system's log says why; each read asks the device again."
_CODE_AND_ADDRESS: Final = 8, 16  # bytes before si_code and si_addr in ``siginfo_t``, on any 64-bit Linux


class PageRuns(NamedTuple):
    starts: NDArray[np.int64]  # int64 [n], bytes: parts ``[start, stop)`` of a file
    stops: NDArray[np.int64]
    size: int  # of the file

    @property
    def is_cut_short(self) -> bool:
        """Whether any of these parts begins behind the end of the file."""
        return bool((self.starts >= self.size).any())

    def meet(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the ranges ``[starts[i], stops[i])`` have a byte in any of the parts: bool [ranges]."""
        met = np.zeros(len(starts), np.bool_)
        for start, stop in set(zip(self.starts.tolist(), self.stops.tolist(), strict=True)):
            met |= (starts < stop) & (stops > start)
        return met


if JIT_ENABLED:
    from llvmlite import ir
    from numba import types
    from numba.core.types import ExternalFunction
    from numba.extending import intrinsic

    from ..kernels.jit import callback

    _WORD: Final = ir.IntType(64)
    _mmap: Any = ExternalFunction(
        "mmap", types.int64(types.int64, types.int64, types.int32, types.int32, types.int32, types.int64)
    )
    _sigaction: Any = ExternalFunction("sigaction", types.int32(types.int32, types.int64, types.int64))
    _raise: Any = ExternalFunction("raise", types.int32(types.int32))

    @intrinsic
    def _memory(typing_context: Any, given: Any) -> Any:  # noqa: ARG001
        """The address given last; 0 gives none. Code comes from the disk: it cannot hold an address of this process."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            kept = ir.GlobalVariable(builder.module, _WORD, builder.module.get_unique_name("guard"))
            kept.linkage, kept.initializer = "internal", ir.Constant(_WORD, 0)
            with builder.if_then(builder.icmp_signed("!=", args[0], ir.Constant(_WORD, 0))):
                builder.store(args[0], kept)
            return builder.load(kept)

        return types.int64(types.int64), generate

    @intrinsic
    def _put(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            builder.store(args[1], builder.inttoptr(args[0], _WORD.as_pointer()))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @intrinsic
    def _add(typing_context: Any, address: Any, more: Any) -> Any:  # noqa: ARG001
        """The word at the address, which is so much more for the next."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), generate

    def _on_fault(number: int, info: int, context: int) -> None:  # noqa: ARG001
        """The handler: ``void handler(int, siginfo_t *, void *)``. With ``number`` 0, ``info`` is its memory."""
        memory = _memory(info if number == 0 else 0)
        if number == 0:
            return
        code = np.int32(_add(info + _CODE_AND_ADDRESS[0], 0) & 0xFFFFFFFF)
        address = _add(info + _CODE_AND_ADDRESS[1], 0)
        for slot in range(_SLOTS if code > 0 else 0):
            at = memory + 8 * (_TABLE + slot * _SLOT_WORDS)
            start, length = _add(at + 8 * _START, 0), _add(at + 8 * _LENGTH, 0)
            if start <= address < start + length:
                note = at + 8 * (_NOTED + 2 * (_add(at + 8 * _MET, 1) % _NOTES))
                page = address & -_PAGE_BYTES
                _put(note, page)
                _put(note + 8, _PAGE_BYTES)
                covered = _mmap(page, _PAGE_BYTES, _PROT_READ, _FIXED_ZEROS, np.int32(-1), 0)
                if covered == -1:  # as many maps as a process may have: all the rest becomes one
                    _put(note + 8, start + length - page)
                    covered = _mmap(page, start + length - page, _PROT_READ, _FIXED_ZEROS, np.int32(-1), 0)
                _add(at + 8 * _COVERED, 1)
                if covered != -1:
                    return
        passed = _add(memory + 8 * _PASSED, 1)
        # One who was over us may send the signal on to us, and so in a circle.
        in_circle = passed >= _MAX_PASSED or (passed > 0 and code <= 0)
        _sigaction(np.int32(_SIGBUS), memory + 8 * (_DEFAULT if in_circle else _BEFORE), 0)
        if code <= 0:  # it was sent, and will not come again by itself
            _raise(np.int32(_SIGBUS))


class _Handler:
    """The handler and its memory; both last as long as the process."""

    def __init__(self) -> None:
        self.lock: Final = threading.RLock()
        self._kept = mmap.mmap(-1, 8 * _WORDS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.words: Final = memoryview(self._kept).cast("q")
        self.free = list(range(_SLOTS))  # slots of the table
        self._address = 0
        self._found = (ctypes.c_int64 * _ACTION_WORDS)()
        self._found_pointer = ctypes.c_void_p(ctypes.addressof(self._found))
        self._sigaction: Any = ctypes.PyDLL(None).sigaction  # too short a call to give up the GIL for
        if JIT_ENABLED:
            made = callback(_on_fault, types.int32, types.int64, types.int64)
            kept = ctypes.py_object((made, self))
            ctypes.pythonapi.Py_IncRef(kept)  # a thread may still read when the interpreter ends
            self._address = made.address
            memory = ctypes.addressof(ctypes.c_char.from_buffer(self._kept))
            ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(made.address)(0, memory, 0)

    def put_in_place(self) -> None:
        """Make ours the process's handler, unless it is."""
        if not self._address:
            return
        self._sigaction(_SIGBUS, None, self._found_pointer)
        if self._found[0] == self._address:
            return
        with self.lock:
            self._sigaction(_SIGBUS, None, self._found_pointer)
            if self._found[0] != self._address:
                self.words[_BEFORE : _BEFORE + _ACTION_WORDS] = memoryview(self._found).cast("B").cast("q")
                self.words[_PASSED] = 0
                ours = (ctypes.c_int64 * _ACTION_WORDS)(self._address)
                ours[_FLAGS] = _SA_SIGINFO | _SA_ONSTACK
                self._sigaction(_SIGBUS, ctypes.byref(ours), None)


_MAKING: Final = threading.RLock()


@functools.cache
def _handler() -> _Handler:
    """The process's, made for the first map under _MAKING: takes 0.3 s once on a machine, 10 ms in later processes."""
    return _Handler()


class Guard:
    """One map of a file, which starts at its first byte. ``size_bytes``: tells how long the file is; raises if it is
    lost. ``put_back(address, offset, length)`` maps the file there again."""

    def __init__(
        self, path: "str | os.PathLike[str]", size_bytes: Callable[[], int], address: int, length_bytes: int,
        put_back: Callable[[int, int, int], object],
    ) -> None:  # fmt: skip
        self._path = path
        self._size_bytes = size_bytes
        self._address = address
        self._length = length_bytes
        self._put_back = put_back
        self._size = size_bytes()
        self._lock = threading.RLock()
        with _MAKING:
            self._handler = _handler()
        self._number: int | None = None  # of its slot; None if all are taken
        self._slot = memoryview(bytearray(8 * _SLOT_WORDS)).cast("q")
        with contextlib.suppress(IndexError):
            self._number = self._handler.free.pop()
            at = _TABLE + self._number * _SLOT_WORDS
            self._slot = self._handler.words[at : at + _SLOT_WORDS]
            self._slot[_START], self._slot[_LENGTH] = address, length_bytes
        disown_in_forks(self)
        self._handler.put_in_place()

    def disown(self) -> None:
        """In a forked process, which has no such map (``FileMap``): another may come to lie there."""
        self._slot[_LENGTH] = 0

    def close(self) -> None:
        """Forget the map, before it is unmapped. Again is fine."""
        if self._number is not None:
            self._slot[_LENGTH] = 0
            self._slot[_HEALED] = self._slot[_MET]
            self._handler.free.append(self._number)
            self._number = None

    def begin(self) -> int:
        """Have the device asked again for what it refused, and return how often it refused so far."""
        self._handler.put_in_place()
        met = self._slot[_MET]
        if met == self._slot[_HEALED]:
            return met
        with self._lock:
            while True:
                covered = self._slot[_COVERED]  # read before _MET: where they are equal, no page is between the two
                met, healed = self._slot[_MET], self._slot[_HEALED]
                if covered == met != healed:
                    if (runs := self.refused(healed)) is not None:
                        for start, stop in zip(runs.starts.tolist(), runs.stops.tolist(), strict=True):
                            self._put_back(self._address + start, start, stop - start)
                    self._slot[_HEALED] = healed = met
                if met == healed:
                    return met
                time.sleep(0)

    @property
    def met(self) -> int:
        """How often a page was refused so far."""
        return self._slot[_MET]

    def refused(self, since: int) -> PageRuns | None:
        """What was refused since a count of ``begin``; all of the file, if it was too much to remember."""
        met = self._slot[_MET]
        if met == since:
            return None
        size = self._size_bytes()
        if met - since > _NOTES:
            return PageRuns(np.zeros(1, np.int64), np.full(1, self._length, np.int64), size)
        notes = np.array(self._slot[_NOTED:], np.int64).reshape(_NOTES, 2)[np.arange(since, met) % _NOTES]
        starts = notes[:, 0] - self._address
        return PageRuns(starts, starts + notes[:, 1], size)

    def require_whole(self) -> None:
        """TruncatedError if the file is shorter than when this was last asked, or the map made."""
        size = self._size_bytes()
        if size < self._size:
            raise self._error(PageRuns(np.array([size]), np.array([self._size]), size))
        self._size = size

    def require(self, since: int, *ranges: NDArray[np.int64]) -> None:
        """Raise if a page was refused since a count, of these ranges (starts, stops) of the file if they are given.
        UnreadableError: the device refused it. TruncatedError: the file was cut short."""
        runs = self.refused(since)
        if runs is not None and (not ranges or runs.meet(*ranges).any()):
            raise self._error(runs)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Require that no page was refused within the block, whatever error came of such a page."""
        since = self.begin()
        try:
            yield
        except Exception as error:
            if (runs := self.refused(since)) is not None:
                raise self._error(runs) from error
            raise
        self.require(since)

    def _error(self, runs: PageRuns) -> DamagedError:
        first = int(np.argmin(runs.starts))
        part = f"bytes {runs.starts[first]} to {runs.stops[first] - 1}"
        if runs.is_cut_short:
            return TruncatedError(
                f"{self._path}: {part} are missing: the file was cut short to {runs.size} bytes. {RESTORE}"
            )
        return UnreadableError(f"{self._path}: the device refuses to read {part}. {ASK_AGAIN} {RESTORE}")
