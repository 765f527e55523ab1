"""Rows of one layout in device memory: what its two implementations share, and pooled lookups over them.

``full``: every row has a slot; ``pool``: some rows do, and may be evicted. Results are those of host memory. The host
joins and checks ids while it writes them to page-locked memory, and sends them with the bags' starts by one copy on the
side stream; ids that are on the device are joined there (``lookup.lookup``). Forward and backward run on
the caller's current stream.
"""

import contextlib
import math
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.base import CacheCounters
from ..cache.full import RowNumbering
from ..errors import ClosedError, TableError
from ..kernels import slots as kernels
from ..kernels.arrays import Floats, Int32s, Int64s
from ..optim.configs import NUM_HYPER, Hyper, adding
from ..pool.joined import Features, Joined, Numbering
from ..pool.leases import PIN_POLL_SECONDS
from ..pool.pool import Pool
from ..pool.tier import Tier
from ..system.signals import shielded
from .cache import HbmSize, group, kernels_of
from .kernel_types import Bags, DeviceBatch, DeviceIds, Groups, IdCheck
from .streams import Field, Mark, Sender, Staging, Streams, host_buffer

POSITIONS_MAX: Final = 2**30  # of a batch: kernels number them by int32, and add two such numbers
IN_USE: Final = "an in-flight batch (prefetched, or before its backward or step)"  # uses rows longer than one call
_WIDE: Final = 4  # float32 that a thread of a GPU moves at a time, 16 bytes
_KEPT: Final = 128  # features and rules that are sent once
_WORDS_AT_ONCE: Final = 256  # one launch makes ``IdCheck.is_right`` of so many batches
_TRANSIENT_SECONDS: Final = 1.0  # no read or write of rows takes longer
_LATE: Final = (
    "The device found this in the ids of an earlier batch. That batch changed no row of the tables that it was looked "
    "up in together, and its results are of no use. Ids on the host are checked before anything is computed."
)


class DeviceLease:
    """Rows of a batch that stay in their slots until ``release``; held leases outlive the call that took them."""

    __slots__ = ("__weakref__", "_rows", "claim", "held")

    def __init__(self, rows: "DeviceRows", slots: Tensor, ready: Mark) -> None:
        self._rows: DeviceRows | None = rows
        self.held = False
        self.claim = Claim(self, rows.let_go)
        self.claim.slots, self.claim.changed = slots, False
        self.claim.ready = self.claim.last_use = ready

    def in_use(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Around what the current stream is given that uses the rows, or changes them."""
        assert self._rows is not None, "rows are used after their release"
        return self._rows.in_use(self.claim, changes=changes)

    def release(self) -> None:
        """Only work given to the device by now uses the rows any more; a second call does nothing."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.let_go(self.claim)


class Claim(weakref.ref[DeviceLease]):
    """What is known of a lease also when it is gone. Nothing of Python runs where one is dropped: the garbage collector
    may do that in any thread, under any lock, and no exception can come then."""

    __slots__ = ("changed", "last_use", "num_rows", "overflow", "ready", "slots")
    __eq__ = object.__eq__  # by identity: sets look for claims of leases that are gone
    __hash__ = object.__hash__
    slots: Tensor  # int32 [N]; the first ``num_rows`` are of the distinct rows in the order asked for, the others -1
    num_rows: int
    overflow: Int32s  # which overflow slots are among them
    ready: Mark  # when the rows are in place
    last_use: Mark  # when the work that uses the rows is done
    changed: bool  # whether that work makes the rows newer than those below


class Part(NamedTuple):
    """Positions, or distinct rows, from number ``first`` up to ``last`` of a batch, in pinned slots."""

    first: int
    last: int
    slots: Tensor  # int32, of each; with ``inverse``, of each distinct row of the part's positions
    inverse: Tensor | None  # int32 [last - first], the distinct row of each position
    lease: DeviceLease

    @property
    def position_slots(self) -> Tensor:
        return self.slots if self.inverse is None else self.slots[self.inverse]


class DeviceRows(Tier):
    """Rows of one layout in device memory.

    Attributes:
        weights: of the table's dtype, [slots, >= dim]; state: float32 [slots, >= state_dim]. The arenas.
        dirty: uint8 [slots], which ``update_rows`` marks; None where leases do.
        kernels: ``launches`` or ``twin``.
        lock: serialises threads that bring rows in or write them down; taken before the locks of the pool below.
        let_go: takes the claim of a lease that is released or dropped; nothing of Python.
        split_batches: batches whose rows did not fit at once; conflict_misses: rows that found their set pinned.
        fill_seconds: time spent bringing rows in and writing them down.
    """

    on_device = True
    row_dtype: torch.dtype  # of ``DeviceBatch.rows``
    numbering: RowNumbering | None = None  # of slots, if these are what ``DeviceBatch.rows`` are; else they are keys
    dirty: Tensor | None = None
    let_go: Callable[[Claim], None]
    _index_bytes: int

    def __init__(self, below: Pool, size: HbmSize, sender: Sender) -> None:
        self.layout = below.layout
        self.streams: Streams = sender.streams
        self.device = sender.device
        self.kernels = kernels_of(self.device)
        self.counters = CacheCounters(0, 0, 0, 0)
        self.split_batches = self.conflict_misses = 0
        self.fill_seconds = 0.0
        self.lock = threading.RLock()
        self._size = size
        self._below = below.host
        self._sender = sender
        self._sent_once: dict[Any, tuple[Any, list[Tensor], Mark]] = {}
        self._check_lock = threading.RLock()
        self._words: list[Tensor] = []
        self._unseen: deque[IdCheck] = deque()
        self._retain_lock = threading.RLock()
        self._retained: deque[tuple[Mark, tuple[Any, ...]]] = deque()
        self._closed = False
        count, widths = size.cached_rows + size.overflow_rows, (self.layout.weight_words, self.layout.state_words)
        # Not inference tensors, even if inference comes first: they will be written to outside inference mode too.
        with torch.inference_mode(False), self.streams.side():
            arenas = tuple(torch.empty((count, width), dtype=torch.int64, device=self.device) for width in widths)
            self.capacity_rows = count
            self.weights, self.state = arenas[0].view(self.layout.torch_dtype), arenas[1].view(torch.float32)
            self._staging = Staging(self.layout, size.staging_rows, arenas, self.streams, self.kernels)

    # Batches

    def send(
        self, given: Joined, write: Callable[[Numbering | None, NDArray[Any]], None], known: Tensor | None = None
    ) -> DeviceBatch:
        """A batch, on its way by one copy on the side stream. ``write`` puts slots or keys into an array, unless they
        are on the device already (``known``), made on the calling thread's current stream. ValueError: an id outside
        its table, or over 2**30 positions."""
        self.require_open()
        count, columns = int(given.starts[-1]), given.columns
        if count > POSITIONS_MAX:
            raise ValueError(f"a batch of {count} ids is too large for device memory; give at most {POSITIONS_MAX}")
        fields: list[Field] = [
            (np.int32, len(given.starts)),
            (columns.dtype, len(columns)),
            (np.int32, len(columns)),
            (np.float32, len(given.scale)),
            (np.int64 if self.numbering is None else np.int32, count if known is None else 0),
        ]

        def fill(arrays: list[NDArray[Any]]) -> None:
            arrays[0][:], arrays[1][:], arrays[2][:], arrays[3][:] = given.starts, columns, given.table_of, given.scale
            if known is None:
                write(self.numbering, arrays[4])

        made = None if known is None else self.streams.mark()
        (starts, sent_columns, table_of, scale, rows), _ = self._sender.send(fields, fill)
        with self.streams.side():
            bag_of = torch.empty(count, dtype=torch.int32, device=self.device)
            self.kernels.number_bags(starts, bag_of)
            ready = self.streams.mark()
        own_scale = scale if len(given.scale) else None
        bags = Bags(starts, bag_of, sent_columns, table_of, given.batch, own_scale, _step_of(columns))
        return DeviceBatch(bags, rows if known is None else known, ready, made or ready)

    def join(
        self, features: Features, batch: int, given: DeviceIds, explain: Callable[[Int64s], ValueError]
    ) -> DeviceBatch:
        """A batch of ids that the calling thread's current stream has made, joined on the side stream. Nothing waits.
        ``explain``: the error for an ``IdCheck.record`` that is not all 0."""
        self.require_open()
        count = len(given.ids)

        def arrays() -> Sequence[NDArray[Any]]:
            firsts = features.first_keys
            if self.numbering is not None:
                firsts = self.numbering.first_slots(features.indices)
            return firsts, features.num_rows, features.columns, features.table_of

        def empty(length: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(length, dtype=dtype, device=self.device)

        made = self.streams.mark()
        with self.streams.side():
            self.streams.follow(made)
            sent, _ = self._once(features.indices.tobytes() + features.columns.tobytes(), None, arrays)
            firsts, num_rows, columns, table_of = sent
            starts, bag_of, rows = empty(len(firsts) * batch + 1), empty(count), empty(count, self.row_dtype)
            scale = None if given.scale is None else empty(count, torch.float32)
            bags = Bags(starts, bag_of, columns, table_of, batch, scale, _step_of(features.columns))
            with self._check_lock, torch.inference_mode(False):
                if not self._words:
                    ones = torch.ones(_WORDS_AT_ONCE, dtype=torch.int32, device=self.device)
                    self._words += [ones[place : place + 1] for place in range(_WORDS_AT_ONCE)]
                is_right = self._words.pop()
            record = host_buffer(self.streams, len(firsts) + 1, torch.int64)
            record.numpy()[:] = 0
            self.kernels.join_ids(given, firsts, num_rows, bags, rows, is_right, record)
            ready = self.streams.mark()
            self.retain(given, is_right, record, sent)
        return DeviceBatch(bags, rows, ready, ready, IdCheck(is_right, record, ready, explain))

    def _once(self, name: Any, content: Any, arrays: Callable[[], Sequence[NDArray[Any]]]) -> tuple[list[Tensor], Mark]:
        """The arrays on the device, and when; sent again only if the content of that name was last another."""
        known = self._sent_once.get(name)
        if known is None or known[0] != content:
            if len(self._sent_once) >= _KEPT:
                self._sent_once.clear()
            known = self._sent_once[name] = (content, *self._sender.copy(*arrays()))
        return known[1:]

    def batch_of(self, joined: Joined) -> DeviceBatch:
        """The batch on the device; of merged ones, joined there from those of the parts. To be called before a lookup
        gives the device more work; errors as ``begin``."""
        self.begin()
        if joined.tier is not self:
            if joined.tier is not None:
                joined.note_keys(joined.tier.position_keys(joined.sent))
            joined.tier, joined.sent = self, self.send(joined, joined.write, self._known_rows(joined))
        batch: DeviceBatch = joined.sent
        return batch

    def _known_rows(self, joined: Joined) -> Tensor | None:
        if joined.parts is None:
            return None
        none: Any = torch.empty(0, dtype=self.row_dtype, device=self.device)
        pieces = [self.batch_of(each) for each in joined.parts.joined if len(each)]
        for piece in pieces:
            self.streams.follow(piece.rows_ready)
        rows = [each.sent.rows if len(each) else none for each in joined.parts.joined]
        known = torch.cat(joined.parts.over_positions(rows))
        self.retain(*pieces)
        return known

    @contextlib.contextmanager
    def _using(self, joined: Joined, *others: Any) -> Iterator[DeviceBatch]:
        """The batch; what kernels read is kept until the work given within is done."""
        batch = self.batch_of(joined)
        try:
            yield batch
        finally:
            self.retain(batch, *others)

    def retain(self, *objects: Any) -> None:
        """Keep objects until the work given to the calling thread's current stream so far, which uses them, is done."""
        with self._retain_lock:
            while self._retained and self._retained[0][0].query():
                self._retained.popleft()
            self._retained.append((self.streams.mark(), objects))

    # Ids that the device joined

    def begin(self) -> None:
        """ValueError for an earlier batch's wrong id, as far as that is known; RuntimeError under capture into a CUDA
        graph."""
        self.streams.refuse_capture()
        self.look(wait=False)

    def _note(self, check: IdCheck) -> None:
        """A batch was used. ValueError for what is known to be wrong by now, with it or with an earlier one."""
        if check.made.query():
            check.require_right()
        else:
            with self._check_lock:
                self._unseen.append(check)
        self.look(wait=False)

    def look(self, *, wait: bool = True) -> None:
        while self._unseen:
            with self._check_lock:
                if not self._unseen or not (wait or self._unseen[0].made.query()):
                    return
                check = self._unseen.popleft()
            try:
                check.require_right()
            except ValueError as error:
                error.add_note(_LATE)
                raise

    def require_right(self, batch: DeviceBatch) -> None:
        """ValueError for a wrong id or offset, which ``look`` will not raise again. Waits for the device, if the host
        has not checked them."""
        if batch.check is not None:
            with self._check_lock:
                self._unseen = deque(each for each in self._unseen if each is not batch.check)
            batch.check.require_right()

    # Leases

    @abstractmethod
    def lease_of(self, batch: DeviceBatch) -> DeviceLease | None:
        """A lease of all rows of the batch; None if they do not fit."""

    @abstractmethod
    def parts(self, batch: DeviceBatch, lease: DeviceLease | None, *, by_row: bool = False) -> Iterator[Part]:
        """Parts of the batch's positions in order, or of its distinct rows (the last may end behind them); one, if the
        rows fit. A lease that is not given (one of the whole batch) is released when the next part is asked for, unless
        the caller holds it. BudgetError: every slot stayed pinned by others for a minute."""

    @abstractmethod
    def hold(self, lease: DeviceLease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""

    @abstractmethod
    def in_use(self, claim: Claim, *, changes: bool) -> AbstractContextManager[None]: ...

    # Distinct rows

    def groups(self, batch: DeviceBatch) -> Groups:
        """The batch's positions by row, grouped if they were not: of slots on the calling thread's current stream, of
        keys on the side stream."""
        if batch.groups is None:
            with self.streams.side() if self.numbering is None else contextlib.nullcontext():
                self.streams.follow(batch.rows_ready)
                made = group(batch.rows)
                if batch.check is not None and self.numbering is not None:
                    # A wrong batch has no rows that an update could change.
                    made = made._replace(num_unique=made.num_unique * batch.check.is_right)
                batch.grouped = self.streams.mark()
            batch.groups = made  # last: another thread may look
        return batch.groups

    def _groups_here(self, batch: DeviceBatch) -> Groups:
        """``groups``, for the calling thread's current stream."""
        groups = self.groups(batch)
        assert batch.grouped is not None
        self.streams.follow(batch.grouped)
        return groups

    def position_keys(self, batch: DeviceBatch) -> Int64s:
        """Numpy int64 [N]: the key of each position. Waits for the device; also after ``close``."""
        self.streams.follow(batch.rows_ready)
        found: Any = batch.rows.cpu().numpy()
        return found if self.numbering is None else self.numbering.keys_at(found)

    def merged(
        self, bags: Bags, groups: Groups, count: int, *, num_tables: int, dim: int, grad_out: Tensor,
        arg_max: Tensor | None, is_mean: bool,
    ) -> Tensor:  # fmt: skip
        """float32 [count, dim]: the gradient of each of so many distinct rows, in the order of the groups."""
        values = torch.zeros((count, dim), dtype=torch.float32, device=self.device)
        codes, hyper = adding(num_tables)
        slots, code_of = torch.arange(count, dtype=torch.int32), torch.from_numpy(codes.astype(np.int32))
        self.kernels.update_rows(
            bags, groups, slots.to(self.device), 0, grad_out=grad_out, arg_max=arg_max, mean=is_mean,
            codes=tuple(codes.tolist()), code_of=code_of.to(self.device), hyper=torch.from_numpy(hyper).to(self.device),
            weights=values, state=values.new_zeros((count, 1)), dim=dim, dirty=None,
        )  # fmt: skip
        return values

    # Lookups

    def look_up(self, joined: Joined, mode: int, out: Tensor, lease: Any, *, keep: bool) -> tuple[Any, Any]:
        given, dim, arg_max = lease, self.layout.dim, None
        if mode == kernels.MAX:
            arg_max = torch.empty((joined.num_bags, dim), dtype=torch.int32, device=self.device)
        if not len(joined):
            for column in joined.columns.tolist():
                out[:, column : column + dim] = 0
            return lease, None if arg_max is None else arg_max.fill_(-1)
        with self._using(joined, arg_max) as batch:
            for part in self.parts(batch, lease):
                with part.lease.in_use():
                    self.kernels.pool_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, mode=mode, weights=self.weights,
                        dim=dim, out=out, arg_max=arg_max,
                    )  # fmt: skip
                is_whole = part.last - part.first == len(batch)
                if keep and is_whole and not part.lease.held and self.hold(part.lease):
                    lease = part.lease
            try:
                if batch.check is not None:
                    self._note(batch.check)
            except BaseException:
                if lease is not given:
                    lease.release()
                raise
        return lease, arg_max

    def dot(self, joined: Joined, grad_out: Tensor, lease: Any) -> Floats:
        """Waits for the device."""
        with self._using(joined) as batch:
            own = torch.zeros(len(batch), dtype=torch.float32, device=self.device)
            for part in self.parts(batch, lease):
                with part.lease.in_use():
                    self.kernels.dot_rows(
                        batch.bags, part.slots, part.inverse, part.first, part.last, weights=self.weights,
                        dim=self.layout.dim, grad_out=grad_out, grad_scale=own,
                    )  # fmt: skip
        found: Floats = own.cpu().numpy()
        return found

    def whole(self, joined: Joined, lease: Any) -> Any:
        with self._using(joined) as batch:
            return lease or self.lease_of(batch)

    def update(self, joined: Joined, mode: int, hyper: list[Hyper], grad_out: Tensor, arg_max: Any, lease: Any) -> None:
        codes, numbers = joined.features.rules(hyper)
        rules, sent = self._once(tuple(joined.tables), hyper, lambda: (numbers.ravel(), codes.astype(np.int32)))
        self.streams.follow(sent)
        with self._using(joined, arg_max, rules) as batch:
            groups = self._groups_here(batch)
            for part in self.parts(batch, lease, by_row=True):
                try:
                    with part.lease.in_use(changes=True):
                        self.kernels.update_rows(
                            batch.bags, groups, part.slots, part.first, grad_out=grad_out, arg_max=arg_max,
                            mean=mode == kernels.MEAN, codes=tuple(codes.tolist()), code_of=rules[1],
                            hyper=rules[0].view(-1, NUM_HYPER), weights=self.weights, state=self.state,
                            dim=self.layout.dim, dirty=self.dirty,
                        )  # fmt: skip
                finally:
                    part.lease.release()

    def gradients(self, joined: Joined, mode: int, grad_out: Tensor, arg_max: Any) -> tuple[Tensor, Tensor]:
        """Waits for the device."""
        dim = self.layout.dim
        if not len(joined):
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dim)
        with self._using(joined, arg_max) as batch:
            self.require_right(batch)
            groups = self._groups_here(batch)
            keys = groups.distinct[: int(groups.num_unique)]
            if self.numbering is not None:
                keys = torch.from_numpy(self.numbering.keys_at(keys.cpu().numpy())).to(self.device)
            values = self.merged(
                batch.bags, groups, len(keys), num_tables=len(joined.tables), dim=dim, grad_out=grad_out,
                arg_max=arg_max, is_mean=mode == kernels.MEAN,
            )  # fmt: skip
        return keys, values

    # Rows by key

    def _of_keys(self, keys: Int64s) -> DeviceBatch:
        """Only rows, in no bags."""
        rows = keys if self.numbering is None else self.numbering.slots_of(keys).astype(np.int32)
        (sent,), ready = self._sender.copy(rows)
        no_bags: Any = None
        return DeviceBatch(no_bags, sent, ready, ready)

    def read(self, keys: Int64s) -> Tensor:
        return self._read(keys, self.weights, self.layout.dim)

    def read_state(self, keys: Int64s) -> Tensor:
        return self._read(keys, self.state, self.layout.state_dim)

    @shielded
    def _read(self, keys: Int64s, arena: Tensor, columns: int) -> Tensor:
        batch, found = self._of_keys(keys), []
        for part in self.parts(batch, None):
            with part.lease.in_use():
                found.append(torch.index_select(arena, 0, part.position_slots)[:, :columns])
        self.retain(batch)
        return found[0].contiguous() if len(found) == 1 else torch.cat(found)

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        distinct, place = np.unique(keys[::-1], return_index=True)
        batch, last = self._of_keys(distinct), torch.from_numpy(len(keys) - 1 - place)
        chosen = rows[last.to(rows.device)].to(self.device)
        for part in self.parts(batch, None):
            with part.lease.in_use(changes=True):
                slots = part.position_slots.long()
                if self.dirty is not None:
                    self.dirty[slots] = 1  # first, as the next line may fail half done
                self.weights[slots, : self.layout.dim] = chosen[part.first : part.last]
        self.retain(batch)

    @shielded
    def put_first_values(self, keys: Int64s, ids: Int64s) -> None:
        """Overwrite rows below, and those of them that are here."""
        with self.lock, self.streams.side():
            self._below.put_first_values(keys, ids)
            if len(keys):
                self._renew(keys)

    @abstractmethod
    def _renew(self, keys: Int64s) -> None:
        """Take those of these rows that are here from below again. The caller holds ``lock``, on the side stream."""

    @contextlib.contextmanager
    def emptied(self) -> Iterator[None]:
        """Copy every newer row down, forget all rows, and bring none in until the end: those below will change.
        TableError: rows are in use, and still after a second."""
        with self.lock:
            self._empty()
            yield

    @shielded
    def _empty(self) -> None:
        deadline = time.monotonic() + _TRANSIENT_SECONDS
        while self.num_leased and time.monotonic() < deadline:
            time.sleep(PIN_POLL_SECONDS / 10)
        if self.num_leased:
            raise TableError(f"rows are in use by {IN_USE}")
        self.flush()
        self._forget()

    @abstractmethod
    def _forget(self) -> None: ...

    # State

    @property
    def size_bytes(self) -> int:
        return self.weights.nbytes + self.state.nbytes + self._index_bytes

    @property
    def host_bytes(self) -> int:
        return self._size.host_bytes(self.layout)

    def refuse(self) -> None:
        self._closed = True

    def close(self) -> None:
        """Refuse further use, wait until no work that was given to the device uses the rows, and free their memory,
        even if objects still refer to them (as a lookup does that waits for backward)."""
        self.refuse()
        with self.lock, self.streams.side():
            self._follow_users()
            self.streams.mark().synchronize()
            for arena in (self.weights, self.state):
                arena.untyped_storage().resize_(0)

    def _follow_users(self) -> None:
        for mark, _ in list(self._retained):
            self.streams.follow(mark)

    def require_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed")


def _step_of(columns: Any) -> int:
    """``Bags.column_step``."""
    return math.gcd(_WIDE, *columns.tolist())


def rows_of(pool: Pool) -> DeviceRows:
    """A pool's ``tier``, where that is in device memory."""
    assert isinstance(pool.tier, DeviceRows), "a lookup in device memory over a pool without"
    return pool.tier
