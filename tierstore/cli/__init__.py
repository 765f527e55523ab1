"""The command line; light until a command runs."""

import datetime  # noqa: F401 - numpy imports it in C, where Ctrl-C would become an ImportError
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, as of ``sys.argv``; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 Ctrl-C."""
    try:
        from . import entry

        return entry.main(arguments)
    except KeyboardInterrupt:
        print("tierstore: interrupted", file=sys.stderr)
        return 130
