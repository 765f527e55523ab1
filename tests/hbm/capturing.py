"""A device that captures CUDA graphs and replays them late, emulated on the CPU.

``CudaLane`` runs on it with streams and events of its own. Within a capture nothing is computed: kernels (the twins'
functions) and torch's operations are recorded, and what they would give is filled with garbage. Whatever a capture must
not do is an AssertionError: read a result, wait, ask or follow an event from before, use another stream, or allocate
page-locked memory. A replay runs what was recorded, on the same memory, when somebody waits for it. Memory from before
the capture must still be there: the recorder does not keep it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.hbm.counting import FREE, WAITING, _functions
from tierstore.hbm import build, cache_twin, rows_twin
from tierstore.hbm.lanes import CudaLane
from tierstore.store import arguments

COMPUTE: Final = "compute"


class _Outside:
    """A tensor from before the capture, by its memory, which somebody else has to keep."""

    def __init__(self, tensor: Tensor) -> None:
        self._memory = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def found(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)  # type: ignore[attr-defined]
        assert storage is not None, "a replay uses memory that nobody kept"
        dtype, offset, shape, stride = self._like
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Graph:
    """What was recorded: functions, their arguments and results."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._own: set[int] = set()
        self._work: list[tuple[Callable[..., Any], Any, Any]] = []
        self.names: list[str] = []

    def made(self, results: Any) -> Any:
        """Results of a function that has not run: garbage."""
        for each in tree_leaves(results):
            if isinstance(each, Tensor):
                self._own.add(each.untyped_storage()._cdata)
                each.fill_(float("nan") if each.is_floating_point() else 85)
        return results

    def add(self, name: str, function: Callable[..., Any], arguments: Any, results: Any) -> Any:
        self.made(results)
        self.names.append(name)
        # Detached: what autograd makes of a result later would keep all that backward needs.
        kept = tree_map_only(Tensor, Tensor.detach, results)
        self._work.append((function, tree_map_only(Tensor, self._kept, arguments), kept))
        return results

    def _kept(self, tensor: Tensor) -> Tensor | _Outside:
        return tensor.detach() if tensor.untyped_storage()._cdata in self._own else _Outside(tensor)

    def replay(self) -> None:
        """Returns before anything has run."""
        self._device.pending.append(self)

    def run(self) -> None:
        with torch.no_grad():
            for function, arguments, results in self._work:
                given, named = tree_map_only(_Outside, _Outside.found, arguments)
                for old, new in zip(tree_leaves(results), tree_leaves(function(*given, **named)), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func.overloadpacket.__name__, kwargs or {}
        assert not name.startswith(WAITING), f"{name} reads a result within a capture"
        if func.is_view:
            return func(*args, **named)
        if name.startswith(FREE):
            return self._graph.made(func(*args, **named))
        if func._schema.is_mutable:
            self._graph.add(name, _without_result(func), (args, named), None)
            return args[0] if func._schema.returns else None
        return self._graph.add(name, func, (args, named), func(*args, **named))


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    def call(*given: Any, **named: Any) -> None:
        function(*given, **named)

    return call


class Cuda:
    """A GPU, as ``Device`` is used."""

    name = "cuda"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph


class Device:
    """See the module's docstring.

    Attributes:
        pending: graphs to be replayed, in order.
    """

    name = "cpu"

    def __init__(self) -> None:
        self.pending: list[Graph] = []
        self._graph: Graph | None = None
        self._own = threading.local()

    @property
    def is_capturing(self) -> bool:
        return self._graph is not None

    def require_eager(self, what: str) -> None:
        assert not self.is_capturing, f"within a capture, {what}"

    @property
    def stream(self) -> str:
        return getattr(self._own, "stream", COMPUTE)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        self.require_eager("another stream is used")
        before, self._own.stream = self.stream, stream
        yield
        self._own.stream = before

    def synchronize(self, _: Any = None) -> None:
        """Run what is pending."""
        self.require_eager("somebody waits for the device")
        self.run(len(self.pending))

    def run(self, count: int) -> None:
        while self.pending and count > 0:
            count -= 1
            self.pending.pop(0).run()

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        """As ``torch.cuda.graph``."""
        self.synchronize()
        graph = self._graph = Graph(self)
        try:
            with _Recorder(graph):
                yield graph
        finally:
            self._graph = None

    def recorded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A kernel, which a capture records."""

        def call(*given: Any, **named: Any) -> Any:
            if self._graph is None:
                return function(*given, **named)
            with torch.utils._python_dispatch._disable_current_modes():
                results = None
                if name == "place_starts":
                    results = tuple(
                        None if each is None else torch.empty_like(each)
                        for each in (given[0], given[0].new_empty(len(given[0]) + 1, dtype=torch.int32),
                                     given[0].new_empty(1, dtype=torch.int32), given[2])
                    )  # fmt: skip
                return self._graph.add(name, function, (given, named), results)

        return call


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Have stores opened from here on use such a device; all tensors count as being there."""
    device = Device()

    class Event:
        def record(self, stream: "Stream") -> None:
            device.require_eager("an event is recorded")
            self.number = len(device.pending) if stream.name == COMPUTE else 0

        def query(self) -> bool:
            device.require_eager("an event is asked")
            return not (self.number and device.pending)

        def synchronize(self) -> None:
            device.require_eager("an event is waited for")
            device.run(self.number)

    class Stream:
        def __init__(self, _: Any = None, *, priority: int = 0, name: str = "side") -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            device.require_eager("an event from before is followed")
            device.run(len(device.pending) if self.name == COMPUTE else event.number)

    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "Stream", Stream)
    monkeypatch.setattr(cuda, "stream", lambda stream: device.on(stream.name))
    monkeypatch.setattr(cuda, "current_stream", lambda _: Stream(name=device.stream))
    monkeypatch.setattr(cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    def pin_memory(_: CudaLane) -> bool:
        device.require_eager("page-locked memory is allocated")
        return False

    monkeypatch.setattr(CudaLane, "pin_memory", property(pin_memory))
    monkeypatch.setattr(build, "open_lane", CudaLane)
    monkeypatch.setattr(arguments, "is_there", lambda given, _: isinstance(given, Tensor))
    for module in (cache_twin, rows_twin):
        for name, function in _functions(module):
            monkeypatch.setattr(module, name, device.recorded(function, name))
    return device
