"""What the device finds wrong with ids that it was given unchecked, and how the host learns of it without a wait.

The kernel that joins a batch (``join_ids``) writes what is wrong to page-locked memory, and clears a word on the
device, by which the batch then changes no row. The host looks when the kernel is done: it asks whenever it gives the
device more work, and waits only where it waits anyway.

A lookup in a CUDA graph (``Captured``) has a word, a record and two counters that were made before the capture, so
that no replay sets them again. Cleared by a wrong batch, the word stays so until the host has looked. The rows'
addresses are part of the graph, so the pool counts as in use until it is closed.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..kernels.arrays import Int64s
from .lanes import Lane, Mark

_WORDS_AT_ONCE: Final = 256
"""One launch makes the words of so many batches."""
_LATE: Final = (
    "The device found this in the ids of an earlier batch. That batch changed no row of the tables that it was looked "
    "up in together, and its results are of no use. Ids on the host are checked before anything is computed."
)


class Check(NamedTuple):
    """Of one batch.

    Attributes:
        is_right: int32 [1], on the device: 1, or 0 if something is wrong.
        record: int64 [F + 1], page-locked: a wrong id of each feature, 0 if it has none; and one more than the index of
            a wrong offset, 0 if there is none.
        made: when both are written.
        explain: the error for a record that is not all 0.
    """

    is_right: Tensor
    record: Tensor
    made: Mark
    explain: Callable[[Int64s], ValueError]

    def require_right(self) -> None:
        """ValueError for what is wrong. Waits until that is known."""
        if not self.made.query():
            self.made.synchronize()
        record: Int64s = self.record.numpy()
        if record.any():
            raise self.explain(record)


_SPARE: Final = 8
"""As many lookups of the same features as one step of a model may have."""
_REPLAYED: Final = (
    "The device found this in a batch that a CUDA graph was replayed with. That batch, and those replayed after it "
    "until now, changed no row of the tables that were looked up with it, and were not counted as updates of them."
)


class Spare(NamedTuple):
    """What one captured lookup will need: ``words``, as of ``Check``, and ``counts``, int64 [2] on the device, of
    forwards and updates."""

    words: tuple[Tensor, Tensor]
    counts: Tensor


@dataclass(frozen=True, eq=False)
class Captured:
    """A lookup in a CUDA graph, which counts its replays."""

    lane: Lane
    check: Check
    counts: Tensor
    num_positions: int

    def count_forward(self) -> None:
        self.counts[0].add_(1)

    def count_update(self) -> None:
        """Have each replay count one more update, unless its ids are wrong."""
        self.counts[1].add_(self.check.is_right[0])

    @property
    def num_forwards(self) -> int:
        """Waits for the device."""
        self.lane.synchronize()
        return int(self.counts[0])

    @property
    def num_updates(self) -> int:
        """Waits for the device."""
        self.lane.synchronize()
        return int(self.counts[1])


class Checks:
    """Those of one pool, for any thread. ``captured``: its lookups in CUDA graphs."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.captured: list[Captured] = []
        self._lane = lane
        self._device = device
        self._lock = threading.RLock()
        self._words: list[Tensor] = []
        self._unseen: deque[Check] = deque()
        self._kept: list[Any] = []

    def words(self, num_features: int) -> tuple[Tensor, Tensor]:
        """(``is_right``, ``record``) of a batch in which nothing is wrong yet, for the current stream: the side one."""
        with self._lock, torch.inference_mode(False):
            if not self._words:
                made = torch.ones(_WORDS_AT_ONCE, dtype=torch.int32, device=self._device)
                self._words = [made[place : place + 1] for place in range(_WORDS_AT_ONCE)]
            record = torch.empty(num_features + 1, dtype=torch.int64, device="cpu", pin_memory=self._lane.pin_memory)
            record.numpy()[:] = 0
            return self._words.pop(), record

    def spare(self, num_features: int) -> list[Spare]:
        """For lookups that will be captured, with counters at 0; made on the current stream."""
        words = [self.words(num_features) for _ in range(_SPARE)]
        with torch.inference_mode(False):
            counts = torch.zeros((_SPARE, 2), dtype=torch.int64, device=self._device)
        return [Spare(*each) for each in zip(words, counts, strict=True)]

    def add_captured(self, check: Check, counts: Tensor, num_positions: int) -> Captured:
        made = Captured(self._lane, check, counts, num_positions)
        self.captured.append(made)
        return made

    def keep(self, *objects: Any) -> None:
        """Keep what replays will use until ``close``."""
        self._kept.extend(objects)

    def close(self) -> None:
        self._kept.clear()

    def note(self, check: Check) -> None:
        """Its batch was used. ValueError for what is known to be wrong by now, with it or with an earlier one."""
        if check.made.query():
            check.require_right()
        else:
            with self._lock:
                self._unseen.append(check)
        self.look()

    def look(self, *, wait: bool = False) -> None:
        """ValueError, once for each batch that was used or replayed, for what is wrong with it: as far as it is known
        by now, or with ``wait`` of all."""
        while check := self._next(wait=wait):
            try:
                check.require_right()
            except ValueError as error:
                error.add_note(_LATE)
                raise
        if wait and self.captured:
            self._lane.synchronize()
        for each in self.captured:
            if each.check.record.numpy().any():
                self._raise_replayed(each.check)

    def _next(self, *, wait: bool) -> Check | None:
        with self._lock:
            is_there = self._unseen and (wait or self._unseen[0].made.query())
            return self._unseen.popleft() if is_there else None

    def require_right(self, check: Check) -> None:
        """As ``Check.require_right``; ``look`` will not raise it again."""
        with self._lock:
            self._unseen = deque(each for each in self._unseen if each is not check)
        check.require_right()

    def _raise_replayed(self, check: Check) -> None:
        with self._lock:
            self._lane.synchronize()
            record = check.record.numpy()
            if record.any():
                error = check.explain(record)
                error.add_note(_REPLAYED)
                record[:] = 0
                check.is_right.fill_(1)
                self._lane.synchronize()
                raise error
