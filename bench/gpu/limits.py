"""What the device itself can do: copies, launches; and what it is."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from tierstore.hbm.cache import group

from ..common import Spread, Table
from .part import Part
from .rig import Rig

__all__ = ["run"]


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Iterator[Part]:
    del folder
    described = _describe(rig)
    rates = _copies(rig, config["copy_bytes"], config["repetitions"])
    rates["device copy, read + written"] = rig.copy_bytes_per_s()
    launches = _launches(rig, config["launches"])
    yield Part(
        tables=[
            Table(
                title=f"limits of {described['name']}",
                columns=["", "median"],
                rows=[
                    *([name, f"{rate / 1e9:,.1f} GB/s"] for name, rate in rates.items()),
                    *([name, f"{each.median * 1e6:.2f} us"] for name, each in launches.items()),
                ],
            )
        ],
        figures={
            "device": described,
            "bytes_per_s": rates,
            "launch_s": {name: asdict(each) for name, each in launches.items()},
        },
        notes=[
            f"On {described['name']}, {described['memory_gib']} GiB, {described['multiprocessors']} multiprocessors, "
            f"driver and clocks: {described['driver']}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
            f"Triton {described['triton']}."
        ],
    )


def _describe(rig: Rig) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": "the CPU", "memory_gib": 0, "multiprocessors": 0, "capability": "", "driver": "none",
        "torch": torch.__version__, "cuda": torch.version.cuda, "triton": _triton_version(),
    }  # fmt: skip
    if rig.is_cuda:
        properties = torch.cuda.get_device_properties(rig.device)
        described |= {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return described


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


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
    return {name: size_bytes / Spread.of(each).median for name, each in seconds.items()}


def _launches(rig: Rig, count: int) -> dict[str, Spread]:
    """Host seconds of a launch, many in a row: what a step of many small kernels cannot be faster than."""
    value = torch.zeros(32, device=rig.device)

    keys = torch.arange(32, device=rig.device)
    actions: dict[str, Callable[[], object]] = {
        "launch of a torch kernel": lambda: value.add_(1),
        "grouping of 32 keys (a sort, 3 Triton kernels)": lambda: group(keys),
    }
    found = {}
    for name, action in actions.items():
        seconds = []
        for _ in range(5):
            rig.wait()
            start = time.perf_counter()
            for _ in range(count):
                action()
            rig.wait()
            seconds.append((time.perf_counter() - start) / count)
        # The first compiles.
        found[name] = Spread.of(seconds[1:])
    return found
