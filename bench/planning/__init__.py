"""Measurements of capacity planning: curves, overheads, predictions against runs."""
