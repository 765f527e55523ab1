"""The contract of rows in device memory, as lookups use them, and what its implementations share.

Implementations: ``full`` (every row has a slot) and ``pool`` (some rows do, and may be evicted).
"""

import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.base import CacheCounters
from ..errors import ClosedError, TableError
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS
from ..optim.configs import NUM_HYPER, Hyper, adding
from ..pool import PIN_POLL_SECONDS, Pool
from ..pool.joined import Features, Joined, Numbering
from ..system.signals import shielded
from . import backend
from .batch import Bags, DeviceIds, Groups
from .lookups import DeviceLookups
from .staging import Field, Sender
from .streams import Mark
from .wrong_ids import Check, Checks

POSITIONS_MAX: Final = 2**30
"""Of a batch: kernels number them by int32, and add two such numbers."""
_WIDE: Final = 4
"""float32 that a thread of a GPU moves at a time, 16 bytes."""
_KEPT: Final = 64
"""Of what is sent once: features, rules."""
IN_USE: Final = "an in-flight batch (prefetched, or before its backward or step)"
"""What uses rows longer than one call."""
_TRANSIENT_SECONDS: Final = 1.0
"""No read or write of rows takes longer."""


class DeviceLease(Protocol):
    """Rows of a batch that stay in their slots until ``release``; ``held``: it outlives the call that took it."""

    held: bool

    def in_use(self, *, changes: bool = False) -> contextlib.AbstractContextManager[Any]:
        """What the calling thread's current stream is given within uses the rows, and may change them."""

    def release(self, *, changed: bool = False) -> None:
        """Only work that was given to the device by now uses the rows any more; a second call does nothing."""


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A batch on the device.

    Attributes:
        bags: where its positions lie.
        rows: int32 [N], the slot of each position, or int64 [N], its key.
        ready: when bags are there; rows_ready: when rows are.
        check: of ids that the device joined; None if the host did, which found nothing wrong.
        grouping: its positions by row, as its pool groups them, when ``grouped``; None until it did.
    """

    bags: Bags
    rows: Tensor
    ready: Mark
    rows_ready: Mark
    check: Check | None = None
    grouping: Any = None
    grouped: Mark | None = None

    def __len__(self) -> int:
        return len(self.rows)


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


class _SentFeatures(NamedTuple):
    """On the device: ``firsts``, int64 [F], the slot or key of row 0 of each feature's table; the rest as ``Features``
    has it."""

    firsts: Tensor
    num_rows: Tensor
    columns: Tensor
    table_of: Tensor


class _SentRules(NamedTuple):
    hyper: list[Hyper]
    rules: Rules
    ready: Mark


class DeviceRows(DeviceLookups, ABC):
    """Rows of one layout in device memory.

    Attributes:
        weights: of the table's dtype, [slots, >= dim]; state: float32 [slots, >= state_dim]. The arenas.
        dirty: uint8 [slots], which ``update_rows`` marks; None where leases do.
        streams: the device's streams.
        kernels: ``rows_triton`` or ``rows_twin``.
        checks: of batches whose ids the device joined.
        lock: serialises threads that bring rows in or write them down; taken before the locks of the pool below.
        split_batches: batches whose rows did not fit at once; conflict_misses: rows that found their set pinned.
        fill_seconds: time spent bringing rows in and writing them down.
    """

    weights: Tensor
    state: Tensor
    dirty: Tensor | None
    row_dtype: torch.dtype
    """Of ``DeviceBatch.rows``."""
    numbering: Numbering | None = None
    """Of slots, if these are what ``DeviceBatch.rows`` are; else they are keys."""

    def __init__(self, below: Pool, sender: Sender) -> None:
        self.layout = below.layout
        self.streams = sender.streams
        self.device = sender.device
        self.kernels = backend.row_kernels(self.device)
        self.counters = CacheCounters(0, 0, 0, 0)
        self.split_batches = self.conflict_misses = 0
        self.fill_seconds = 0.0
        self.checks = Checks(self.streams, self.device)
        self.lock = threading.RLock()
        self._features: dict[bytes, _SentFeatures] = {}
        self._below = below.host
        self._sender = sender
        self._rules: dict[tuple[Any, ...], _SentRules] = {}
        self._retain_lock = threading.RLock()
        self._retained: deque[tuple[Mark, tuple[Any, ...]]] = deque()
        self._closed = False

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
        bags = Bags(
            starts, bag_of, sent_columns, table_of, given.batch, scale[0] if scale else None,
            math.gcd(_WIDE, *columns.tolist()),
        )  # fmt: skip
        return DeviceBatch(bags, own_rows if known is None else known, ready, ready if made is None else made)

    def join(
        self, features: Features, batch: int, given: DeviceIds, explain: Callable[[Int64s], ValueError]
    ) -> DeviceBatch:
        """A batch of ids that the calling thread's current stream has made, joined on the side stream. Nothing waits.
        ``explain``: the error for a ``Check.record`` that is not all 0."""
        self.require_open()
        num_features, count = len(features.columns), len(given.ids)
        made = self.streams.mark()
        with self.streams.side():
            self.streams.follow(made)
            sent = self._sent(features)
            starts = torch.empty(num_features * batch + 1, dtype=torch.int32, device=self.device)
            bag_of = torch.empty(count, dtype=torch.int32, device=self.device)
            rows = torch.empty(count, dtype=self.row_dtype, device=self.device)
            scale = None if given.scale is None else torch.empty(count, dtype=torch.float32, device=self.device)
            step = math.gcd(_WIDE, *features.columns.tolist())
            bags = Bags(starts, bag_of, sent.columns, sent.table_of, batch, scale, step)
            words = self.checks.words(num_features)
            self.kernels.join_ids(given, sent.firsts, sent.num_rows, bags, rows, *words)
            ready = self.streams.mark()
            self.retain(given, words, sent)
        return DeviceBatch(bags, rows, ready, ready, Check(*words, ready, explain))

    def _sent(self, features: Features) -> _SentFeatures:
        """What the device has to know of features, sent once, for the side stream."""
        name = features.indices.tobytes() + features.columns.tobytes()
        known = self._features.get(name)
        if known is None:
            firsts = features.indices << KEY_ROW_BITS
            if self.numbering is not None:
                firsts = self.numbering.first_slots(features.indices)
            sent, _ = self._sender.copy(firsts, features.num_rows, features.columns, features.table_of)
            known = _SentFeatures(*sent)
            if len(self._features) >= _KEPT:
                self._features.clear()
            self._features[name] = known
        return known

    def begin(self) -> None:
        """To be called before a lookup gives the device more work. ValueError for an earlier batch's wrong id, as far
        as that is known; RuntimeError under capture into a CUDA graph."""
        self.streams.refuse_capture()
        self.checks.look()

    def note(self, batch: DeviceBatch) -> None:
        """A batch was used. Errors as of ``begin``."""
        if batch.check is not None:
            self.checks.note(batch.check)

    def look(self) -> None:
        self.checks.look(wait=True)

    def require_right(self, batch: DeviceBatch) -> None:
        """ValueError for a wrong id or offset. Waits for the device, if the host has not checked them."""
        if batch.check is not None:
            self.checks.require_right(batch.check)

    @abstractmethod
    def batch_has_room(self, batch: DeviceBatch) -> bool:
        """Whether the rows could be held as well as those that are. May wait for the device."""

    @abstractmethod
    def stage_batch(self, batch: DeviceBatch) -> DeviceLease | None:
        """Bring the rows in and hold them; None if there is no room."""

    @abstractmethod
    def parts(self, batch: DeviceBatch, lease: DeviceLease | None) -> Iterator[Part]:
        """Parts of the batch, in order; one, if the rows fit. A lease that is not given (one of the whole batch) is
        released when the next part is asked for, unless the caller holds it. BudgetError: every slot stayed pinned
        by others for a minute."""

    @abstractmethod
    def whole_batch(self, batch: DeviceBatch, lease: DeviceLease | None) -> DeviceLease | None:
        """The lease that was given, or one of all rows of the batch, for ``row_parts``; None if they do not fit."""

    @abstractmethod
    def row_parts(self, batch: DeviceBatch, lease: DeviceLease | None) -> Iterator[Part]:
        """Parts of the batch's distinct rows; the last may end behind them. The caller releases each before it asks for
        the next."""

    @abstractmethod
    def _grouped(self, batch: DeviceBatch) -> Any:
        """The batch's ``grouping``, made if need be."""

    def groups(self, batch: DeviceBatch) -> Groups:
        """The batch's positions by row, for the calling thread's current stream."""
        groups: Groups = self._grouped(batch).groups
        assert batch.grouped is not None
        self.streams.follow(batch.grouped)
        return groups

    @abstractmethod
    def keys(self, batch: DeviceBatch) -> Tensor:
        """int64 [U], on the device: the keys of the distinct rows of a grouped batch. Waits for the device."""

    @abstractmethod
    def position_keys(self, batch: DeviceBatch) -> Int64s:
        """Numpy int64 [N]: the key of each position. Waits for the device; also after ``close``."""

    @abstractmethod
    def hold(self, lease: DeviceLease) -> bool:
        """Let a lease outlive its call, if held pins leave room for others; else False."""

    def retain(self, *objects: Any) -> None:
        """Keep objects until the work given to the calling thread's current stream so far, which uses them, is done."""
        with self._retain_lock:
            while self._retained and self._retained[0][0].query():
                self._retained.popleft()
            self._retained.append((self.streams.mark(), objects))

    def rules(self, tables: tuple[Any, ...], hyper: list[Hyper]) -> Rules:
        """Rules on the device, sent again only when they changed, for the calling thread's current stream. The caller
        retains them."""
        known = self._rules.get(tables)
        if known is None or known.hyper != hyper:
            codes = tuple(table.config.optimizer.code for table in tables)
            numbers = np.array(hyper, np.float32).ravel(), np.array(codes, np.int32)
            (sent, sent_codes), ready = self._sender.copy(*numbers)
            known = _SentRules(hyper, Rules(codes, sent_codes, sent.view(-1, NUM_HYPER)), ready)
            if len(self._rules) >= _KEPT:
                self._rules.clear()
            self._rules[tables] = known
        self.streams.follow(known.ready)
        return known.rules

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
    @abstractmethod
    def capacity_rows(self) -> int:
        """Rows that there is room for."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of device memory."""

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

    @abstractmethod
    def _follow_users(self) -> None:
        """The current stream waits for all work that uses the rows."""

    def require_open(self) -> None:
        """ClosedError after ``close``."""
        if self._closed:
            raise ClosedError("the store is closed")


def rows_of(pool: Pool) -> DeviceRows:
    """A pool's rows in device memory, where its ``tier`` is that."""
    assert isinstance(pool.tier, DeviceRows), "a lookup in device memory over a pool without"
    return pool.tier
