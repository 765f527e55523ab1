"""The command line; light until a command runs."""

from .entry import build_parser, main

__all__ = ["build_parser", "main"]
