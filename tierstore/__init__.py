"""tierstore: embedding tables larger than memory, with the same numbers as in memory.

Hot rows in GPU memory, warm rows in host memory, cold rows on SSD; one module drops into a model, the sparse
optimizer runs inside backward, and a commit is atomic over everything.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from . import system as _system
from .system import __version__

__all__ = [
    "DynamicIds", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "QuantizeReport", "QuantizedTable", "Stats",
    "Store", "Table",
    "TableConfig", "TierStats", "TieredEmbedding", "TieredEmbeddingBag", "TieredEmbeddingBagCollection",
    "TieredEmbeddingCollection", "__version__", "checkpoint", "convert", "errors", "ids", "init", "open", "optim",
    "plain_model", "prefetch", "quantize",
]  # fmt: skip

_system.open_whole = lambda *source: importlib.import_module(f"{__name__}.dist.unsharded").open_whole(*source)
_HOMES: Final = (
    "config", "nn.prefetch", "nn.jagged", "nn.embedding", "nn.collection", "nn.convert", "store", "pool.stats",
    "offline.quantization",
)  # fmt: skip
_MODULES: Final = {"checkpoint": "nn.checkpoint"}

if TYPE_CHECKING:
    from . import dist as dist
    from . import errors, ids, init, optim
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

    def __getattr__(name: str) -> Any:
        """A name, or a module, when it is first asked for: torch and numba take seconds to load."""
        asked = "open_store" if name == "open" else name
        for home in _HOMES if name in __all__ and name not in ("checkpoint", "errors", "ids", "init", "optim") else ():
            if (found := getattr(importlib.import_module(f"{__name__}.{home}"), asked, None)) is not None:
                return globals().setdefault(name, found)
        try:
            return globals().setdefault(name, importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}"))
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name) from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
