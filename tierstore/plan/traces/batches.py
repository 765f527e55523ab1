"""Where batches begin in accesses that came without them."""

import numpy as np
from numpy.typing import NDArray

from ...config import require_int

__all__ = ["starts_of"]


def starts_of(count: int, batch_accesses: int) -> NDArray[np.int64]:
    """int64 [batches + 1]: so many accesses a batch, the last one with the rest.

    Raises:
        ValueError, TypeError: ``batch_accesses`` is no number from 1.
    """
    require_int(batch_accesses, "batch_accesses", 1, 1 << 40)
    return np.minimum(np.arange(0, count + batch_accesses, batch_accesses, dtype=np.int64), count)
