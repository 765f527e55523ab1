"""Calls of a store cut short by an exception at a drawn instant, and whether its rows are right afterwards."""
