"""The command line of ``python -m bench.gpu``; see the package's docstring."""

import sys

from ..common import program
from . import PARTS, run

if __name__ == "__main__":
    sys.exit(program("gpu", run, parts=PARTS))
