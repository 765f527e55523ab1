"""What the device finds wrong with ids that it was given unchecked, and how the host learns of it without a wait.

The kernel that joins a batch (``join_ids``) writes what is wrong to page-locked memory, and clears a word on the
device, by which the batch then changes no row. The host looks when the kernel is done: it asks whenever it gives the
device more work, and waits only where it waits anyway.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..kernels.arrays import Int64s
from .streams import Mark, Streams

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


class Checks:
    """Those of one pool, for any thread."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self._streams = streams
        self._device = device
        self._lock = threading.RLock()
        self._words: list[Tensor] = []
        self._unseen: deque[Check] = deque()

    def words(self, num_features: int) -> tuple[Tensor, Tensor]:
        """(``is_right``, ``record``) of a batch in which nothing is wrong yet, for the current stream: the side one."""
        with self._lock, torch.inference_mode(False):
            if not self._words:
                made = torch.ones(_WORDS_AT_ONCE, dtype=torch.int32, device=self._device)
                self._words = [made[place : place + 1] for place in range(_WORDS_AT_ONCE)]
            record = torch.empty(num_features + 1, dtype=torch.int64, device="cpu", pin_memory=self._streams.pin_memory)
            record.numpy()[:] = 0
            return self._words.pop(), record

    def note(self, check: Check) -> None:
        """Its batch was used. ValueError for what is known to be wrong by now, with it or with an earlier one."""
        if check.made.query():
            check.require_right()
        else:
            with self._lock:
                self._unseen.append(check)
        self.look()

    def look(self, *, wait: bool = False) -> None:
        """ValueError, once for each batch that was used, for what is wrong with it: as far as it is known by now, or
        with ``wait`` of all."""
        while check := self._next(wait=wait):
            try:
                check.require_right()
            except ValueError as error:
                error.add_note(_LATE)
                raise

    def _next(self, *, wait: bool) -> Check | None:
        with self._lock:
            is_there = self._unseen and (wait or self._unseen[0].made.query())
            return self._unseen.popleft() if is_there else None

    def require_right(self, check: Check) -> None:
        """As ``Check.require_right``; ``look`` will not raise it again."""
        with self._lock:
            self._unseen = deque(each for each in self._unseen if each is not check)
        check.require_right()
