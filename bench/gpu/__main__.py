"""The command line of ``python -m bench.gpu``."""

from ..common import start

if __name__ == "__main__":
    start("gpu")
