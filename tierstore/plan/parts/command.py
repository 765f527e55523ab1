"""``tierstore plan parts``: the parts and hosts that ship."""

import argparse

from .describe import describe_parts

__all__ = ["add_parts_arguments", "run_parts"]


def add_parts_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``tierstore plan parts``."""
    parser.add_argument("--sources", action="store_true", help="say with each figure where it comes from")


def run_parts(options: argparse.Namespace) -> int:
    """Print them; the exit status."""
    print(describe_parts(sources=options.sources))
    return 0
