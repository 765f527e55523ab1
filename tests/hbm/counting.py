"""Counts what a GPU would be given, and how often the host would wait for it, while all of it runs on the CPU.

A launch is a torch operation that is no view and no allocation, a copy, or a Triton kernel: a function of a twin
counts as the kernels it stands for. What the device was given is under way until the host waits for it, or until the
test says that the device has caught up; only waiting for work that is under way counts.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.hbm import launches, twin
from tierstore.hbm.streams import Streams

KERNELS_OF: Final = {"place_starts": 2, "update_rows": 3}
"""Kernels of a function that launches more than one."""
FREE: Final = ("empty", "new_empty", "lift_fresh", "is_pinned", "set_", "resize_")
WAITING: Final = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        self.waits: list[str] = []
        self._own = threading.local()
        self._now = self._done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.is_silent and not func.is_view and not name.startswith(FREE):
            self.launches.append(name)
            indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
            is_masked = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices)
            if name.startswith(WAITING) or is_masked:
                self.wait(name)
        return func(*args, **(kwargs or {}))

    @property
    def is_silent(self) -> bool:
        return getattr(self._own, "is_silent", False)

    def wait(self, name: str) -> None:
        if not self.is_silent:
            self.waits.append(name)
            self.catch_up()

    def catch_up(self) -> None:
        """The device does all it was given."""
        self._done = self._now

    def clear(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def counted(self, function: Callable[..., Any], name: str, launches: int, *, waits: bool = False) -> Any:
        """The function, counted as so many launches, whatever it does."""

        def call(*arguments: Any, **named: Any) -> Any:
            if not self.is_silent:
                self.launches += [name] * launches
                if waits:
                    self.wait(name)
            before, self._own.is_silent = self.is_silent, True
            try:
                return function(*arguments, **named)
            finally:
                self._own.is_silent = before

        return call


class CountingMark:
    def __init__(self, count: Count) -> None:
        self._count = count
        count._now += 1
        self._made = count._now

    def query(self) -> bool:
        return self._made <= self._count._done

    def synchronize(self) -> None:
        if not self.query():
            self._count.wait("synchronize")


@contextlib.contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    count = Count()
    with monkeypatch.context() as patch:
        for name, function in inspect.getmembers(twin, inspect.isfunction):
            if function.__module__ == twin.__name__ and name[0] != "_":
                patch.setattr(twin, name, count.counted(function, name, KERNELS_OF.get(name, 1)))
        patch.setattr(launches, "launch", count.counted(launches.launch, "triton", 1))
        for name in ("cpu", "tolist"):
            patch.setattr(Tensor, name, count.counted(getattr(Tensor, name), name, 1, waits=True))
        patch.setattr(Streams, "mark", lambda _: CountingMark(count))
        patch.setattr(Streams, "follow", lambda _, mark: None)
        with count:
            yield count
