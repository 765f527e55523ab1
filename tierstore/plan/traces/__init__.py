"""Accesses from files and from laws: formats of traces, generators, and what is in a trace."""

from .describing import ReuseBin, TableSummary, TraceSummary, describe, reuse_histogram
from .files import FORMATS, FormatName, read_accesses, write_accesses
from .zipf import draw_zipf, generate

__all__ = [
    "FORMATS",
    "FormatName",
    "ReuseBin",
    "TableSummary",
    "TraceSummary",
    "describe",
    "draw_zipf",
    "generate",
    "read_accesses",
    "reuse_histogram",
    "write_accesses",
]
