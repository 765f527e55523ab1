"""The statistics of a store's tiers, from what its parts count."""

from collections.abc import Sequence

from ..hbm.build import hbm_stats
from ..io import ColdTier
from ..pool import Pool
from ..pool.stats import Stats, TierStats, of_counters

__all__ = ["store_stats"]


def store_stats(pools: Sequence[Pool], cold: ColdTier, num_rows: int, reserved_bytes: int) -> Stats:
    """Running totals.

    Args:
        num_rows: of all tables.
        reserved_bytes: of the memory budget that is no pool's.
    """
    return Stats(hbm_stats(pools), _ddr_stats(pools, reserved_bytes), _ssd_stats(cold, num_rows))


def _ddr_stats(pools: Sequence[Pool], reserved_bytes: int) -> TierStats:
    return of_counters([pool.filler.counters() for pool in pools])._replace(
        capacity_rows=sum(pool.cache.capacity for pool in pools),
        bytes=sum(pool.size_bytes for pool in pools) + reserved_bytes,
        seconds=sum(pool.filler.seconds for pool in pools),
        split_batches=sum(pool.leases.split_batches for pool in pools),
        waited_seconds=sum(pool.writeback.waited_seconds for pool in pools),
    )


def _ssd_stats(cold: ColdTier, num_rows: int) -> TierStats:
    counters = cold.counters()
    return TierStats(
        lookups=counters.rows_read,
        unique=counters.rows_read,
        hits=counters.rows_read - counters.rows_absent,
        misses=counters.rows_absent,
        capacity_rows=num_rows,
        bytes=cold.map_bytes,
        seconds=counters.read_seconds + counters.write_seconds,
        bytes_read=counters.pages_read * cold.page_bytes,
        bytes_written=counters.bytes_written,
        rows_written=counters.rows_written,
        bytes_moved=counters.bytes_moved,
        rows_moved=counters.rows_moved,
        pages_moved=counters.pages_moved,
    )
