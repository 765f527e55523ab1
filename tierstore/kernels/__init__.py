"""Compiled kernels over rows in slots, and what they are made of."""

__all__: list[str] = []
