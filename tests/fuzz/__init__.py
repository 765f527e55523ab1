"""Hostile input for everything that reads a file: targets, a driver (``python -m tests.fuzz``), a corpus.

A target feeds bytes to a reader. Only what its documentation names may leave it; anything else, a crash, a hang or
memory out of proportion is a finding.
"""
