"""A training run that is killed at any instant, taken up again, and held against one that nobody kills."""
