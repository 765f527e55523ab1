"""A plan as text for the terminal and as one page of HTML."""

from .page import page_of
from .text import describe

__all__ = ["describe", "page_of"]
