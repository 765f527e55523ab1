"""A plan as text for the terminal and as one page of HTML."""

from .gain import describe_gain, gain_page_of
from .page import page_of, plotly_source
from .text import describe

__all__ = ["describe", "describe_gain", "gain_page_of", "page_of", "plotly_source"]
