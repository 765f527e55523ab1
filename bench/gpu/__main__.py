"""The command line of ``python -m bench.gpu``."""

import sys

from ..common import program
from .runner import PARTS, run

if __name__ == "__main__":
    run.__module__ = "bench.gpu"  # which says what it needs
    sys.exit(program("gpu", run, parts=tuple(PARTS)))
