"""tierstore: embedding tables larger than memory, with the same numbers as in memory.

Hot rows in GPU memory, warm rows in host memory, cold rows on SSD; one module drops into a model, the sparse
optimizer runs inside backward, and a commit is atomic over everything.
"""

from . import errors, ids, init, optim
from .config import TableConfig
from .ids import DynamicIds
from .nn import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    TieredEmbedding,
    TieredEmbeddingBag,
    TieredEmbeddingBagCollection,
    TieredEmbeddingCollection,
    checkpoint,
    convert,
    plain_model,
)
from .nn.prefetch import prefetch
from .offline.quantization import QuantizedTable, QuantizeReport, quantize
from .pool.stats import Stats, TierStats
from .store import Store, Table
from .store import open_store as open  # noqa: A004 - tierstore.open, as gzip.open
from .system.release import __version__

__all__ = [
    "DynamicIds", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "QuantizeReport", "QuantizedTable", "Stats",
    "Store", "Table",
    "TableConfig", "TierStats", "TieredEmbedding", "TieredEmbeddingBag", "TieredEmbeddingBagCollection",
    "TieredEmbeddingCollection", "__version__", "checkpoint", "convert", "errors", "ids", "init", "open", "optim",
    "plain_model", "prefetch", "quantize",
]  # fmt: skip
