"""A client of the server in Python, over the standard library's HTTP."""

from .client import Answer, Client, Tensor, Values

__all__ = ["Answer", "Client", "Tensor", "Values"]
