"""Brings rows in: reserves slots, writes next victims back, reads rows or computes their first values."""

import time
from functools import partial

import numpy as np

from ..cache import Admission, AdmitStatus, CacheCounters
from ..config import TableConfig
from ..kernels import quantized
from ..kernels.arrays import Int32s, Int64s
from ..rows import KEY_ROW_BITS
from .arena import Arena
from .converting import RowSource
from .pins import Pins
from .writeback import WriteBack


class Filler:
    """Fills the slots of an arena. The caller holds ``fill_lock``.

    Args:
        read_rows: brings rows in.

    Attributes:
        seconds: time spent bringing rows in and writing rows back.
    """

    def __init__(self, arena: Arena, pins: Pins, writeback: WriteBack, read_rows: RowSource) -> None:
        self.seconds = 0.0
        self._arena = arena
        self._pins = pins
        self._writeback = writeback
        self._read_rows = read_rows
        self._tables: dict[int, TableConfig] = {}
        self._no_lookups = CacheCounters(lookups=0, hits=0, misses=0, evictions=0)

    def add_table(self, table_index: int, config: TableConfig) -> None:
        """Make the first values of a table's rows known."""
        self._tables[table_index] = config

    def admit(self, admission: Admission, *, read: bool, whole: bool = False) -> None:
        """Admit as many rows as there is room for (with ``whole`` all or nothing). With ``read``, read them too. What
        was pinned when it failed is the caller's to release."""
        arena = self._arena
        try:
            while True:
                with arena.lock:
                    arena.require_open()
                    self._pins.release_dropped()
                    status = arena.cache.admit(admission)
                    if whole and status is AdmitStatus.ALL_PINNED:
                        self._note_no_lookup(admission)
                        arena.cache.release(admission)
                        arena.changed.notify_all()
                        return
                if status is not AdmitStatus.DIRTY_VICTIM:
                    break
                started = time.perf_counter()
                self._writeback.make_room()
                self.seconds += time.perf_counter() - started
            if read and admission.num_missing:
                self._load(admission.missing_slots)
        finally:
            if not read:
                self._note_no_lookup(admission)

    def _note_no_lookup(self, admission: Admission) -> None:
        """Take an admission out of the lookup counts: its rows came from the tier above, or it was undone."""
        lookups, hits, misses, _ = self._no_lookups
        self._no_lookups = CacheCounters(
            lookups=lookups + admission.consumed,
            hits=hits + admission.num_unique - admission.num_missing,
            misses=misses + admission.num_missing,
            evictions=0,
        )

    def counters(self) -> CacheCounters:
        """Counts of lookups in the cache, and of evictions for lookups or for rows from the tier above."""
        every, others = self._arena.cache.counters(), self._no_lookups
        return CacheCounters(
            lookups=every.lookups - others.lookups,
            hits=every.hits - others.hits,
            misses=every.misses - others.misses,
            evictions=every.evictions,
        )

    def _load(self, slots: Int32s) -> None:
        """Read rows into their reserved slots; rows never written get their first value."""
        started = time.perf_counter()
        cache = self._arena.cache
        keys = cache.keys_of(slots)
        present = np.empty(len(keys), np.bool_)
        self._read_rows(keys, slots, cache.weights, cache.state, present)
        if not present.all():
            self._fill_first_values(keys[~present], slots[~present])
        with self._arena.lock:
            cache.filled(slots)
        self.seconds += time.perf_counter() - started

    def _fill_first_values(self, keys: Int64s, slots: Int32s) -> None:
        arena, layout = self._arena, self._arena.layout
        table_indices = keys >> KEY_ROW_BITS
        for table_index in np.unique(table_indices):
            config = self._tables[int(table_index)]
            chosen = table_indices == table_index
            fill = partial(quantized.fill_first_values, config.init) if layout.is_quantized else config.init.fill
            fill(keys[chosen], slots[chosen], arena.weights, layout.dim, arena.half)
            arena.state[slots[chosen]] = 0
            arena.state[slots[chosen], : layout.state_dim] = config.optimizer.initial_state
