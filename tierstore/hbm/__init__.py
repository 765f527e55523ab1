"""Rows in device memory: the tier above host memory, and the kernels over its rows."""

__all__: list[str] = []
