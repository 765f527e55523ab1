"""All measurements of one machine, in order, as a ``Host``; and for people, each figure and what it means."""

import platform
import re
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ...kernels.threads import default_threads
from ...system.sizes import format_size
from ..host import Host, Link
from ..parts.catalog import shown
from .loops import IDS, PASSES, ROWS, Lab, measure_costs
from .machine import HOST_SIZES, measure_accelerators, measure_host
from .storage import measure_storage, require_device

Progress = Callable[[str, float], None]
"""Called with what is being measured, and the share of all that is done, from 0 to 1."""

_LEAST_SECONDS, _DEFAULT_SECONDS, _MOST_SECONDS = 1.0, 50.0, 3600.0
_LEAST_FILE_BYTES, _FILE_BYTES = 32 << 20, 1 << 30
_NETWORK: Final = Link(bytes_per_s=1.12e9, latency_us=30.0)
_COLD_SECONDS: Final = 0.25
"""That a batch of cold reads may take; fewer are read of a slow device."""
_HOST_SHARE, _SSD_SHARE = 0.15, 0.35
"""Of the time; loops over stores and GPUs take the rest."""


def measure(
    folder: str | Path, *, seconds: float = _DEFAULT_SECONDS, progress: Progress | None = None, device: str = "cpu"
) -> Host:
    """Time this machine: memory, cores, the SSD under ``folder``, GPUs, and tierstore's own work on a core.

    Prices, watts, the network and what a drive may be written are not measured: prices and watts are 0, the others
    what ``Host.source`` says. A file of up to 1 GiB and small stores are made in ``folder`` and removed.

    Args:
        folder: on the SSD that stores will be on.
        seconds: to spend, about; with fewer, figures are less sure.
        device: "cpu", or "cuda" for all GPUs, or "cuda:1".

    Raises:
        ValueError: no such folder or device, too little free, or a file system in memory.
        OSError: a file system without direct reads.
    """
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ValueError(f"seconds={seconds!r}: expected a number from {_LEAST_SECONDS:g} to {_MOST_SECONDS:,g}")
    say = progress or (lambda _step, _share: None)
    folder = Path(folder)
    require_device(folder)
    threads, share = default_threads(), min(1.0, seconds / _DEFAULT_SECONDS)
    say("GPUs", 0.0)
    accelerators = measure_accelerators(device, seconds=seconds / 10)
    say("memory and cores", 0.05)
    memory, processor = measure_host(seconds=seconds * _HOST_SHARE, threads=threads, sizes=HOST_SIZES)
    with tempfile.TemporaryDirectory(prefix="tierstore-measure-", dir=folder, ignore_cleanup_errors=True) as name:
        say("SSD", 0.2)
        file_bytes = max(_LEAST_FILE_BYTES, int(_FILE_BYTES * share))
        drive = measure_storage(Path(name), seconds=seconds * _SSD_SHARE, file_bytes=file_bytes)
        lab = Lab(
            Path(name),
            processor,
            rows=max(20_000, int(ROWS * share)),
            ids=max(256, int(IDS * share)),
            cold_ids=max(64, int(min(IDS, drive.reads_per_s * _COLD_SECONDS) * share)),
            passes=max(3, int(PASSES * share)),
        )
        costs = measure_costs(lab, lambda done: say("tierstore's own work", 0.55 + 0.45 * done))
    return Host(
        name=platform.node() or "this machine",
        processor=processor,
        ddr=memory,
        network=_NETWORK,
        costs=costs,
        storage=(drive,),
        accelerators=accelerators,
        source=(
            f"tierstore plan measure on {_processor_name()}, {threads} cores, {format_size(memory.capacity_bytes)}, "
            f"{folder.resolve()}; network (10 Gb/s), drive writes a day, watts and prices were not measured"
        ),
    )


def _processor_name() -> str:
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor() or "an unknown processor"


def describe(host: Host) -> str:
    """Each figure with its name in the file and what it means."""
    parts: dict[str, Any] = {"cores": host.processor, "memory": host.ddr}
    parts |= {f"SSD {number}": each for number, each in enumerate(host.storage)}
    for number, gpu in enumerate(host.accelerators):
        parts |= {f"GPU {number}": gpu, f"GPU {number}, memory": gpu.hbm, f"GPU {number}, link": gpu.pcie}
    parts["tierstore's own work, on one core"] = host.costs
    lines = [host.source]
    for title, part in parts.items():
        lines += ["", title]
        for each in fields(part):
            value, text = getattr(part, each.name), each.metadata.get("help")
            if text and value and each.name not in ("watts", "usd"):
                lines.append(f"  {each.name:22}{shown(each.name, value):>14}   {text}")
    return "\n".join(lines)
