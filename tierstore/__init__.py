"""tierstore: embedding tables larger than memory, with the same numbers as in memory.

Hot rows in GPU memory, warm rows in host memory, cold rows on SSD; one module drops into a model, the sparse
optimizer runs inside backward, and a commit is atomic over everything.
"""

import importlib
from typing import TYPE_CHECKING, Final

from . import system as _system
from .system import __version__

__all__ = [
    "DynamicIds", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "QuantizeReport", "QuantizedTable", "Stats",
    "Store", "Table",
    "TableConfig", "TierStats", "TieredEmbedding", "TieredEmbeddingBag", "TieredEmbeddingBagCollection",
    "TieredEmbeddingCollection", "__version__", "checkpoint", "convert", "errors", "ids", "init", "metrics", "open",
    "optim", "plain_model", "prefetch", "quantize",
]  # fmt: skip

_system.open_whole = lambda *source: importlib.import_module(f"{__name__}.dist.unsharded").open_whole(*source)
_HOMES: Final = {
    "TableConfig": "config", "prefetch": "nn.prefetch", "checkpoint": "nn.checkpoint:",
    "open": "store.opening:open_store",
    **dict.fromkeys(("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"), "nn.jagged"),
    **dict.fromkeys(("TieredEmbedding", "TieredEmbeddingBag"), "nn.embedding"),
    **dict.fromkeys(("TieredEmbeddingBagCollection", "TieredEmbeddingCollection"), "nn.collection"),
    **dict.fromkeys(("convert", "plain_model"), "nn.convert"), **dict.fromkeys(("Store", "Table"), "store"),
    **dict.fromkeys(("Stats", "TierStats"), "pool.stats"), "DynamicIds": "ids.configs",
    **dict.fromkeys(("QuantizeReport", "QuantizedTable", "quantize"), "offline.quantization"),
}  # fmt: skip

if TYPE_CHECKING:
    from . import dist as dist
    from . import errors, ids, init, metrics, optim
    from . import models as models
    from . import plan as plan
    from . import train as train
    from .config import TableConfig
    from .ids import DynamicIds
    from .nn import checkpoint
    from .nn.collection import TieredEmbeddingBagCollection, TieredEmbeddingCollection
    from .nn.convert import convert, plain_model
    from .nn.embedding import TieredEmbedding, TieredEmbeddingBag
    from .nn.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from .nn.prefetch import prefetch
    from .offline.quantization import QuantizedTable, QuantizeReport, quantize
    from .pool.stats import Stats, TierStats
    from .store import Store, Table
    from .store import open_store as open  # noqa: A004 - tierstore.open, as gzip.open
else:
    __getattr__, __dir__ = _system.late(globals(), _HOMES)
