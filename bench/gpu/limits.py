"""What the device itself can do: copies, launches; and what it is."""

import statistics
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tierstore.hbm.cache import group_keys

from ..common import Report, Table, spread
from .rig import Rig

__all__ = ["measure", "tell"]


def measure(rig: Rig, config: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    del folder
    rates = _copies(rig, config["copy_bytes"], config["repetitions"])
    rates["device copy, read + written"] = rig.copy_bytes_per_s()
    launches = _launches(rig, config["launches"])
    yield {"device_is": _describe(rig), "bytes_per_s": rates, "launch_s": launches, "left": []}


def _describe(rig: Rig) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    found = {"torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton}
    if not rig.is_cuda:
        return found | {"name": "the CPU", "memory_gib": 0, "multiprocessors": 0, "driver": "none"}
    properties = torch.cuda.get_device_properties(rig.device)
    return found | {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver(),
    }


def _driver() -> str:
    query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0]


def _copies(rig: Rig, size_bytes: int, repetitions: int) -> dict[str, float]:
    """Bytes a second between page-locked host memory and the device."""
    host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=rig.is_cuda)
    device = torch.zeros(size_bytes, dtype=torch.uint8, device=rig.device)
    seconds = rig.times(
        {
            "host to device, page-locked": lambda _: device.copy_(host, non_blocking=True),
            "device to host, page-locked": lambda _: host.copy_(device, non_blocking=True),
        },
        repetitions=repetitions,
    )
    return {name: size_bytes / statistics.median(each) for name, each in seconds.items()}


def _launches(rig: Rig, count: int) -> dict[str, dict[str, Any]]:
    """Host seconds of a launch, many in a row: what a step of many small kernels cannot be faster than."""
    value, keys = torch.zeros(32, device=rig.device), torch.arange(32, device=rig.device)
    actions: dict[str, Callable[[], object]] = {
        "launch of a torch kernel": lambda: value.add_(1),
        "grouping of 32 keys (a sort, 3 Triton kernels)": lambda: group_keys(keys),
    }

    def many(action: Callable[[], object]) -> None:
        for _ in range(count):
            action()

    found = {}
    for name, action in actions.items():
        seconds = [rig.seconds(lambda: many(action)) / count for _ in range(5)]  # noqa: B023
        found[name] = spread(seconds[1:])  # the first compiles
    return found


def tell(found: dict[str, Any]) -> Report:
    own = found["device_is"]
    rows = [[name, f"{rate / 1e9:,.1f} GB/s"] for name, rate in found["bytes_per_s"].items()]
    rows += [[name, f"{each['median'] * 1e6:.2f} us"] for name, each in found["launch_s"].items()]
    note = (
        f"On {own['name']}, {own['memory_gib']} GiB, {own['multiprocessors']} multiprocessors, driver and clocks: "
        f"{own['driver']}; torch {own['torch']}, CUDA {own['cuda']}, Triton {own['triton']}."
    )
    return Report([Table(f"limits of {own['name']}", ["", "median"], rows)], notes=[note])
