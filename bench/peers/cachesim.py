"""W-TinyLFU, S3-FIFO and SIEVE as libCacheSim has them."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from . import has, load

_MODULE: Final = "libcachesim"
_ACCESS: Final = np.dtype([("time", "<u4"), ("row", "<u8"), ("size", "<u4"), ("next", "<i8")])


def policies() -> list[str]:
    """Its names of the policies; none without it."""
    return ["WTinyLFU", "S3FIFO", "Sieve"] if has(_MODULE) else []


def write_trace(path: Path, rows: Any) -> None:
    """Accesses of these rows, int64 [n]."""
    trace = np.ones(len(rows), _ACCESS)
    trace["row"] += rows.astype(np.uint64)
    trace.tofile(path)


def hit_rate(policy: str, trace: Path, capacity: int) -> float:
    """From 0 to 1."""
    module = load(_MODULE)
    kind, flags = module.TraceType.ORACLE_GENERAL_TRACE, module.ReaderInitParam(ignore_obj_size=True)
    misses, _ = getattr(module, policy)(capacity).process_trace(module.TraceReader(str(trace), kind, flags))
    return float(1 - misses)
