"""What the tiers did: running totals since the store was opened."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..cache.base import CacheCounters
from ..system.terminal import columns_of, html_table


class TierStats(NamedTuple):
    """One tier.

    For ddr and hbm, ``hits + misses == unique``. For ssd, a hit is a row that was stored and a miss one that was
    never written (its first value is computed).
    """

    lookups: int = 0
    """Ids asked for, duplicates counted."""
    unique: int = 0
    """Rows asked for: duplicates in one call count once. A read of one id 100 times is 100 ``lookups``, 1 ``unique``
    and one use of the row to the policy. Exception: pooled lookups in a ddr with a slot for every row count each id. No
    row leaves there, and finding duplicates would cost more than the lookup."""
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    """Rows that left for others; of hbm, those of the cache, not of overflow slots."""
    capacity_rows: int = 0
    bytes: int = 0
    """Memory the tier holds: arenas, index, policy and staging; for ssd, the map from rows to places."""
    seconds: float = 0.0
    """Time spent moving rows into the tier (ddr, hbm) or reading and writing them (ssd)."""
    bytes_read: int = 0
    """Bytes of pages read (ssd)."""
    bytes_written: int = 0
    """Bytes of segments appended for rows written back (ssd)."""
    rows_written: int = 0
    """Rows written back (ssd)."""
    bytes_moved: int = 0
    """Bytes of segments that cleaning appended, on top of ``bytes_written`` (ssd)."""
    rows_moved: int = 0
    """Rows in them (ssd)."""
    pages_moved: int = 0
    """Pages that those rows were read from (ssd)."""
    split_batches: int = 0
    """Batches whose rows did not fit the tier at once and were processed in parts."""
    conflict_misses: int = 0
    """Misses whose whole set was in use, so that the row took an overflow slot (hbm)."""
    waited_seconds: float = 0.0
    """Time for which threads that change or evict rows waited for the writer of a commit (ddr)."""
    page_cache_bytes: int = 0
    """Resident memory of the whole process that belongs to files: pages of row files that it looked at, in each map of
    them, and code, 100 MiB or more of it torch's (ssd). Page cache is outside every budget: the system takes it back
    when memory is short."""

    held_bytes: int = 0
    """Bytes of the row file that are out of use, but that the oldest reader elsewhere keeps from being reused, until
    it refreshes or closes; as of the last commit of a store open for writing (ssd)."""

    @property
    def hit_rate(self) -> float:
        """hits / unique; 0 before the first lookup."""
        return self.hits / self.unique if self.unique else 0.0


def of_counters(counters: Sequence[CacheCounters]) -> TierStats:
    """What several caches of one tier counted, as one tier's."""
    hits, misses = sum(c.hits for c in counters), sum(c.misses for c in counters)
    return TierStats(
        lookups=sum(c.lookups for c in counters),
        unique=hits + misses,
        hits=hits,
        misses=misses,
        evictions=sum(c.evictions for c in counters),
    )


class IdStats(NamedTuple):
    """Of a table with dynamic ids, or of all.

    Attributes:
        rows: ids that have rows now; candidates: ids that are counted.
        admitted, refused, evicted: totals since the store was opened; refused ids count once a batch.
        bytes: memory for all this.
    """

    rows: int = 0
    candidates: int = 0
    admitted: int = 0
    refused: int = 0
    evicted: int = 0
    bytes: int = 0


class Stats(NamedTuple):
    """All tiers of a store, and the dynamic ids that it has used. Printed, a table of what is not zero.
    ``event_time``: the greatest of the rows that the version shown was trained on, in Unix seconds, if it has any."""

    hbm: TierStats
    ddr: TierStats
    ssd: TierStats
    ids: IdStats = IdStats()
    event_time: float | None = None

    @property
    def tiers(self) -> dict[str, TierStats]:
        """By name."""
        return {"hbm": self.hbm, "ddr": self.ddr, "ssd": self.ssd}

    def to_dict(self) -> dict[str, float]:
        """All numbers by name, as ``"ddr.hits"``, ``"ddr.hit_rate"`` and ``"ids.rows"``: what loggers of metrics
        take."""
        rates = {f"{tier}.hit_rate": counts.hit_rate for tier, counts in self.tiers.items()}
        parts: Any = {**self.tiers, "ids": self.ids}.items()
        counted = {f"{part}.{name}": count for part, counts in parts for name, count in counts._asdict().items()}
        return counted | rates | ({} if self.event_time is None else {"event_time": self.event_time})

    def _rows(self) -> list[list[str]]:
        numbers, rows = self.to_dict(), [["", *self.tiers]]
        for name in (*TierStats._fields, "hit_rate"):
            row = [numbers[f"{tier}.{name}"] for tier in self.tiers]
            if any(row):
                rows.append([name, *(f"{each:,.3f}" if isinstance(each, float) else f"{each:,}" for each in row)])
        return rows

    def _of_ids(self) -> list[str]:
        return ["ids: " + ", ".join(f"{name} {count:,}" for name, count in self.ids._asdict().items())] * any(self.ids)

    def __repr__(self) -> str:
        return "\n".join([*columns_of(self._rows(), is_last_text=False), *self._of_ids()])

    def _repr_html_(self) -> str:
        return html_table(*self._rows()) + "".join(self._of_ids())


def total(stats: Sequence[Stats]) -> Stats:
    """What several stores did, as one's."""
    counts = zip(*(each[:-1] for each in stats), strict=True)
    parts: Any = (type(each[0])(*map(sum, zip(*each, strict=True))) for each in counts)
    return Stats(*parts)._replace(event_time=max(filter(None, (each.event_time for each in stats)), default=None))
