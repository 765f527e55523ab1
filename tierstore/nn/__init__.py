"""Embedding modules over a store, and the jagged types they take and give."""

from . import checkpoint
from .collection import TieredEmbeddingBagCollection, TieredEmbeddingCollection
from .convert import convert, plain_model
from .embedding import TieredEmbedding, TieredEmbeddingBag
from .jagged import JaggedLike, JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "JaggedLike", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "TieredEmbedding", "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection", "TieredEmbeddingCollection", "checkpoint", "convert", "plain_model",
]  # fmt: skip
