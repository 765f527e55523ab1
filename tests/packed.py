"""Traces of bags that prefer some rows."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tierstore.trace import TableTrace, Trace

__all__ = ["random_trace"]


def random_trace(rows: Mapping[str, int], seed: int, samples: int = 60) -> Trace:
    """Bags of up to five rows of tables of these sizes, every other row preferred, so that some rows stay away."""
    generator = np.random.default_rng(seed)
    tables = {}
    for name, num_rows in rows.items():
        lengths = generator.integers(0, 6, samples)
        ids: NDArray[np.int64] = (generator.random(lengths.sum()) ** 3 * num_rows).astype(np.int64) // 2 * 2
        tables[name] = TableTrace(ids, np.concatenate([[0], np.cumsum(lengths)]))
    return Trace(tables=tables, batch_samples=16)
