"""Modules over tables of a store: embeddings, what prefetches for them, conversion of models, and checkpoints."""
