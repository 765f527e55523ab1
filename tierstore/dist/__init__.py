"""Tables sharded over the ranks of ``torch.distributed``; every rank has its own tiers."""

from .model import shard
from .modules import (
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    average,
    data_parallel,
    even,
    own_tensors,
)
from .plan import Plan, Sharding
from .store import ShardedStore, open_sharded
from .tower_modules import TowerTieredEmbeddingBagCollection

__all__ = [
    "Plan",
    "ShardedStore",
    "ShardedTieredEmbedding",
    "ShardedTieredEmbeddingBag",
    "ShardedTieredEmbeddingBagCollection",
    "ShardedTieredEmbeddingCollection",
    "Sharding",
    "TowerTieredEmbeddingBagCollection",
    "average",
    "data_parallel",
    "even",
    "open_sharded",
    "own_tensors",
    "shard",
]
