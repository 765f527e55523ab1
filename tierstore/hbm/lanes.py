"""Streams of a device: where a tier's own work goes, and who waits for what.

The tier moves rows on a stream of its own, the *side* stream; models compute on whatever stream is current. On the CPU
both are the calling thread, and nothing is ever pending.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import torch

_WAY_OUT: Final = (
    "docs/gpu.md says what a graph can have. For the rest, capture the part of the model behind the tables "
    "(DLRM.dense_part), and run the tables before it"
)
NOT_THERE: Final = "rows must be in device memory before: run a step without a graph"


def refused_in_graph(what: str) -> RuntimeError:
    """The error for what a CUDA graph cannot have: ``what`` says what it needs, or what is not done there."""
    return RuntimeError(f"under capture into a CUDA graph {what}. {_WAY_OUT}")


def refuse_capture(what: str) -> None:
    """RuntimeError, see ``refused_in_graph``, while the calling thread's work is captured into a CUDA graph."""
    if torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise refused_in_graph(what)


class Mark(Protocol):
    """A moment in a stream's work."""

    def query(self) -> bool:
        """Whether the work up to here is done."""

    def synchronize(self) -> None:
        """Wait until it is: the calling thread, not a stream."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class Lane:
    """A device's two streams; here the CPU's, where everything happens at once."""

    pin_memory = False

    @property
    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is captured into a CUDA graph. Then all of its work goes to that
        stream, and marks mean nothing: those made before may be neither asked nor waited for."""
        return False

    def require_no_capture(self, what: str) -> None:
        """RuntimeError under capture, see ``refused_in_graph``."""
        if self.is_capturing:
            raise refused_in_graph(what)

    def synchronize(self) -> None:
        """Wait for all work of the device, replays of CUDA graphs too, which leave no marks."""

    def side(self) -> AbstractContextManager[Any]:
        """Within it, the calling thread's work goes to the side stream."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """After all that was given to the calling thread's current stream so far."""
        return _Done()

    def follow(self, mark: Mark) -> None:
        """Later work of the calling thread's current stream waits for the mark; the thread itself does not."""
        mark.synchronize()


class CudaLane(Lane):
    pin_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its kernels are small and others wait for them.
        self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        self.require_no_capture("nobody can wait for the device")
        torch.cuda.synchronize(self._device)

    def side(self) -> AbstractContextManager[Any]:
        # Its device is current then, too: Triton launches on that one.
        return contextlib.nullcontext() if self.is_capturing else torch.cuda.stream(self._side)

    def mark(self) -> Mark:
        if self.is_capturing:
            return _Done()
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        made: Mark = event
        return made

    def follow(self, mark: Mark) -> None:
        if not self.is_capturing:
            stream: Any = torch.cuda.current_stream(self._device)
            stream.wait_event(mark)


def open_lane(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else Lane()
