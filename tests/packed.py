"""Stores whose rows lie in the order of a trace."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.offline.compaction import compact_store
from tierstore.store.manifest import Manifest
from tierstore.trace import TableTrace, Trace, write_trace

__all__ = ["pack_store", "random_trace"]


def random_trace(rows: Mapping[str, int], seed: int, samples: int = 60) -> Trace:
    """Bags of up to five rows of tables of these sizes, every other row preferred, so that some rows stay away."""
    generator = np.random.default_rng(seed)
    tables = {}
    for name, num_rows in rows.items():
        lengths = generator.integers(0, 6, samples)
        ids: NDArray[np.int64] = (generator.random(lengths.sum()) ** 3 * num_rows).astype(np.int64) // 2 * 2
        tables[name] = TableTrace(ids, np.concatenate([[0], np.cumsum(lengths)]))
    return Trace(tables=tables, batch_samples=16)


def pack_store(folder: Path, seed: int) -> None:
    """Put a packed copy in the place of a store that no process has open."""
    manifest = Manifest.read(folder)
    trace, copy = folder.with_name(f"{folder.name}-{seed}.npz"), folder.with_name(f"{folder.name}-packed")
    sizes = {each.name: each.num_embeddings for each in manifest.tables if not each.is_hidden}
    write_trace(random_trace(sizes, seed), trace, force=True)
    compact_store(folder, copy, trace=trace)
    shutil.rmtree(folder)
    os.rename(copy, folder)
    trace.unlink()
