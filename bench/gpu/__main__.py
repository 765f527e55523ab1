"""The command line of ``python -m bench.gpu``; see the package's docstring."""

import sys

from .requirements import require_all

if __name__ == "__main__":
    require_all()
    from ..common import program
    from . import run
    from .part import PARTS

    sys.exit(program("gpu", run, parts=PARTS))
