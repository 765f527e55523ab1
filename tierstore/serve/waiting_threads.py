"""How the threads of a lookup and of the model wait for each other: asleep.

By default those of torch spin, each on a core, while they wait. Beside the event loop, and whatever else the machine
runs, that starves the one they wait for: with two threads on two cores a ranking query of 200 samples took 30 ms
instead of 5. OpenMP reads how to wait when it is loaded, before any code of ours, so the process begins anew once.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["begin_anew", "is_set", "set_for_children"]

_VARIABLE: Final = "OMP_WAIT_POLICY"


def is_set() -> bool:
    """Whether somebody said how to wait."""
    return _VARIABLE in os.environ


def set_for_children() -> None:
    """Processes started from here on wait asleep, unless somebody said otherwise."""
    os.environ.setdefault(_VARIABLE, "PASSIVE")


def begin_anew(words: Sequence[str]) -> None:
    """Become ``tierstore WORDS`` again, with threads that wait asleep. Does not return.

    With the interpreter's own arguments, if it was begun so: else what lies in the working directory would be taken for
    modules.
    """
    set_for_children()
    sys.stdout.flush()
    sys.stderr.flush()
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    begun = own if own and sys.orig_argv[1 + len(own) :] == list(words) else ["-m", "tierstore"]
    os.execv(sys.executable, [sys.executable, *begun, *words])
