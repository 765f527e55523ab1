"""Accesses from files and from laws: formats of traces, generators, and what is in a trace."""

from .describing import TableSummary, TraceSummary, describe
from .files import FORMATS, FormatName, read_accesses, write_accesses
from .generating import generate
from .histogram import ReuseBin, reuse_histogram
from .reuse import ReuseProfile, draw_reuse, read_reuse_profiles
from .stack_distances import StackDistances, draw_stack_distances, read_stack_distances
from .zipf import draw_zipf

__all__ = [
    "FORMATS",
    "FormatName",
    "ReuseBin",
    "ReuseProfile",
    "StackDistances",
    "TableSummary",
    "TraceSummary",
    "describe",
    "draw_reuse",
    "draw_stack_distances",
    "draw_zipf",
    "generate",
    "read_accesses",
    "read_reuse_profiles",
    "read_stack_distances",
    "reuse_histogram",
    "write_accesses",
]
