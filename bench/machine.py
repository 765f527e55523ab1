"""What a benchmark ran on: a figure without its machine says nothing."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import psutil

PACKAGES: Final = ("tierstore", "torch", "numpy", "numba", "lmdb", "cachetools")


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or "unknown")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _disk(folder: Path) -> dict[str, Any]:
    """Name, model and file system of the device that holds ``folder``; what is not known is ""."""
    number = folder.stat().st_dev
    places = [each for each in psutil.disk_partitions(all=True) if os.path.ismount(each.mountpoint)]
    filesystem = next((each.fstype for each in places if os.stat(each.mountpoint).st_dev == number), "unknown")
    device = Path("/sys/dev/block", f"{os.major(number)}:{os.minor(number)}").resolve()
    # A partition has no queue of its own: its disk is one folder up.
    disk = device if (device / "queue").is_dir() else device.parent
    model = " ".join(filter(None, (_read(disk / "device/vendor"), _read(disk / "device/model"))))
    if not model or model.startswith("0x"):
        driver = disk / "device/driver"
        model = driver.resolve().name if driver.exists() else ""
    return {"device": disk.name, "model": model, "filesystem": filesystem}


def describe(folder: Path) -> dict[str, Any]:
    """The machine, its software, and the disk under ``folder``, as JSON values."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "disk": _disk(folder),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def summary(machine: dict[str, Any]) -> str:
    """One line for people."""
    disk, packages = machine["disk"], machine["packages"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}; "
        f"{disk['device']} ({disk['model'] or 'unknown model'}, {disk['filesystem']}); Python {machine['python']}, "
        + ", ".join(f"{name} {packages[name]}" for name in PACKAGES[1:])
    )
