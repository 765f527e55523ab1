"""The command line; light until a command runs."""

import signal
import sys
import threading
from collections.abc import Sequence

__all__ = ["main"]

_interrupts: list[int] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, as of ``sys.argv``; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    if is_ours := before is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        _interrupts.clear()
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from . import entry

        return entry.main(arguments, _interrupts)
    except BaseException as error:
        if not isinstance(error, (KeyboardInterrupt, ImportError, SystemError) if _interrupts else KeyboardInterrupt):
            raise
        print("tierstore: interrupted", file=sys.stderr)
        return 130
    finally:
        if is_ours:  # Ctrl-C ends a process that is about to end at once
            signal.signal(signal.SIGINT, signal.SIG_DFL if arguments is None else before)


def _interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt
