"""Embedding modules over a store, and the jagged types they take and give."""

from .collection import TieredEmbeddingBagCollection
from .embedding import TieredEmbedding
from .embedding_bag import TieredEmbeddingBag
from .jagged import JaggedLike, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "JaggedLike",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection",
]
