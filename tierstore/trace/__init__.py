"""Traces of what a model looks up: their file, their bounded memory, their sampling."""

from .trace import TableTrace, Trace, read_trace, write_trace

__all__ = ["TableTrace", "Trace", "read_trace", "write_trace"]
