"""Updates of tables that a step makes: all of them, or none."""

import operator
from collections.abc import Sequence

from torch import Tensor

from .tables import TrainsRows


def train(updates: Sequence[tuple[TrainsRows, Tensor]]) -> None:
    """Make some updates, of distinct tables; the lookups are released.

    First all rows are brought in and pinned: what can fail, fails before a row changes. Only a lookup whose rows do not
    fit in memory together is trained part by part.

    Args:
        updates: lookups, each with the gradient of its output, float32 [batch, columns], C-contiguous.

    Raises:
        PartlyTrainedError: some rows were trained, or may have been, by this step or an earlier one.
        DiskFullError, DamagedError, BudgetError, MemoryError: no row was trained.
    """
    stores = {table.store for lookup, _ in updates for table in lookup.tables}
    for store in stores:
        store.require_whole_steps()
    try:
        ready = [lookup.readied(gradient) for lookup, gradient in updates]
    except BaseException as error:
        for lookup, _ in updates:
            lookup.release()
        error.add_note("No row was trained by this step: it can be repeated, from forward on.")
        raise
    try:
        # Parts may have to wait until rows that were pinned whole are released.
        for update in sorted(ready, key=operator.attrgetter("is_whole"), reverse=True):
            update.train()
    except BaseException as error:
        for lookup, _ in updates:
            lookup.release()
        for store in stores:
            store.note_partly_trained(error)
        for store in stores:
            store.require_whole_steps()
        raise
