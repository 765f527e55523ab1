"""A plan as text for the terminal and as one page of HTML."""

from .forms import describe, page_of

__all__ = ["describe", "page_of"]
