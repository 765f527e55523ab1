"""The ranks of a process group and their exchanges."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError
from .gone import naming_gone
from .wire import Precision, decoded, encoded

_T = TypeVar("_T")
_FAILED: Final = -1
"""Sent instead of a count by a rank that cannot go on."""
_OVER: Final = -2
"""Sent instead of a count by a rank that has no more batches."""


class Traffic(NamedTuple):
    """Running totals of one rank.

    Attributes:
        bytes_sent: to other ranks.
        bytes_received: from other ranks.
        seconds: in exchanges, waiting for other ranks included.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class Ranks:
    """A process group as lookups use it. Every rank makes the same calls in the same order.

    Args:
        group: of ``torch.distributed``; None for all ranks.

    Attributes:
        rank: this one's number in the group. size: how many there are.
        traffic: of this object's exchanges.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only its ranks may call this")
        self.size = dist.get_world_size(group)
        self.traffic = Traffic()

    def twin(self) -> "Ranks":
        """The same ranks in a process group of their own, for another thread. Collective."""
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        made = dist.new_group(members, backend="gloo", use_local_synchronization=not self._is_world)
        return Ranks(made)

    @property
    def _is_world(self) -> bool:
        return self.size == dist.get_world_size()

    def close(self) -> None:
        """Leave the group; of ``twin`` only.

        A group of some ranks stays: torch gives the next one of these the same name, and they would find what the
        first one left in the rendezvous.
        """
        if self._is_world:
            dist.destroy_process_group(self.group)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """If what is within, which exchanges nothing, fails, tell the others, who ask for ``counts``."""
        try:
            yield
        except BaseException:
            self.counts(None)
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks get through what is within, which exchanges nothing, or all raise.

        Raises:
            RankError: another rank failed, and which.
        """
        with self.telling():
            yield
        self.counts([0] * self.size)

    def gather(self, value: _T) -> list[_T]:
        """What each rank has, in order."""
        found: list[Any] = [None] * self.size
        with naming_gone(self.group, self.rank, self.size):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, value: _T) -> _T:
        """What rank 0 has."""
        return self.gather(value)[0]

    def counts(self, given: Sequence[int] | None) -> list[int]:
        """What each rank has for this one, where this one has ``given`` for each; None: it failed.

        Raises:
            RankError: another rank failed, or is over, and which.
        """
        return self._counts([_FAILED] * self.size if given is None else given)

    def end(self) -> None:
        """Tell the others, who ask for ``counts`` or end too, that this one is over."""
        self._counts([_OVER] * self.size)

    def _counts(self, given: Sequence[int]) -> list[int]:
        sent = torch.tensor(given, dtype=torch.int64)
        found: list[int] = self.exchange(sent, [1] * self.size, [1] * self.size).tolist()
        if given[0] < 0:
            return found
        for rank, count in enumerate(found):
            if count == _FAILED:
                raise RankError(f"rank {rank} cannot take part in this step; its own error says why")
            if count == _OVER:
                raise RankError(f"rank {rank} has no more batches, and rank {self.rank} has: give all ranks as many")
        return found

    def exchange(self, values: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Send ``given[r]`` of the values' rows to rank r, in order; returns ``taken[r]`` rows from each, in order."""
        out = values.new_empty((sum(taken), *values.shape[1:]))
        begun = time.perf_counter()
        with naming_gone(self.group, self.rank, self.size):
            dist.all_to_all_single(out, values, list(taken), list(given), group=self.group)
        row_bytes = values.element_size() * math.prod(values.shape[1:])
        sent, received = (sum(counts) - counts[self.rank] for counts in (given, taken))
        known, seconds = self.traffic, time.perf_counter() - begun
        self.traffic = Traffic(
            known.bytes_sent + sent * row_bytes, known.bytes_received + received * row_bytes, known.seconds + seconds
        )
        return out

    def exchange_rows(self, rows: Tensor, given: Sequence[int], taken: Sequence[int], precision: Precision) -> Tensor:
        """``exchange`` of rows of float32 [n, dim], in so few bits on the way."""
        return decoded(self.exchange(encoded(rows, precision), given, taken), precision)
