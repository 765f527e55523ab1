"""The tier in host memory: rows in and out by key, and pooled lookups of batches and their updates; of rows that may be
evicted, and of rows that each have a slot of their own, so that ids give slots directly and nothing is pinned."""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache.base import CHANGED, DIRTY, Admission
from ..cache.ddr import DdrCache
from ..cache.full import FullCache
from ..kernels import quantized
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s, Words
from ..kernels.jit import JIT_ENABLED
from ..layout import KEY_ROW_BITS
from ..optim.configs import Hyper
from ..system.signals import shielded
from . import direct
from .backward import Groups, merged
from .converting import raw_weights
from .joined import NO_ARG_MAX, NO_INTS, Joined
from .leases import Arena, Lease, Leases, Pins
from .tier import Tier
from .writeback import WriteBack

_Fill = Callable[[Int32s, Any], None]
"""Fills slots, given the places of their rows among the keys: int64 [n] or a slice."""


class HostTier(Tier):
    def __init__(self, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        self.lock = contextlib.nullcontext()
        self._arena = arena
        self._pins = pins
        self._leases = leases
        self._writeback = writeback

    def check_integrity(self) -> None:
        with self._arena.lock:
            self._arena.cache.check_integrity()

    # Lookups

    @abstractmethod
    def _parts(self, joined: Joined) -> Iterable[tuple[int, Lease]]:
        """(first position, lease): parts of the batch, in order. A lease is over when the next is asked for."""

    def dot(self, joined: Joined, grad_out: Tensor, lease: Lease | None) -> Floats:
        own = np.zeros(len(joined), np.float32)
        for first, part in self._parts(joined) if lease is None else ((0, lease),):
            with self._arena.rows_lock:
                self._arena.dot(joined, grad_out.numpy(), first, part.position_slots, own)
        return own

    def gradients(self, joined: Joined, mode: int, grad_out: Tensor, arg_max: Any) -> tuple[Tensor, Tensor]:
        dim, workers = self._arena.layout.dim, self._arena.workers
        values = merged(joined, dim, grad_out.numpy(), workers, arg_max=arg_max, is_mean=mode == kernels.MEAN)
        return torch.from_numpy(joined.distinct[1]), torch.from_numpy(values)

    # Rows by key

    def one_table(self, table_index: int, num_rows: int) -> direct.OneTable | None:
        arena = self._arena
        has_one = JIT_ENABLED and not arena.layout.is_quantized and isinstance(arena.cache, DdrCache | FullCache)
        return direct.OneTable(arena, self._leases, table_index, num_rows) if has_one else None

    def are_in_memory(self, keys: Int64s) -> bool:
        with self._arena.lock:
            self._arena.require_open()
            slots = self._arena.cache.find(keys)
            return int(slots.min(initial=0)) >= 0 and not self._arena.cache.is_loading(slots)

    def _use_in_memory(self, keys: Int64s, use: Callable[[Int32s], None]) -> bool:
        """Whether all these rows are in the cache; then calls ``use(slots)``. Nothing is admitted or pinned."""
        with self._arena.lock:  # no bookkeeping is half done between two lines: nothing to shield
            self._arena.require_open()
            slots = self._arena.cache.use(keys)
            if slots is not None:
                use(slots)
            return slots is not None

    def _empty(self, num_rows: int) -> Tensor:
        layout = self._arena.layout
        return torch.empty((num_rows, layout.dim), dtype=layout.torch_dtype, device="cpu")

    def read_in_memory(self, keys: Int64s) -> Tensor | None:
        out = self._empty(len(keys))
        return out if self._use_in_memory(keys, partial(self._copy_out, out=raw_weights(out))) else None

    def read(self, keys: Int64s) -> Tensor:
        """Rows in cache are copied without waiting for any device."""
        rows = self._empty(len(keys))
        out = raw_weights(rows)
        if not self._use_in_memory(keys, partial(self._copy_out, out=out)):
            self._read_parts(keys, out)
        return rows

    @shielded
    def _read_parts(self, keys: Int64s, out: Any) -> None:
        for start, lease in self._leases.parts(keys):
            with self._arena.lock:
                self._copy_out(lease.position_slots, out[start : start + lease.num_positions])

    def _copy_out(self, slots: Int32s, out: Any) -> None:
        if self._arena.layout.is_quantized:
            quantized.unpack_rows(slots, self._arena.weights, self._arena.layout.dim, self._arena.dtype_code, out)
        else:
            kernels.copy_rows_out(slots, self._arena.weights, self._arena.layout.dim, out)

    @shielded
    def read_state(self, keys: Int64s) -> Tensor:
        out = np.empty((len(keys), self._arena.layout.state_dim), np.float32)
        for start, lease in self._leases.parts(keys) if out.size else ():
            with self._arena.lock:
                part = out[start : start + lease.num_positions]
                kernels.copy_rows_out(lease.position_slots, self._arena.state, out.shape[1], part)
        return torch.from_numpy(out)

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        arena, weights = self._arena, raw_weights(rows.cpu().contiguous())
        for start, lease in self._leases.parts(keys):
            part = weights[start : start + lease.num_positions]
            with arena.lock:
                self._writeback.begin_update(lease.slots)
                kernels.copy_rows_in(lease.position_slots, part, arena.weights, arena.layout.dim)

    def take(self, keys: Int64s, weights: Words, state: Words) -> None:
        """Copy whole rows out, for a tier above.

        Args:
            keys: int64 [n], distinct.
            weights, state: uint64 [n, words], out.
        """
        if self._use_in_memory(keys, partial(self._take, weights=weights, state=state)):
            return
        for start, lease in self._leases.parts(keys):
            part = slice(start, start + lease.num_positions)
            with self._arena.rows_lock:
                self._take(lease.slots, weights[part], state[part])

    def _take(self, slots: Int32s, weights: Words, state: Words) -> None:
        def work(begin: int, end: int) -> None:
            part = slice(begin, end)
            for arena, out in ((self._arena.cache.weights, weights), (self._arena.cache.state, state)):
                np.take(arena, slots[part], axis=0, out=out[part], mode="clip")

        self._arena.workers.divide(work, len(slots))

    def put(self, keys: Int64s, weights: Words, state: Words) -> None:
        """Overwrite whole rows, state included, with newer ones from a tier above; nothing is read for it. The cold
        tier's errors: victims could not be written. Some of the given rows may be in; the tier above has values as
        new."""
        cache, workers = self._arena.cache, self._arena.workers

        def fill(slots: Int32s, places: Any) -> None:
            rows = cache.weights, cache.state, weights[places], state[places]
            workers.divide(lambda begin, end: kernels.put_rows(begin, end, slots, *rows), len(slots))

        self._overwrite(keys, fill)

    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        def fill(slots: Int32s, places: Any) -> None:
            self._leases.fill_first_values(int(keys[0]) >> KEY_ROW_BITS, ids[places], slots)

        self._overwrite(keys, fill)

    def _overwrite(self, keys: Int64s, fill: _Fill) -> None:
        start = 0
        while start < len(keys):
            lease = self._leases.leading(keys[start:], fill=partial(self._fill_admitted, fill=fill, start=start))
            start += lease.num_positions
            lease.release()

    def _fill_admitted(self, admission: Admission, fill: _Fill, start: int) -> None:
        """Its keys are distinct: row i is that of position i. The caller holds ``fill_lock``."""
        cache, slots = self._arena.cache, admission.slots
        with self._arena.lock:
            missing = admission.missing[: admission.num_missing]
            others = np.delete(np.arange(len(slots)), missing)
            # Whole before anybody else can see them: waiting for the outbox lets others in.
            fill(slots[missing], start + missing)
            cache.filled(slots[missing])
            self._writeback.begin_update(slots)
            fill(slots[others], start + others)


class EvictingRows(HostTier):
    """Of rows that may be evicted."""

    reads_keys = True

    def has_room(self, joined: Joined) -> bool:
        return self._pins.has_room(len(joined)) or self._pins.has_room(len(joined.distinct[1]))

    def stage(self, joined: Joined) -> Lease | None:
        lease = self._leases.whole(joined.keys, joined.order_of_use()) if self.has_room(joined) else None
        if lease is None or self._pins.hold(lease):
            return lease
        lease.release()
        return None

    def _parts(self, joined: Joined) -> Iterable[tuple[int, Lease]]:
        whole = not self._leases.last_was_split or self._may_fit(joined)
        return self._leases.parts(joined.keys, joined.order_of_use() if whole else NO_INTS)

    def _may_fit(self, joined: Joined) -> bool:
        """Whether there may be slots for all rows: an admission that fails has evicted others for nothing. Rows are
        counted only after a batch that was split."""
        capacity = self._arena.cache.capacity
        return len(joined.keys) <= capacity or len(joined.distinct[1]) <= capacity

    def look_up(
        self, joined: Joined, mode: int, out: Tensor, lease: Lease | None, *, keep: bool
    ) -> tuple[Lease | None, Int32s]:
        arena, count, into = self._arena, len(joined.keys), out.numpy()
        arg_max = np.empty((joined.num_bags, arena.layout.dim), np.int32) if mode == kernels.MAX else NO_ARG_MAX
        if not count:
            arena.pool(arena.workers, joined, mode, into, arg_max, 0, NO_INTS)
        for first, part in self._parts(joined) if lease is None else ((0, lease),):
            with arena.rows_lock:
                arena.pool(arena.workers, joined, mode, into, arg_max, first, part.position_slots)
            if keep and not part.held and part.num_positions == count and self._pins.hold(part):
                lease = part
        return lease, arg_max

    def whole(self, joined: Joined, lease: Lease | None) -> Lease | None:
        if lease is not None or (self._leases.last_was_split and not self._may_fit(joined)):
            return lease
        # Rows used last first: they are the likeliest to be still resident.
        return self._leases.whole(joined.keys, np.arange(len(joined), dtype=np.int32)[::-1].copy())

    def update(
        self, joined: Joined, mode: int, hyper: list[Hyper], grad_out: Tensor, arg_max: Any, lease: Lease | None
    ) -> None:
        seeds, keys = None if joined.features.round_to_nearest else joined.rounding_seeds(), None
        if lease is None:
            inverse, keys = joined.distinct
            count = len(keys)
        else:
            assert lease.inverse is not None, "slots of this cache are not the positions' own"
            inverse, count = lease.inverse, len(lease.slots)
            if seeds is not None:
                keys = np.empty(count, np.int64)
                keys[inverse] = joined.keys
        number = np.zeros(count, np.int32)
        groups = Groups(
            joined, inverse, number, arg_max, grad_out.shape[1], self._arena.workers, is_mean=mode == kernels.MEAN
        )
        keys = None if keys is None else keys[groups.rows]
        whole = None if lease is None else ((0, lease.slots.take(groups.rows)),)
        for first, slots in self._row_parts(keys) if whole is None else whole:
            with self._arena.lock:
                if self._arena.is_closed:
                    self._arena.require_open()
                self._writeback.begin_update(slots)
                row_keys = None if seeds is None or keys is None else keys[first:]
                groups.update(self._arena, first, slots, hyper, grad_out.numpy(), seeds=seeds, keys=row_keys)

    def _row_parts(self, keys: Any) -> Iterable[tuple[int, Int32s]]:
        """(first number, int32 slot of each from there on): parts of the rows, pinned. Rows used last come first: they
        are the likeliest to be still resident."""
        for passed, part in self._leases.parts(keys[::-1].copy()):
            yield len(keys) - passed - len(part.slots), part.slots[::-1].copy()


class InPlaceRows(HostTier):
    """Of rows that each have a slot of their own."""

    def __init__(self, cache: FullCache, arena: Arena, pins: Pins, leases: Leases, writeback: WriteBack) -> None:
        super().__init__(arena, pins, leases, writeback)
        self._cache = cache

    @property
    def are_all_in(self) -> bool:
        return self._cache.is_complete

    def has_room(self, joined: Joined) -> bool:  # noqa: ARG002 - each row has its slot
        return True

    def stage(self, joined: Joined) -> Lease:
        return self._held(self._bring_in(joined))

    def _held(self, slots: Int32s) -> Lease:
        """A lease that marks an in-flight batch; no pin does."""
        lease = self._pins.lease(slots=slots)
        self._pins.hold(lease)
        return lease

    def _bring_in(self, joined: Joined) -> Int32s:
        """int32 [N]: the slot of each position, its row in. It stays in."""
        cache = self._cache
        slots = joined.slots(cache.numbering)
        self._arena.require_open()
        absent = NO_INTS if cache.are_in(slots) else cache.absent(slots)
        if len(absent):
            self._leases.leading(cache.numbering.keys_at(absent)).release()
        with self._arena.lock:
            cache.note_hits(len(slots) - len(absent))
        return slots

    def _overwrite(self, keys: Int64s, fill: _Fill) -> None:
        slots = self._cache.numbering.slots_of(keys)
        if not (len(slots) and self._cache.are_in(slots)):
            return super()._overwrite(keys, fill)
        with self._arena.lock:
            self._writeback.begin_update(slots)
            self._arena.require_open()  # nothing is pinned: it may have been given up while the outbox was full
            return fill(slots, slice(None))

    def _parts(self, joined: Joined) -> Iterable[tuple[int, Lease]]:
        return ((0, self.whole(joined, None)),)

    def look_up(
        self, joined: Joined, mode: int, out: Tensor, lease: Lease | None, *, keep: bool
    ) -> tuple[Lease | None, Int32s]:
        arena = self._arena
        arg_max = np.empty((joined.num_bags, arena.layout.dim), np.int32) if mode == kernels.MAX else NO_ARG_MAX
        if lease is None and not joined.is_read and not arena.layout.is_quantized:
            slots = np.empty(len(joined), np.int32) if keep else NO_INTS
            ids, *plan = joined.ids_of_bags(self._cache.numbering)
            with arena.rows_lock:
                arena.require_open()
                failed = direct.look_up(
                    arena, self._cache, ids, plan, joined.scale, mode, joined.columns, out.numpy(), arg_max, slots
                )
            if not failed:
                if keep:  # the caller may change the ids before backward
                    joined.note_slots(slots, self._cache.numbering)
                return self._held(slots) if keep else None, arg_max
            joined.check(failed)
        slots = self._bring_in(joined) if lease is None else lease.slots
        with arena.rows_lock:
            arena.pool(arena.workers, joined, mode, out.numpy(), arg_max, 0, slots)
        return self._held(slots) if keep and lease is None else lease, arg_max

    def whole(self, joined: Joined, lease: Lease | None) -> Lease:
        return lease or self._pins.lease(slots=self._bring_in(joined))

    def update(
        self, joined: Joined, mode: int, hyper: list[Hyper], grad_out: Tensor, arg_max: Any, lease: Lease | None
    ) -> None:
        cache, seeds = self._cache, None if joined.features.round_to_nearest else joined.rounding_seeds()
        slots = self._bring_in(joined) if lease is None else lease.slots
        with self._arena.lock:
            self._arena.require_open()
            groups = Groups(
                joined, slots, cache.number, arg_max, grad_out.shape[1], self._arena.workers,
                is_mean=mode == kernels.MEAN,
            )  # fmt: skip
            flags = cache.flags
            if cache.num_frozen:
                self._writeback.begin_update(groups.rows)
                flags = flags[:0]
            keys = None if seeds is None else cache.numbering.keys_at(groups.rows)
            groups.update(
                self._arena, 0, groups.rows, hyper, grad_out.numpy(), flags=flags, dirty=DIRTY | CHANGED, seeds=seeds,
                keys=keys,
            )  # fmt: skip
