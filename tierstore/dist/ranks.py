"""The ranks of a process group and their exchanges."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_T = TypeVar("_T")
_FAILED: Final = -1
"""Sent instead of a count by a rank that cannot go on."""


class Ranks:
    """A process group as lookups use it. Every rank makes the same calls in the same order.

    Args:
        group: of ``torch.distributed``; None for all ranks.

    Attributes:
        rank: this one's number in the group. size: how many there are.

    Raises:
        ValueError: this process is not in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only its ranks may call this")
        self.size = dist.get_world_size(group)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks get through what is within, which exchanges nothing, or all raise.

        Raises:
            RuntimeError: another rank failed, and which.
        """
        try:
            yield
        except BaseException:
            self.counts(None)
            raise
        self.counts([0] * self.size)

    def gather(self, value: _T) -> list[_T]:
        """What each rank has, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def first(self, value: _T) -> _T:
        """What rank 0 has."""
        return self.gather(value)[0]

    def counts(self, given: Sequence[int] | None) -> list[int]:
        """What each rank has for this one, where this one has ``given`` for each; None: it failed.

        Raises:
            RuntimeError: another rank failed, and which.
        """
        sent = torch.tensor([_FAILED] * self.size if given is None else list(given), dtype=torch.int64)
        found: list[int] = self.exchange(sent, [1] * self.size, [1] * self.size).tolist()
        failed = [rank for rank, count in enumerate(found) if count == _FAILED and rank != self.rank]
        if failed and given is not None:
            raise RuntimeError(f"rank {failed[0]} cannot take part in this step; its own error says why")
        return found

    def exchange(self, values: Tensor, given: list[int], taken: list[int]) -> Tensor:
        """Send ``given[r]`` of the values' rows to rank r, in order; returns ``taken[r]`` rows from each, in order."""
        out = values.new_empty((sum(taken), *values.shape[1:]))
        dist.all_to_all_single(out, values, taken, given, group=self.group)
        return out
