"""What the GPU kernels take of an H100: registers and spills, as ptxas says. No GPU is needed.

The kernels and their constants are those that the tests inspect (``tests/hbm/machine_code.py``).
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from .data import ROOT

__all__ = ["Resources", "kernels", "resources_of"]

_PROGRAM: Final = ROOT / "tests" / "hbm" / "machine_code.py"
_WARP: Final = 32

# Of a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities").
_REGISTERS: Final = 65_536
_REGISTER_GRAIN: Final = 256
"""Registers are given to a warp in such steps."""
_WARPS: Final = 64
_BLOCKS: Final = 32


class Resources(NamedTuple):
    """Of one kernel.

    Attributes:
        registers: of a thread; spill_bytes: of a thread, stored and loaded.
        warps: in a block.
        occupancy: warps that a multiprocessor can hold, of the 64 it has room for, as far as registers limit it.
    """

    registers: int
    spill_bytes: int
    warps: int
    occupancy: float


def kernels() -> dict[str, Resources]:
    """Of every kernel, by name.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        CalledProcessError, RuntimeError: a kernel cannot be compiled.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(_PROGRAM)], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return {name: resources_of(each if isinstance(each, str) else each["ptx"]) for name, each in found.items()}


def _assemblers() -> list[Path]:
    """Triton's own, the newest first."""
    import triton.backends.nvidia

    return sorted((Path(triton.backends.nvidia.__file__).parent / "bin").glob("ptxas*"), reverse=True)


def resources_of(ptx: str) -> Resources:
    """Of the one kernel in a PTX text for an H100."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        for assembler in _assemblers():
            command = [assembler, "-v", "--gpu-name", target[1], "--fmad=false", "-o", f"{folder}/kernel.cubin", path]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not done.returncode:
                break
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr}")
    registers = _number(r"Used (\d+) registers", done.stderr)
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes spill", done.stderr))
    warps = _number(r"\.(?:reqntid|maxntid) (\d+)", ptx) // _WARP
    return Resources(registers, spilled, warps, _occupancy(registers, warps))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else 0


def _occupancy(registers: int, warps: int) -> float:
    of_warp = -(-registers * _WARP // _REGISTER_GRAIN) * _REGISTER_GRAIN
    blocks = min(_BLOCKS, _WARPS // warps, _REGISTERS // (of_warp * warps))
    return blocks * warps / _WARPS
