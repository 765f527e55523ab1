"""A plan as text and as a page."""

from .text import describe, page_of

__all__ = ["describe", "page_of"]
