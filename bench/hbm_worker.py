"""One version under ``bench.hbm``: steps of training on the tier in device memory, without a GPU. Prints JSON.

It is run by its path over the modules of another tree, and so imports nothing beside them at its top. Two tasks:

- count: the tier launches what it would launch on a GPU, and its twins compute. Python sees each launch of a Triton
  kernel, each torch operation and each copy.
- time: the tier runs by its kernels' twins. What the device would do is taken out of a step's time.
"""

import contextlib
import functools
import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

FREE = ("empty", "new_empty", "lift_fresh", "is_pinned", "set_", "resize_", "result_type")
"""torch operations that are no view and yet give the device nothing to do."""
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")
VIEWS = (
    "view", "slice", "select", "as_strided", "reshape", "detach", "t", "transpose", "expand", "unsqueeze", "squeeze",
    "alias", "chunk", "split", "split_with_sizes", "narrow", "flatten", "unbind", "permute", "resolve_conj",
    "resolve_neg",
)  # fmt: skip
"""By their names in a profile."""
TWINS = ("tierstore.cache.hbm_twin", "tierstore.hbm.grouping_twin", "tierstore.hbm.rows_twin")
OUTPUTS = ("pool_rows", "dot_rows", "update_rows", "number_bags")
"""Of twins: what the host never looks at."""
CHUNK_ROWS = 100_000
DEVICE = "device"
"""Begins the name of what a twin does, in a profile."""


# The workload


def _open(case: dict[str, Any]) -> Any:
    """A store of one-hot tables, rows in memory, with device memory for all rows or for a share of them."""
    import tierstore
    from tierstore.rows import RowLayout
    from tierstore.store.budget import hbm_bytes_of

    rows = sum(case["table_rows"])
    # Row-wise Adagrad has one word of state; half as many slots again hold all rows whatever holds them.
    layout = RowLayout(dim=case["dim"], state_dim=1)
    hbm = hbm_bytes_of(layout, int(rows * case["share"]) if case["share"] < 1 else rows * 3 // 2 + 64, "lru")
    store = tierstore.open(cold="memory", ddr=rows * 200 + 2**26, hbm=hbm, device="cpu")
    for number, count in enumerate(case["table_rows"]):
        rule = tierstore.optim.RowWiseAdagrad(lr=0.02)
        store.create_table(
            tierstore.TableConfig(
                name=f"t{number}", num_embeddings=count, embedding_dim=case["dim"], pooling="sum", optimizer=rule
            )
        )
    return store


def _batches(case: dict[str, Any], count: int) -> list[Any]:
    """One id a table and sample, Zipf in each table."""
    import numpy as np
    import torch

    import tierstore

    generator = np.random.default_rng(case["seed"])
    names = [f"t{number}" for number in range(len(case["table_rows"]))]
    offsets = torch.arange(len(names) * case["batch"] + 1)
    sums = [np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -case["exponent"]) for rows in case["table_rows"]]
    places = [generator.permutation(rows) for rows in case["table_rows"]]
    made = []
    for _ in range(count):
        ids = [
            place[np.minimum(np.searchsorted(total, generator.random(case["batch"]) * total[-1]), len(place) - 1)]
            for total, place in zip(sums, places, strict=True)
        ]
        made.append(tierstore.KeyedJaggedTensor(names, torch.from_numpy(np.concatenate(ids)), offsets=offsets))
    return made


def _read_all(store: Any) -> None:
    """Every row into device memory."""
    import torch

    for table in store.tables.values():
        rows = table.config.num_embeddings
        for start in range(0, rows, CHUNK_ROWS):
            table.read(torch.arange(start, min(start + CHUNK_ROWS, rows)))


def _read_all_below(store: Any) -> None:
    """Every row into host memory, and none into device memory."""
    import numpy as np

    for table in store.tables.values():
        keys = (table.index << 40) + np.arange(table.config.num_embeddings)
        for _ in table.pool.leases.parts(keys):
            pass


@contextlib.contextmanager
def _training(case: dict[str, Any]) -> Iterator[tuple[Callable[[Any], None], list[Any]]]:
    """(a step, batches for it): warmed up, in the state that training settles in.

    All rows are in host memory: the cold tier in memory, which is slow, is not what is measured. With room for all
    rows, all are in device memory. With ``hits`` every batch is the same, otherwise batches are new.
    """
    import torch

    import tierstore

    with _open(case) as store:
        collection = tierstore.TieredEmbeddingBagCollection(store)
        gradient = torch.full((case["batch"], len(case["table_rows"]) * case["dim"]), 1e-3)

        def step(batch: Any) -> None:
            collection(batch).values().backward(gradient)

        if case["hits"]:
            batches = _batches(case, 1) * (case["warm_up"] + case["steps"])
        else:
            batches = _batches(case, case["warm_up"] + case["steps"])
        _read_all_below(store)
        if case["share"] == 1:
            _read_all(store)
        for batch in batches[: case["warm_up"]]:
            step(batch)
        yield step, batches[case["warm_up"] :]


# Kernels


def _twins() -> list[ModuleType]:
    """The modules of twins; an earlier version has fewer."""
    found = []
    for name in TWINS:
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name))
    return found


def _functions(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    """Its public ones, by name."""
    own = inspect.getmembers(module, inspect.isfunction)
    return [(name, each) for name, each in own if each.__module__ == module.__name__ and not name.startswith("_")]


# Counting


class _Count:
    """Launches and waits, by name, and bytes that go to the device."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.waits: list[str] = []
        self.sent_bytes = 0
        self._depth = self._made = self._done = self._step = 0

    def clear(self) -> None:
        """A step begins; the device is at most one step behind the host."""
        self.launches, self.waits, self.sent_bytes = [], [], 0
        self._done, self._step = max(self._done, self._step), self._made

    def launch(self, name: str) -> None:
        if not self._depth:
            self.launches.append(name)

    def wait(self, name: str) -> None:
        """Until the device has done everything so far."""
        if not self._depth:
            self.waits.append(name)
            self._done = self._made

    def send(self, size_bytes: int) -> None:
        if not self._depth:
            self.sent_bytes += size_bytes

    def mark(self) -> Any:
        """A ``Mark``: done once the host has waited for something later, or the device is a step further."""
        self._made += 1
        number = self._made

        def synchronize() -> None:
            if number > self._done:
                self.wait("synchronize")

        return SimpleNamespace(query=lambda: number <= self._done, synchronize=synchronize)

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _watching(count: _Count) -> contextlib.ExitStack:
    """What this thread does within is counted."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from triton.runtime.interpreter import GridExecutor

    from tierstore.hbm.lanes import Lane

    class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            if name == "copy_" and args[0].dtype in (torch.uint8, torch.int32) and args[0].dim() == 1:
                # Packed batches; rows are copied as words of 64 bits, and what comes back as a table.
                count.send(args[0].nbytes)
            if not func.is_view and not name.startswith(FREE):
                count.launch(name)
                given = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
                masks = any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in given)
                if name.startswith(WAITING) or (masks and name.startswith("index")):
                    count.wait(name)
            return func(*args, **(kwargs or {}))

    def launched(self: Any, *_: Any, **__: Any) -> None:
        count.launch(self.fn.__name__)

    def mark(_: Any) -> Any:
        return count.mark()

    def follow(*_: Any) -> None:
        """The host goes on."""

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(GridExecutor, "__call__", launched))
    stack.enter_context(mock.patch.object(Lane, "mark", mark))
    stack.enter_context(mock.patch.object(Lane, "follow", follow))
    stack.enter_context(mock.patch.object(Lane, "pin_memory", True))
    for owner, name, made in _copies(count):
        stack.enter_context(mock.patch.object(owner, name, made))
    stack.enter_context(Operations())  # type: ignore[no-untyped-call]
    return stack


def _copies(count: _Count) -> list[tuple[Any, str, Callable[..., Any]]]:
    """(owner, name, what stands for it): what copies between host and device, which on the CPU is nothing that torch
    dispatches; and page-locking, which needs a device."""
    import torch

    move, empty = torch.Tensor.to, torch.empty

    def to(tensor: Any, *given: Any, **named: Any) -> Any:
        if given and isinstance(given[0], torch.device):
            count.launch("copy")
            count.send(tensor.nbytes)
            if not named.get("non_blocking"):
                count.wait("copy")
        return move(tensor, *given, **named)

    def down(name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Any) -> Any:
            count.launch(name)
            count.wait(name)
            with count.silent():
                return copy(tensor)

        return call

    def empty_anywhere(*given: Any, pin_memory: bool = False, **named: Any) -> Any:
        del pin_memory
        return empty(*given, **named)

    return [
        (torch.Tensor, "to", to),
        (torch.Tensor, "cpu", down("cpu", torch.Tensor.cpu)),
        (torch.Tensor, "tolist", down("tolist", torch.Tensor.tolist)),
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (torch, "empty", empty_anywhere),
    ]


def _kernels(count: _Count) -> contextlib.ExitStack:
    """Within, functions of the tier's twins are counted as those of a GPU, which launch but compute nothing."""

    def both(own: Callable[..., Any], triton: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            triton(*given, **named)
            with count.silent():
                return own(*given, **named)

        return call

    stack = contextlib.ExitStack()
    for twin in _twins():
        module = importlib.import_module(twin.__name__.replace("_twin", "_triton"))
        for name, own in _functions(twin):
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(twin, name, both(own, getattr(module, name))))
    return stack


def _counted(case: dict[str, Any]) -> dict[str, Any]:
    """The most that a step asks of the device: launches and waits, by name."""
    count = _Count()
    launches: list[str] = []
    waits: list[str] = []
    with _training(case) as (step, batches), _kernels(count), _watching(count):
        for batch in batches:
            count.clear()
            step(batch)
            launches, waits = max(launches, count.launches, key=len), max(waits, count.waits, key=len)
    return {"launches": launches, "waits": waits}


# Timing


def _silent(count: _Count) -> contextlib.ExitStack:
    """Within, nothing counts that a twin does."""

    def silenced(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            with count.silent():
                return own(*given, **named)

        return call

    stack = contextlib.ExitStack()
    for twin in _twins():
        for name, own in _functions(twin):
            stack.enter_context(mock.patch.object(twin, name, silenced(own)))
    return stack


def _quiet_twins() -> list[float]:
    """Twins are told apart in a profile, and those whose results the host never looks at do nothing.

    Returns:
        where each call will add its microseconds, all of which are the device's, those of telling it apart included.
    """
    import torch

    taken: list[float] = []
    for module in _twins():
        for own, function in _functions(module):

            @functools.wraps(function)
            def call(*given: Any, _name: str = own, _function: Any = function, **named: Any) -> Any:
                start = time.perf_counter()
                with torch.profiler.record_function(f"{DEVICE} {_name}"):
                    found = None if _name in OUTPUTS else _function(*given, **named)
                taken.append((time.perf_counter() - start) * 1e6)
                return found

            setattr(module, own, call)
    return taken


def _is_device(name: str) -> bool:
    if name.startswith(DEVICE):
        return True
    own = name.removeprefix("aten::")
    return own != name and own not in VIEWS and not own.startswith(FREE)


def _device_us(events: Any) -> float:
    """Time of torch operations that the device would do, twins apart: the outermost of nested events."""
    total = 0.0
    for event in events:
        above = event.cpu_parent
        while above is not None and not _is_device(above.name):
            above = above.cpu_parent
        if above is None and _is_device(event.name) and not event.name.startswith(DEVICE):
            total += event.time_range.elapsed_us()
    return total


def _timed(case: dict[str, Any]) -> dict[str, Any]:
    """Of each step but the last, microseconds that are the host's; of the last, bytes that are sent for a position."""
    import torch

    host, device = [], []
    count, by_twins = _Count(), _quiet_twins()
    with _training(case) as (step, batches):
        for batch in batches[:-1]:
            by_twins.clear()
            # It takes less than half a microsecond for an operation.
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                start = time.perf_counter()
                step(batch)
                taken_us = (time.perf_counter() - start) * 1e6
            device.append(_device_us(profile.events()) + sum(by_twins))
            host.append(taken_us - device[-1])
        with _silent(count), _watching(count):
            step(batches[-1])
    positions = case["batch"] * len(case["table_rows"])
    return {"host_us": host, "device_us": device, "sent_bytes_a_position": count.sent_bytes / positions}


def main(root: str, task: str, cases: str) -> None:
    sys.path.insert(0, root)
    answers, sys.stdout = sys.stdout, sys.stderr
    import tierstore

    if not Path(tierstore.__file__).is_relative_to(root):
        raise RuntimeError(f"tierstore of {tierstore.__file__} is measured in place of {root}'s")
    tasks = {"count": _counted, "time": _timed}
    print(json.dumps([tasks[task](case) for case in json.loads(cases)]), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
