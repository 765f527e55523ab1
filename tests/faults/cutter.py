"""Raising an exception at the n-th instant of a call at which one may come.

Python runs the handlers of signals, and raises what other threads ask it to, after a call of a function, at the start
of one, and at a jump backwards. Memory may be short at any call. A tracer sees each instruction of the package's code
before it runs, so it can raise at any of these, and the same one again with the same seed.

Left out: the call that leaves a ``with`` block, before which nothing is allocated and no handler runs.
"""

import dis
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import tierstore

KINDS: Final = ("signal", "memory", "disk")
_PACKAGE: Final = str(Path(tierstore.__file__).parent)
_CALLS: Final = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")
_BEFORE_CALLS: Final = ("PRECALL", *_CALLS)
_CHECKS: Final = (*_CALLS, "RESUME", "JUMP_BACKWARD")
_NUMBER: Final = signal.SIGUSR1


def _leaves_with(before: list[dis.Instruction]) -> bool:
    """Whether a call has the arguments of ``__exit__`` where nothing was raised."""
    return [each.opname for each in before[-3:]] == ["LOAD_CONST"] * 3 and not any(
        each.argval is not None for each in before[-3:]
    )


@cache
def _instants(code: CodeType) -> dict[int, bool]:
    """By offset: whether a handler may run before the instruction; else memory may be short at it."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> Any:
        return next((each.target for each in entries if each.start <= offset < each.end), None)

    found: dict[int, bool] = {}
    before: list[dis.Instruction] = []
    for each in dis.get_instructions(code):
        if each.opname in _BEFORE_CALLS and not (before and before[-1].opname == "PRECALL"):
            if not _leaves_with(before):
                found[each.offset] = False
        elif before and before[-1].opname in _CHECKS and handler(before[-1].offset) == handler(each.offset):
            found[each.offset] = True
        before.append(each)
    return found


class Cutter:
    """Cuts calls short; made in the main thread, before the threads in which it is to.

    Attributes:
        place: where the last call was cut.
    """

    def __init__(self) -> None:
        self._left = self._seen = 0
        self._kind = self.place = ""
        self._is_main = True
        self._is_armed = False
        self._trace: Any = self._enter
        self._kept: Final = [self._trace] * 100_000
        """CPython 3.11 now and then calls a trace function that it let go of once too often."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it, threads that begin are traced while a call is to be cut short."""

        def handle(*_: object) -> None:
            raise RuntimeError("a worker was killed")  # as the handler of torch's DataLoader does

        tierstore.open(cold="memory", ddr="2MiB").close()  # starts the thread that closes dropped stores: it lives on
        before = signal.signal(_NUMBER, handle)
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)
            signal.signal(_NUMBER, before)

    def run(
        self, call: Callable[[], Any], *, kind: str, instant: int, in_main: bool
    ) -> tuple[int, BaseException | None]:
        """Make a call, and raise at the instant of that number, from 1 on, in the main thread or in others.

        Returns:
            how many instants were met; and what the call raised.
        """
        self._left, self._seen, self._kind, self._is_main, self.place = instant, 0, kind, in_main, ""
        if in_main:
            sys.settrace(self._trace)
        self._is_armed = True
        try:
            call()
        except Exception as error:
            return self._seen, error
        finally:
            self._is_armed = False
            sys.settrace(None)
        return self._seen, None

    def _enter(self, frame: FrameType, _event: str, _arg: object) -> Any:
        if not self._is_armed or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if (threading.current_thread() is threading.main_thread()) is not self._is_main:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _arg: object) -> Any:
        if event != "opcode" or not self._is_armed:
            return self._step
        is_check = _instants(frame.f_code).get(frame.f_lasti)
        if is_check is None or (self._kind == "signal" and not is_check):
            return self._step
        self._seen += 1
        self._left -= 1
        if self._left == 0:
            file = Path(frame.f_code.co_filename).relative_to(_PACKAGE)
            self.place = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
            if self._kind == "memory":
                raise MemoryError("no memory")
            if self._kind == "disk":
                raise OSError(28, "No space left on device")
            signal.raise_signal(_NUMBER)
        return self._step
