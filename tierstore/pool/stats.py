"""What the tiers did: running totals since the store was opened."""

from collections.abc import Sequence
from typing import NamedTuple

from ..cache import CacheCounters


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
    """Bytes of segments that cleaning appended, beside ``bytes_written`` (ssd)."""
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


class Stats(NamedTuple):
    """All tiers of a store. Printed, a table of what is not zero."""

    hbm: TierStats
    ddr: TierStats
    ssd: TierStats

    def to_dict(self) -> dict[str, float]:
        """All numbers by name, as ``"ddr.hits"`` and ``"ddr.hit_rate"``: what loggers of metrics take."""
        return {
            f"{tier}.{name}": number
            for tier, counts in self._asdict().items()
            for name, number in (*counts._asdict().items(), ("hit_rate", counts.hit_rate))
        }

    def __str__(self) -> str:
        numbers = self.to_dict()
        lines = [["", *self._fields]]
        for name in (*TierStats._fields, "hit_rate"):
            row = [numbers[f"{tier}.{name}"] for tier in self._fields]
            if any(row):
                lines.append([name, *(f"{each:,.3f}" if isinstance(each, float) else f"{each:,}" for each in row)])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


def total(stats: Sequence[Stats]) -> Stats:
    """What several stores did, as one's."""
    tiers = (TierStats(*map(sum, zip(*each, strict=True))) for each in zip(*stats, strict=True))
    return Stats(*tiers)
