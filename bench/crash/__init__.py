"""A training run that is killed at any instant, taken up again, and held against the same run in plain arrays."""
