"""The command line; light until a command runs."""

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]

_interrupts: list[int] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, as of ``sys.argv``; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    _interrupts.clear()
    if (before := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from . import entry

        return entry.main(arguments, _interrupts)
    except BaseException as error:
        if not _interrupts and not isinstance(error, KeyboardInterrupt):
            raise
        print("tierstore: interrupted", file=sys.stderr)
        return 130
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:  # Ctrl-C ends a process that is about to end at once
            signal.signal(signal.SIGINT, signal.SIG_DFL if arguments is None else before)


def _interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt
