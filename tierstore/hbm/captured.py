"""Lookups in CUDA graphs: what replays, which run no Python, leave on the device for the host to find.

Each captured lookup has a word, a record and two counters that were made before the capture, so that no replay sets
them again. The word is that of ``checks``: cleared by a wrong batch, it stays so until the host has looked. The rows'
addresses are part of the graph, so the pool counts as in use until it is closed.
"""

import threading
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .checks import Check, Checks
from .lanes import Lane

_SPARE: Final = 8
_LATE: Final = (
    "The device found this in a batch that a CUDA graph was replayed with. That batch, and those replayed after it "
    "until now, changed no row of the tables that were looked up with it, and were not counted as updates of them."
)


class Spare(NamedTuple):
    """What one captured lookup will need.

    Attributes:
        words: ``is_right`` and ``record`` of ``Check``.
        counts: int64 [2], on the device: forwards and updates.
    """

    words: tuple[Tensor, Tensor]
    counts: Tensor

    @classmethod
    def some(cls, checks: Checks, num_features: int) -> "list[Spare]":
        """With counters at 0, for as many lookups as one step of a model may have; made on the current stream."""
        words = [checks.words(num_features) for _ in range(_SPARE)]
        with torch.inference_mode(False):
            counts = torch.zeros((_SPARE, 2), dtype=torch.int64, device=words[0][0].device)
        return [cls(*each) for each in zip(words, counts, strict=True)]


class Captured:
    """A lookup in a graph.

    Attributes:
        check: of its ids.
        num_positions: of its batch.
    """

    def __init__(self, lane: Lane, check: Check, counts: Tensor, num_positions: int) -> None:
        self.check = check
        self.num_positions = num_positions
        self._lane = lane
        self._counts = counts

    def count_forward(self) -> None:
        """Have each replay count one more forward."""
        self._counts[0].add_(1)

    def count_update(self) -> None:
        """Have each replay count one more update, unless its ids are wrong."""
        self._counts[1].add_(self.check.is_right[0])

    @property
    def num_forwards(self) -> int:
        """Replayed so far. Waits for the device."""
        return self._counted(0)

    @property
    def num_updates(self) -> int:
        """Replayed so far, of right ids. Waits for the device."""
        return self._counted(1)

    def _counted(self, place: int) -> int:
        self._lane.synchronize()
        return int(self._counts[place])


class Captures:
    """The captured lookups of one pool; for any thread."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._lookups: list[Captured] = []
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return len(self._lookups)

    def add(self, check: Check, counts: Tensor, num_positions: int) -> Captured:
        """One more."""
        made = Captured(self._lane, check, counts, num_positions)
        self._lookups.append(made)
        return made

    def keep(self, *objects: Any) -> None:
        """Keep what replays will use until ``close``."""
        self._kept.extend(objects)

    def close(self) -> None:
        """No graph will be replayed any more."""
        self._kept.clear()

    @property
    def num_positions(self) -> int:
        """Looked up by replays so far. Waits for the device."""
        return sum(each.num_forwards * each.num_positions for each in self._lookups)

    def look(self, *, wait: bool = False) -> None:
        """ValueError, once, for a wrong batch of a replay: as far as it is known by now, or with ``wait`` of all."""
        if wait and self._lookups:
            self._lane.synchronize()
        for each in self._lookups:
            if each.check.record.numpy().any():
                self._tell(each.check)

    def _tell(self, check: Check) -> None:
        with self._lock:
            self._lane.synchronize()
            record = check.record.numpy()
            if record.any():
                error = check.explain(record)
                error.add_note(_LATE)
                record[:] = 0
                check.is_right.fill_(1)
                self._lane.synchronize()
                raise error
