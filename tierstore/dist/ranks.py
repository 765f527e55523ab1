"""The ranks of a process group, their exchanges, and what each holds and sends.

Every rank makes the same calls in the same order, and each call begins with an exchange of a fixed size, in which ranks
say what they call. Ranks that call different things meet there, and each raises an error that names the calls of all;
gloo would end the process where two exchanges of different sizes meet.
"""

import contextlib
import functools
import math
import operator
import os
import pickle
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError

Precision = Literal["fp32", "fp16", "bf16", "int8"]
"""TorchRec's names. "int8": each row as 8-bit integers and one float32, the largest magnitude of the row over 127."""
_HALVES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LEVELS: Final = 127
_SCALE_BYTES: Final = 4
_GRACE_SECONDS: Final = 2.0
"""So long after the last report of a failure, who has not reported is gone: an exchange fails everywhere at once."""
_POLL_SECONDS: Final = 0.1
_T = TypeVar("_T")
_FAILED: Final = -1
"""Sent instead of a count by a rank that cannot go on."""
_CALL_BYTES: Final = 240
"""Of a call's name, as an error has it."""
_OPENING: Final = "open_sharded"
_TWINS: Final["weakref.WeakKeyDictionary[Any, list[Ranks]]"] = weakref.WeakKeyDictionary()
"""By the group of some ranks that they are twins of: the next store there uses them again. torch would give another
group of these ranks the same name, and it would find in the rendezvous what the first one left."""


def encoded(rows: Tensor, precision: Precision) -> Tensor:
    """What goes over the wire for float32 [n, dim]: as many rows."""
    if precision == "fp32":
        return rows
    if precision in _HALVES:
        return rows.to(_HALVES[precision])
    scale = (rows.abs().amax(1) / _LEVELS).view(-1, 1)
    levels = torch.round(rows / torch.where(scale > 0, scale, 1)).to(torch.int8)
    return torch.cat([levels, scale.view(torch.int8)], dim=1)


def decoded(sent: Tensor, precision: Precision) -> Tensor:
    """float32 [n, dim] of what ``encoded`` gave."""
    if precision == "int8":
        scale = sent[:, -_SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return sent[:, :-_SCALE_BYTES].to(torch.float32) * scale
    return sent.to(torch.float32)


def _gone(members: list[int], rank: int, size: int) -> list[int]:
    """Ranks that do not report that an exchange failed. Empty if there is nowhere to report it."""
    reports: Any = dist.distributed_c10d._get_default_store()
    keys = [f"tierstore.dist/failed/{'-'.join(map(str, members))}/{each}" for each in range(size)]
    try:
        reports.set(keys[rank], "")
        known, since = 0, time.monotonic()
        while known < size - 1 and time.monotonic() - since < _GRACE_SECONDS:  # the last one left is gone
            count = sum(map(reports.check, ([key] for key in keys)))
            if count > known:
                known, since = count, time.monotonic()
            time.sleep(_POLL_SECONDS)
        return [each for each, key in enumerate(keys) if not reports.check([key])]
    except RuntimeError:  # rank 0 had the reports, and is gone
        return []


def leave(group: Any) -> None:
    """Leave a group that was made here, unless torch has left all."""
    if dist.is_initialized():
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def ranks_on_host(size: int) -> int:
    """How many of so many ranks each host has: as torchrun says, or all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))


class Traffic(NamedTuple):
    """Running totals of one rank: bytes to and from others, and seconds in exchanges, waiting for others included."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


class Load(NamedTuple):
    """What a rank holds, and did.

    Attributes:
        num_rows, size_bytes: that it owns; with their optimizer state, were they all in memory.
        lookups: rows that ranks asked it for.
        traffic: of its exchanges, without those of ids that ``prefetch`` sent. A rank whose ``seconds`` grow the least
            keeps others waiting.
    """

    num_rows: int
    size_bytes: int
    lookups: int
    traffic: Traffic


class Ranks:
    """A process group, None for all ranks, as lookups use it. Every rank makes the same calls in the same order.

    Args:
        numbers: by which errors name the ranks, if not by their numbers in the group.

    Attributes:
        rank: this one's number in the group. size: how many there are. traffic: of this object's exchanges.
        run: the identity of what is trained, once it is known: calls of different runs differ.

    Raises:
        ValueError: this process is not in the group, or the group cannot exchange tensors on the CPU.
    """

    def __init__(self, group: Any = None, numbers: Sequence[int] | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("this process is not in the group: only its ranks may call this")
        if "cpu" not in dist.get_backend_config(group):
            raise ValueError(
                f"the group has no backend for tensors on the CPU, where ids are: {dist.get_backend_config(group)}; "
                'make it by init_process_group("cpu:gloo,cuda:nccl"), or give a group of these backends'
            )
        self.size = dist.get_world_size(group)
        self._numbers = range(self.size) if numbers is None else numbers
        self.traffic = Traffic()
        self.run = ""
        self._backend: Any = group or dist.group.WORLD
        self._options = dist.AllToAllOptions()
        self._ones = [1] * self.size
        self._carried = {"cpu": True}
        self._owed = self._depth = 0
        self._twins: list[Ranks] = [] if self._is_world else _TWINS.setdefault(self._backend, [])
        self._is_idle = False
        self._pass_name = ""
        self._num_batches = self._num_passes = 0

    def twin(self) -> "Ranks":
        """The same ranks in a process group of their own, for another thread, which is to ``release`` it. One that was
        released on all ranks is used again: each has its own sockets and threads. Collective."""
        idle = sum(1 << number for number, each in enumerate(self._twins) if each._is_idle and not each._owed)
        common = functools.reduce(operator.and_, self.counts([idle] * self.size, "prefetch"))
        if not common:
            members = dist.get_process_group_ranks(self._backend)
            group = dist.new_group(members, backend="gloo", use_local_synchronization=not self._is_world)
            self._twins.append(Ranks(group))
            common = 1 << (len(self._twins) - 1)
        self._num_passes += 1
        found = self._twins[(common & -common).bit_length() - 1]
        found._is_idle, found._pass_name = False, f" of prefetch {self._num_passes}"
        return found

    def release(self) -> None:
        """Of a ``twin``: this rank does not use it any more."""
        self._is_idle = True

    @property
    def _is_world(self) -> bool:
        return self.size == dist.get_world_size()

    def close(self) -> None:
        """Leave the groups of the twins that were released; those of some ranks stay, for the next store there."""
        if not self._is_world:
            return
        for twin in self._twins:
            if twin._is_idle:
                leave(twin.group)
        self._twins = []

    def next_batch(self) -> str:
        """A name for one more batch whose ids the ranks exchange, the same on all, and used once."""
        self._num_batches += 1
        return f"batch {self._num_batches}{self._pass_name}"

    # Calls

    @property
    def is_amid_call(self) -> bool:
        """Whether a call ended here before its last exchange, so that this rank knows not how others went on."""
        return bool(self._owed)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """If what is within fails between exchanges, tell the others, who ask for ``counts``; they know of a RankError.
        May be within another, which tells then."""
        self._depth += 1
        try:
            yield
        except BaseException as error:
            if self._depth == 1 and not self._owed and not isinstance(error, RankError):
                self._owed = 1
                with contextlib.suppress(RankError):  # of a rank that is gone: what failed here says more
                    self._meet("", [_FAILED] * self.size)
                    self._owed = 0
            raise
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def together(self, call: str = _OPENING, *, then: int = 0) -> Iterator[None]:
        """All ranks get through what is within, or all raise; see ``counts``."""
        with self.telling():
            yield
        self.counts([0] * self.size, call, then=then)

    def gather(self, value: _T, call: str = "gather") -> list[_T]:
        """What each rank has, in order; errors as of ``counts``."""
        with self.telling():
            own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        given = [len(own)] * self.size
        taken = self.counts(given, call, then=1)
        found = torch.split(self.exchange(own.repeat(self.size), given, taken), taken)
        return [pickle.loads(each.numpy().tobytes()) for each in found]

    def first(self, value: _T) -> _T:
        """What rank 0 has; collective."""
        found: list[Any] = self.gather(value if self.rank == 0 else None, _OPENING)
        of_first: _T = found[0]
        return of_first

    def counts(self, given: Sequence[int], call: str, *, then: int = 0) -> list[int]:
        """Begin a call, in words that are equal on all ranks: what each rank has for this one, where this one has
        ``given`` for each. ``then`` more exchanges belong to the call.

        Raises:
            RankError: another rank failed, and which; ranks make different calls, and which; or this rank left an
                earlier call before its last exchange.
        """
        if self._owed:
            raise RankError(
                "an earlier call ended here amid an exchange with the other ranks. Start all ranks again: they go on "
                "from the last commit that all have"
            )
        self._owed = 1 + then  # whatever ends this call early, others may be amid it
        words, counts = self._meet(call, given)
        if _FAILED in counts:
            self._owed = 0
            failed = self._numbers[counts.index(_FAILED)]
            raise RankError(f"rank {failed} cannot take part in this step; its own error says why")
        if len(set(words)) > 1:
            differing = self._differing(call)
            self._owed = 0
            raise RankError(differing)
        self._owed = then
        return counts

    def _meet(self, call: str, given: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of each rank what it calls, as a number, and what it has for this one."""
        word = zlib.crc32(f"{self.run} {call}".encode())
        sent = torch.tensor([[word, count] for count in given], dtype=torch.int64)
        words, counts = self._exchange(sent, self._ones, self._ones).T.tolist()
        return words, counts

    def _differing(self, call: str) -> str:
        """What to tell of ranks that call different things."""
        own = call.encode()[:_CALL_BYTES].ljust(_CALL_BYTES, b"\0")
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8).repeat(self.size, 1)
        by_call: dict[str, list[str]] = {}
        for rank, each in zip(self._numbers, self._exchange(sent, self._ones, self._ones), strict=True):
            found = each.numpy().tobytes().rstrip(b"\0").decode(errors="ignore")
            by_call.setdefault(found, []).append(str(rank))
        if len(by_call) == 1:
            return f"all ranks call {call}, but in different stores: all must use their stores in the same order"
        told = "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {each}" for each, ranks in by_call.items())
        return (
            f"ranks make different calls ({told}). All ranks must make the same calls in the same order; where one has "
            "fewer batches, tierstore.dist.even gives it empty ones"
        )

    # Exchanges

    def exchange(
        self, values: Tensor, given: Sequence[int], taken: Sequence[int], among: "Ranks | None" = None
    ) -> Tensor:
        """Send ``given[r]`` of the values' rows to rank r, in order; returns ``taken[r]`` rows from each, in order.
        After ``counts``, which says that it follows. ``among``: a part of the ranks, whose counts these are, while
        the others exchange in theirs."""
        assert self._owed, "ranks that call different things must not meet here"
        found = (among or self)._exchange(values, given, taken)
        self._owed -= 1
        return found

    def one_more(self) -> None:
        """One more exchange belongs to the call than it said in the beginning; all ranks know."""
        self._owed += 1

    def _exchange(self, values: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        device = values.device
        values = values if self._carries(device.type) else values.cpu()
        out = values.new_empty((sum(taken), *values.shape[1:]))
        begun = time.perf_counter()
        try:
            self._backend.alltoall_base(out, values, list(taken), list(given), self._options).wait()
        except RuntimeError as error:
            members = dist.get_process_group_ranks(self._backend)
            gone = [self._numbers[each] for each in _gone(members, self.rank, self.size)]
            who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "a rank"
            raise RankError(
                f"{who} ended, or did not answer within the group's timeout. Start all ranks again: they go on from "
                "the last commit that all have"
            ) from error
        row_bytes = values.element_size() * math.prod(values.shape[1:])
        sent, received = (sum(counts) - counts[self.rank] for counts in (given, taken))
        known, seconds = self.traffic, time.perf_counter() - begun
        self.traffic = Traffic(
            known.bytes_sent + sent * row_bytes, known.bytes_received + received * row_bytes, known.seconds + seconds
        )
        return out.to(device)

    def _carries(self, device_type: str) -> bool:
        """Whether the group exchanges tensors of such devices as they are; gloo does those on the CPU only."""
        if device_type not in self._carried:
            backends = dist.get_backend_config(self.group)
            name = self._backend._get_backend(torch.device(device_type)).name() if device_type in backends else "gloo"
            self._carried[device_type] = name != "gloo"
        return self._carried[device_type]

    def exchange_rows(self, rows: Tensor, given: Sequence[int], taken: Sequence[int], precision: Precision) -> Tensor:
        """``exchange`` of rows of float32 [n, dim], in so few bits on the way."""
        return decoded(self.exchange(encoded(rows, precision), given, taken), precision)
