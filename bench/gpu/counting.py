"""What a step asks of the device: launches, and waits of the host.

On a GPU the profiler sees them. On the CPU, where the tier's kernels run in Triton's interpreter or as twins, Python
does (``bench.hbm_worker``).
"""

import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from .rig import Rig

__all__ = ["Asked", "asked_of"]

_WAITS: Final = ("cudaStreamSynchronize", "cudaEventSynchronize")
"""Not cudaDeviceSynchronize: the profiler's own."""


class Asked(NamedTuple):
    """Of one call.

    Attributes:
        launches: kernels, copies and fills that the device did.
        waits: times that a thread of the host waited for it.
    """

    launches: int
    waits: int


def asked_of(rig: Rig, action: Callable[[], object]) -> Asked | None:
    """What the action asks of the device in all threads; None where nothing is seen: on the CPU, or without CUPTI."""
    if not rig.is_cuda:
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    rig.wait()
    try:
        with torch.profiler.profile(activities=activities) as profile:
            action()
            rig.wait()
        events: Any = profile.events()
    except RuntimeError:  # what was timed before stands
        traceback.print_exc()
        return None
    on_device: Any = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    # Spans that a program names are on the device's timeline, too.
    launches = sum(event.device_type == on_device and not event.is_user_annotation for event in events)
    return Asked(launches, sum(event.name in _WAITS for event in events)) if launches else None
