"""Which of the changed rows servers should have first: new ones, then those whose change most lookups see.

After M. Sima et al., Ekko (OSDI 2022): freshness, share of requests, size of the change. Within both kinds the greatest
product of lookups, as servers counted them, and L2 norm of the change comes first. Earlier values are read from the
store, if it keeps that version (``keep=``); else all changes count alike, and no row as new.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from ..config import TableConfig
from ..errors import TierstoreError
from ..io.base import ColdTier
from ..io.reads import ChangedRows
from ..kernels.arrays import Bools, Floats, Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..pool.converting import floats
from ..store.directory import Opened, open_files
from ..store.version import Lineage, unpack
from .delta import open_source

_LOG: Final = logging.getLogger("tierstore.updates")


def urgent_rows(
    directory: str | os.PathLike[str], since: int, share: float, lookups: Mapping[int, int],
    version: Opened | None = None,
) -> Int64s:  # fmt: skip
    """Keys of the most urgent rows, int64 [n] ascending: that share of what changed since a version, one at least.

    Rows of tables with dynamic ids are none of them: an id may have moved, and both rows belong to one version. Memory:
    the map of the rows, twice, 17 bytes for each row that changed, and some 32 MiB. Raises as ``write_update``.

    Args:
        lookups: how often servers looked rows up, by key; of others once less than of a row with 1.
        version: as ``open_source`` gave it; default: the last.
    """
    directory, total = Path(directory).absolute(), 0
    columns: list[tuple[Int64s, Bools, Floats]] = [
        (np.empty(0, np.int64), np.empty(0, np.bool_), np.empty(0, np.float32))
    ]
    with (
        open_source(directory) if version is None else contextlib.nullcontext(version) as (manifest, tier, _),
        _earlier(directory, since, unpack(tier.version, tier.payload).lineage) as earlier,
        tier.changes(since) as changes,
    ):
        for index, config in enumerate(manifest.tables):
            for chunk in changes.rows(index):
                total += len(chunk.rows)
                if config.ids is None and not config.is_hidden:
                    columns.append(_weigh(index, config, config.layout(manifest.page_bytes), chunk, earlier))
    keys, are_new, sizes = (np.concatenate(each) for each in zip(*columns, strict=True))
    hot, counts = np.array([*lookups.items()], np.int64).reshape(-1, 2), np.ones(len(keys))
    hot = hot[np.isin(hot[:, 0], keys)]
    counts[np.searchsorted(keys, hot[:, 0])] += hot[:, 1]
    order = np.lexsort((keys, -counts * sizes, ~are_new))
    return np.sort(keys[order[: max(1, int(share * total))]])


@contextlib.contextmanager
def _earlier(directory: Path, version: int, lineage: Lineage) -> Iterator[ColdTier | None]:
    """The store at an earlier version; None if it does not keep that."""
    with contextlib.ExitStack() as stack:
        found = None
        try:
            manifest, tier, _ = open_files(directory, readonly=True, version=version)
            stack.callback(tier.close)
            if unpack(version, tier.payload).lineage.commit_id == lineage.id_of(version):
                manifest.add_tables(tier)
                found = tier
        except TierstoreError as error:
            _LOG.warning("urgent rows are chosen by lookups alone, as earlier values are not at hand: %s", error)
        yield found


def _weigh(
    index: int, config: TableConfig, layout: RowLayout, changed: ChangedRows, earlier: ColdTier | None
) -> tuple[Int64s, Bools, Floats]:
    """Keys, whether they are new, and L2 norms of their change, float32."""
    keys, count = changed.rows | (index << KEY_ROW_BITS), len(changed.rows)
    if earlier is None:
        return keys, np.zeros(count, np.bool_), np.ones(count, np.float32)
    before, state = (np.empty((count, words), np.uint64) for words in (layout.weight_words, layout.state_words))
    present = np.empty(count, np.bool_)
    earlier.read(keys, np.arange(count, dtype=np.int32), before, state, present)
    before[~present] = config.init.rows(keys[~present], layout)
    sizes = np.linalg.norm((floats(changed.weights, layout) - floats(before, layout)).numpy(), axis=1)
    return keys, ~present, np.nan_to_num(sizes, nan=np.inf, posinf=np.inf)
