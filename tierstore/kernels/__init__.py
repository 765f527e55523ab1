"""Compiled kernels over rows in slots, and what they are made of."""
