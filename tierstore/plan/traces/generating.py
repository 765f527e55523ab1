"""A trace of a workload that nobody has recorded yet: each table's rows by Zipf's law, independent of each other."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ...config import require_int
from ...trace import TableTrace, Trace
from ..workload import TableShape, Workload
from .zipf import draw_zipf

__all__ = ["generate"]

_MAX_SAMPLES: Final = 1 << 36
_WORD: Final = (1 << 64) - 1


def generate(workload: Workload, *, samples: int, seed: int) -> Trace:
    """Samples of the workload, in batches of its ``batch_samples``.

    A sample has as many ids of a table as the pooling factor says; where that is no whole number, the next lower or
    higher one, by chance, so that their mean is it. Which rows of a table are the frequent ones depends on the table's
    place in the workload and not on ``seed``: other seeds give other samples of the same users. 8 bytes of memory an
    id, and 8 a sample and table.

    Raises:
        ValueError, TypeError: ``samples`` is no number from 1.
    """
    require_int(samples, "samples", 1, _MAX_SAMPLES)
    tables = {table.name: _table(table, index, samples, seed) for index, table in enumerate(workload.tables)}
    return Trace(tables=tables, batch_samples=workload.batch_samples)


def _table(table: TableShape, index: int, samples: int, seed: int) -> TableTrace:
    generator = np.random.default_rng((index, seed & _WORD))
    offsets = np.zeros(samples + 1, np.int64)
    np.cumsum(_lengths(generator, table.pooling_factor, samples), out=offsets[1:])
    drawn = int(generator.integers(1 << 63))
    ids = draw_zipf(table.num_embeddings, table.exponent, int(offsets[-1]), seed=drawn, scatter_seed=index)
    return TableTrace(ids, offsets)


def _lengths(generator: np.random.Generator, mean: float, samples: int) -> NDArray[np.int64]:
    whole = int(mean)
    lengths = np.full(samples, whole, np.int64)
    if mean > whole:
        lengths += generator.random(samples) < mean - whole
    return lengths
