"""Traces: what is in one, and drawing one by Zipf's law."""

from ..accesses import read_accesses
from .describing import TableSummary, TraceSummary, describe
from .zipf import draw_zipf, generate

__all__ = ["TableSummary", "TraceSummary", "describe", "draw_zipf", "generate", "read_accesses"]
