"""Which device results live on, and what memory it has."""

import logging
from typing import Final

import torch

from .sizes import machine_memory_bytes, parse_size, require_memory

_LOG: Final = logging.getLogger("tierstore")


def resolve_device(device: str | torch.device, hbm: int | str) -> torch.device:
    """The device meant by the arguments of ``tierstore.open``; ValueError if it is none that rows can live on.
    BudgetError: ``hbm`` of the CPU is more than the machine has."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f'device={device!r} is no device; give "cpu", "cuda" or "cuda:1"') from error
    has_hbm = parse_size(hbm, name="hbm", table_bytes=1 << 62) > 0
    if resolved.type == "cpu":
        require_memory(parse_size(hbm, name="hbm"), f"hbm={hbm!r}")
        if has_hbm and torch.cuda.is_available():
            _LOG.warning('hbm=%r is of host memory, and slow, though there is a GPU: open with device="cuda"', hbm)
        return torch.device("cpu")
    if resolved.type != "cuda":
        raise ValueError(f'device={device!r}: rows live in memory of the CPU or of a CUDA device; give "cpu" or "cuda"')
    if not torch.cuda.is_available():
        raise ValueError(
            f'device={str(device)!r}: torch {torch.__version__} sees no CUDA device here; give device="cpu", or '
            "install a torch built for CUDA on a machine with a GPU and its driver"
        )
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={str(device)!r}: there are {torch.cuda.device_count()} CUDA devices, from 0 on")
    if not has_hbm:
        raise ValueError(
            f'device={str(device)!r} with hbm={hbm!r}: rows need memory on the GPU; give hbm="2GiB" or "10% of tables"'
        )
    return torch.device("cuda", index)


def memory_bytes(device: torch.device) -> int:
    """Memory of the device, or what this process may use of the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes()
