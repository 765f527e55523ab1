"""Streams of a device: where a tier's own work goes, and who waits for what.

The tier moves rows on a stream of its own, the *side* stream; models compute on whatever stream is current. On the CPU
both are the calling thread, and nothing is ever pending.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


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


class Streams:
    """A device's two streams; here the CPU's, where everything happens at once."""

    pin_memory = False

    def refuse_capture(self) -> None:
        """RuntimeError while the calling thread's current stream is captured into a CUDA graph: rows come and go."""

    def side(self) -> AbstractContextManager[Any]:
        """Within it, the calling thread's work goes to the side stream."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """After all that was given to the calling thread's current stream so far."""
        return _Done()

    def follow(self, mark: Mark) -> None:
        """Later work of the calling thread's current stream waits for the mark; the thread itself does not."""
        mark.synchronize()


class CudaStreams(Streams):
    pin_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its kernels are small and others wait for them.
        self._side: Any = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def refuse_capture(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture a lookup of tables: capture the part of the model behind them "
                "(DLRM.dense_part), and look the tables up before each replay"
            )

    def side(self) -> AbstractContextManager[Any]:
        # Its device is current then, too: Triton launches on that one.
        return torch.cuda.stream(self._side)

    def mark(self) -> Mark:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        made: Mark = event
        return made

    def follow(self, mark: Mark) -> None:
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)


def open_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()
