"""What is served: each table and all of them together as lookups, and the ranking model of a training run."""

from .make import Models, rehearse

__all__ = ["Models", "rehearse"]
