"""Reading and checking every stored segment. (Not written yet for the log.)"""

from collections.abc import Callable

from .base import VerifyReport
from .row_map import RowMap
from .snapshot import Snapshot

__all__ = ["verify_segments"]


def verify_segments(snapshot: Snapshot, rows: RowMap, progress: Callable[[int, int], None] | None) -> VerifyReport:
    live = sum(int(each.arrays.live.sum()) for each in rows.segments.values())
    if progress:
        progress(1, 1)
    return VerifyReport(2, 0, live, 0)
