"""Commands of ``tierstore plan`` without the shell around them: their errors are raised."""

import argparse

from tierstore.plan.command import COMMANDS

__all__ = ["run"]


def run(name: str, *words: object) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    return COMMANDS[name].run(parser.parse_args([str(word) for word in words]))
