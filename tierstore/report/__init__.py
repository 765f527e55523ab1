"""Reports of runs, sweeps, plans and quantizations: sections of sentences, tables and plots, as text and as a page."""

from .page import Line, Section, Step, figure, page_of, text_of

__all__ = ["Line", "Section", "Step", "figure", "page_of", "text_of"]
