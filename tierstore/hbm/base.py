"""The contract of rows in device memory, as lookups use them, and what its implementations share.

Implementations: ``full`` (every row has a slot) and ``pool`` (some rows do, and may be evicted).
"""

import contextlib
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.base import CacheCounters
from ..cache.full import RowNumbering
from ..errors import ClosedError, TableError
from ..kernels.arrays import Int32s, Int64s
from ..layout import KEY_ROW_BITS
from ..optim.configs import NUM_HYPER, Hyper, adding
from ..pool.arena import PIN_POLL_SECONDS
from ..pool.joined import Features, Joined, Numbering
from ..pool.pool import Pool
from ..system.signals import shielded
from .cache import Grouping, HbmSize, group_keys, group_slots
from .kernel_types import Bags, DeviceIds, Groups, IdCheck
from .lookups import DeviceLookups
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


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A batch on the device.

    Attributes:
        bags: where its positions lie.
        rows: int32 [N], the slot of each position, or int64 [N], its key.
        ready: when bags are there; rows_ready: when rows are.
        check: of ids that the device joined; None if the host did, which found nothing wrong.
        grouping: its positions by row, when ``grouped``; None until somebody asked for it.
    """

    bags: Bags
    rows: Tensor
    ready: Mark
    rows_ready: Mark
    check: IdCheck | None = None
    grouping: Grouping | None = None
    grouped: Mark | None = None

    def __len__(self) -> int:
        return len(self.rows)


class DeviceLease:
    """Rows of a batch that stay in their slots until ``release``.

    Attributes:
        held: it outlives the call that took it.
        claim: what is known of it also when it is gone.
    """

    __slots__ = ("__weakref__", "_rows", "claim", "held")

    def __init__(self, rows: "DeviceRows", slots: Tensor, ready: Mark) -> None:
        self._rows: DeviceRows | None = rows
        self.held = False
        self.claim = Claim(self, rows.let_go)
        self.claim.slots = slots
        self.claim.ready = self.claim.last_use = ready
        self.claim.changed = False

    def in_use(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """What the calling thread's current stream is given within uses the rows, and may change them."""
        assert self._rows is not None, "rows are used after their release"
        return self._rows.in_use(self.claim, changes=changes)

    def release(self) -> None:
        """Only work that was given to the device by now uses the rows any more; a second call does nothing."""
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
    """Positions, or distinct rows, from number ``first`` up to ``last`` of a batch, in pinned slots.

    Attributes:
        slots: int32, the slot of each; with ``inverse``, of each distinct row of the part's positions.
        inverse: int32 [last - first], the distinct row of each position, or None.
    """

    first: int
    last: int
    slots: Tensor
    inverse: Tensor | None
    lease: DeviceLease


class Rules(NamedTuple):
    codes: tuple[int, ...]
    code_of: Tensor
    hyper: Tensor


def row_kernels(device: torch.device) -> ModuleType:
    """Kernels over rows."""
    if device.type == "cuda":
        from . import rows_triton

        return rows_triton
    from . import rows_twin

    return rows_twin


class DeviceRows(DeviceLookups, ABC):
    """Rows of one layout in device memory.

    Attributes:
        weights: of the table's dtype, [slots, >= dim]; state: float32 [slots, >= state_dim]. The arenas.
        dirty: uint8 [slots], which ``update_rows`` marks; None where leases do.
        streams: the device's streams.
        kernels: ``rows_triton`` or ``rows_twin``.
        lock: serialises threads that bring rows in or write them down; taken before the locks of the pool below.
        let_go: takes the claim of a lease that is released or dropped; nothing of Python.
        split_batches: batches whose rows did not fit at once; conflict_misses: rows that found their set pinned.
        fill_seconds: time spent bringing rows in and writing them down.
    """

    row_dtype: torch.dtype  # of ``DeviceBatch.rows``
    numbering: RowNumbering | None = None  # of slots, if these are what ``DeviceBatch.rows`` are; else they are keys
    dirty: Tensor | None = None
    let_go: Callable[[Claim], None]
    _index_bytes: int

    def __init__(self, below: Pool, size: HbmSize, sender: Sender) -> None:
        self.layout = below.layout
        self.streams: Streams = sender.streams
        self.device = sender.device
        self.kernels = row_kernels(self.device)
        self.counters = CacheCounters(0, 0, 0, 0)
        self.split_batches = self.conflict_misses = 0
        self.fill_seconds = 0.0
        self.lock = threading.RLock()
        self._size = size
        self._below = below.host
        self._sender = sender
        self._sent_once: dict[Any, tuple[Any, Any, Mark]] = {}
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
            (torch.int32, len(given.starts)),
            (torch.int64 if columns.dtype == np.int64 else torch.int32, len(columns)),
            (torch.int32, len(columns)),
            (self.row_dtype, count if known is None else 0),
        ]
        if len(given.scale):
            fields.append((torch.float32, count))

        def fill(arrays: list[NDArray[Any]]) -> None:
            arrays[0][:], arrays[1][:], arrays[2][:] = given.starts, columns, given.table_of
            if known is None:
                write(self.numbering, arrays[3])
            for scale in arrays[4:]:
                scale[:] = given.scale

        made = None if known is None else self.streams.mark()
        (starts, sent_columns, table_of, own_rows, *scale), _ = self._sender.send(fields, fill)
        with self.streams.side():
            bag_of = torch.empty(count, dtype=torch.int32, device=self.device)
            self.kernels.number_bags(starts, bag_of)
            ready = self.streams.mark()
        step = math.gcd(_WIDE, *columns.tolist())
        bags = Bags(starts, bag_of, sent_columns, table_of, given.batch, scale[0] if scale else None, step)
        return DeviceBatch(bags, own_rows if known is None else known, ready, ready if made is None else made)

    def join(
        self, features: Features, batch: int, given: DeviceIds, explain: Callable[[Int64s], ValueError]
    ) -> DeviceBatch:
        """A batch of ids that the calling thread's current stream has made, joined on the side stream. Nothing waits.
        ``explain``: the error for an ``IdCheck.record`` that is not all 0."""
        self.require_open()
        num_features, count = len(features.columns), len(given.ids)

        def send() -> tuple[list[Tensor], Mark]:
            firsts = features.indices << KEY_ROW_BITS
            if self.numbering is not None:
                firsts = self.numbering.first_slots(features.indices)
            return self._sender.copy(firsts, features.num_rows, features.columns, features.table_of)

        made = self.streams.mark()
        with self.streams.side():
            self.streams.follow(made)
            sent = self._once(features.indices.tobytes() + features.columns.tobytes(), None, send)
            firsts, num_rows, columns, table_of = sent
            starts = torch.empty(num_features * batch + 1, dtype=torch.int32, device=self.device)
            bag_of = torch.empty(count, dtype=torch.int32, device=self.device)
            rows = torch.empty(count, dtype=self.row_dtype, device=self.device)
            scale = None if given.scale is None else torch.empty(count, dtype=torch.float32, device=self.device)
            step = math.gcd(_WIDE, *features.columns.tolist())
            bags = Bags(starts, bag_of, columns, table_of, batch, scale, step)
            with self._check_lock, torch.inference_mode(False):
                if not self._words:
                    ones = torch.ones(_WORDS_AT_ONCE, dtype=torch.int32, device=self.device)
                    self._words += [ones[place : place + 1] for place in range(_WORDS_AT_ONCE)]
                is_right = self._words.pop()
            record = host_buffer(self.streams, num_features + 1, torch.int64)
            record.numpy()[:] = 0
            self.kernels.join_ids(given, firsts, num_rows, bags, rows, is_right, record)
            ready = self.streams.mark()
            self.retain(given, is_right, record, sent)
        return DeviceBatch(bags, rows, ready, ready, IdCheck(is_right, record, ready, explain))

    def _once(self, name: Any, content: Any, send: Callable[[], tuple[Any, Mark]]) -> Any:
        """What ``send`` made for a name when its content was last another, for the calling thread's current stream."""
        known = self._sent_once.get(name)
        if known is None or known[0] != content:
            if len(self._sent_once) >= _KEPT:
                self._sent_once.clear()
            known = self._sent_once[name] = (content, *send())
        self.streams.follow(known[2])
        return known[1]

    def rules(self, tables: tuple[Any, ...], hyper: list[Hyper]) -> Rules:
        """Rules on the device, sent again only when they changed, for the calling thread's current stream. The caller
        retains them."""

        def send() -> tuple[Rules, Mark]:
            codes = tuple(table.config.optimizer.code for table in tables)
            numbers = np.array(hyper, np.float32).ravel(), np.array(codes, np.int32)
            (sent, sent_codes), ready = self._sender.copy(*numbers)
            return Rules(codes, sent_codes, sent.view(-1, NUM_HYPER)), ready

        made: Rules = self._once(tables, hyper, send)
        return made

    def retain(self, *objects: Any) -> None:
        """Keep objects until the work given to the calling thread's current stream so far, which uses them, is done."""
        with self._retain_lock:
            while self._retained and self._retained[0][0].query():
                self._retained.popleft()
            self._retained.append((self.streams.mark(), objects))

    # Ids that the device joined

    def begin(self) -> None:
        """To be called before a lookup gives the device more work. ValueError for an earlier batch's wrong id, as far
        as that is known; RuntimeError under capture into a CUDA graph."""
        self.streams.refuse_capture()
        self.look(wait=False)

    def note(self, batch: DeviceBatch) -> None:
        """A batch was used. ValueError for what is known to be wrong by now, with it or with an earlier one."""
        if batch.check is None:
            return
        if batch.check.made.query():
            batch.check.require_right()
        else:
            with self._check_lock:
                self._unseen.append(batch.check)
        self.look(wait=False)

    def look(self, *, wait: bool = True) -> None:
        """As of ``Tier``; without ``wait``, for what is known by now."""
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
    def batch_has_room(self, batch: DeviceBatch) -> bool:
        """Whether the rows could be held as well as those that are. May wait for the device."""

    @abstractmethod
    def stage_batch(self, batch: DeviceBatch) -> DeviceLease | None:
        """Bring the rows in and hold them; None if there is no room."""

    @abstractmethod
    def parts(self, batch: DeviceBatch, lease: DeviceLease | None, *, by_row: bool = False) -> Iterator[Part]:
        """Parts of the batch's positions in order, or of its distinct rows (the last may end behind them); one, if the
        rows fit. A lease that is not given (one of the whole batch) is released when the next part is asked for, unless
        the caller holds it. BudgetError: every slot stayed pinned by others for a minute."""

    @abstractmethod
    def whole_batch(self, batch: DeviceBatch, lease: DeviceLease | None) -> DeviceLease | None:
        """The lease that was given, or one of all rows of the batch; None if they do not fit."""

    @abstractmethod
    def hold(self, lease: DeviceLease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""

    @abstractmethod
    def in_use(self, claim: Claim, *, changes: bool) -> AbstractContextManager[None]:
        """See ``DeviceLease.in_use``."""

    # Distinct rows

    def _grouped(self, batch: DeviceBatch) -> Grouping:
        """The batch's ``grouping``, made if need be: of slots on the calling thread's current stream."""
        if batch.grouping is None:
            with self.streams.side() if self.numbering is None else contextlib.nullcontext():
                self.streams.follow(batch.rows_ready)
                made = group_keys(batch.rows) if self.numbering is None else group_slots(batch.rows)
                if batch.check is not None and self.numbering is not None:
                    # A wrong batch has no rows that an update could change.
                    num_unique = made.groups.num_unique * batch.check.is_right
                    made = made._replace(groups=made.groups._replace(num_unique=num_unique))
                batch.grouped = self.streams.mark()
            batch.grouping = made  # last: another thread may look
        return batch.grouping

    def groups(self, batch: DeviceBatch) -> Groups:
        """The batch's positions by row, for the calling thread's current stream."""
        groups = self._grouped(batch).groups
        assert batch.grouped is not None
        self.streams.follow(batch.grouped)
        return groups

    def keys(self, batch: DeviceBatch) -> Tensor:
        """int64 [U], on the device: the keys of the distinct rows of a batch. Waits for the device."""
        found = self._grouped(batch).distinct[: int(self.groups(batch).num_unique)]
        if self.numbering is None:
            return found
        return torch.from_numpy(self.numbering.keys_at(found.cpu().numpy())).to(self.device)

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
        self.kernels.update_rows(
            bags, groups, torch.arange(count, dtype=torch.int32, device=self.device), 0, grad_out=grad_out,
            arg_max=arg_max, mean=is_mean, codes=tuple(codes.tolist()),
            code_of=torch.from_numpy(codes.astype(np.int32)).to(self.device),
            hyper=torch.from_numpy(hyper).to(self.device), weights=values, state=values.new_zeros((count, 1)), dim=dim,
            dirty=None,
        )  # fmt: skip
        return values

    # As a ``pool.tier.Tier``

    on_device = True

    def are_in_memory(self, keys: Int64s) -> bool:  # noqa: ARG002 - ids and results are copied
        return False

    def read_in_memory(self, keys: Int64s) -> None:  # noqa: ARG002
        return None

    def one_table(self, table_index: int, num_rows: int) -> None:  # noqa: ARG002
        return None

    def _of_keys(self, keys: Int64s) -> DeviceBatch:
        """Only rows, in no bags."""
        rows = keys if self.numbering is None else self.numbering.slots_of(keys).astype(np.int32)
        (sent,), ready = self._sender.copy(rows)
        no_bags: Any = None
        return DeviceBatch(no_bags, sent, ready, ready)

    @shielded
    def read(self, keys: Int64s) -> Tensor:
        batch, found = self._of_keys(keys), []
        for part in self.parts(batch, None):
            with part.lease.in_use():
                slots = part.slots if part.inverse is None else part.slots[part.inverse]
                found.append(torch.index_select(self.weights, 0, slots)[:, : self.layout.dim])
        self.retain(batch)
        return found[0].contiguous() if len(found) == 1 else torch.cat(found)

    @shielded
    def write(self, keys: Int64s, rows: Tensor) -> None:
        distinct, place = np.unique(keys[::-1], return_index=True)
        batch, last = self._of_keys(distinct), torch.from_numpy(len(keys) - 1 - place)
        chosen = rows[last.to(rows.device)].to(self.device)
        for part in self.parts(batch, None):
            with part.lease.in_use(changes=True):
                slots = (part.slots if part.inverse is None else part.slots[part.inverse]).long()
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
    def _forget(self) -> None:
        """Forget all rows; none is in use, or newer than below."""

    # State

    @property
    def capacity_rows(self) -> int:
        """Rows that there is room for."""
        return len(self.weights)

    @property
    def size_bytes(self) -> int:
        """Bytes of device memory."""
        return self.weights.nbytes + self.state.nbytes + self._index_bytes

    @property
    def host_bytes(self) -> int:
        return self._size.host_bytes(self.layout)

    def refuse(self) -> None:
        """Refuse further use, by ClosedError."""
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
        """The current stream waits for all work that uses the rows."""
        for mark, _ in list(self._retained):
            self.streams.follow(mark)

    def require_open(self) -> None:
        """ClosedError after ``close``."""
        if self._closed:
            raise ClosedError("the store is closed")


def rows_of(pool: Pool) -> DeviceRows:
    """A pool's rows in device memory, where its ``tier`` is that."""
    assert isinstance(pool.tier, DeviceRows), "a lookup in device memory over a pool without"
    return pool.tier
