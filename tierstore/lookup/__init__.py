"""A batch: its ids joined, looked up, and trained by a backward fused with the optimizer."""
