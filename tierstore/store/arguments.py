"""The tensors that lookups are given, checked: ids, offsets and per-sample weights."""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import kernels
from ..kernels.arrays import Floats, Int32s, Int64s

_HOST: Final = torch.device("cpu")
_ID_TYPES: Final = (torch.int64, torch.int32)


def check_ids(ids: Tensor, name: str = "ids", *, device: torch.device = _HOST) -> Int64s | Int32s:
    """Ids [n] as a contiguous numpy array: a view of a tensor on the CPU, a copy of one on the store's device, which
    waits for the device. TypeError: not a tensor, or not of an integer dtype. ValueError: not 1-D, or elsewhere.
    RuntimeError: a transform of torch.func is active."""
    try:
        if type(ids) is Tensor and ids.is_cpu and ids.dtype in _ID_TYPES and ids.dim() == 1 and ids.data_ptr():
            return ids.contiguous().numpy()
    except RuntimeError:
        refuse_transforms()
        raise
    if not isinstance(ids, Tensor):
        raise TypeError(f"{name} must be a Tensor, not {type(ids).__name__}")
    if ids.dtype not in _ID_TYPES:
        raise TypeError(f"{name} must be int64 or int32, not {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"{name} must be 1-D, not of shape {tuple(ids.shape)}")
    return _to_host(ids, name, device)


def refuse_transforms() -> None:
    """RuntimeError under a transform of torch.func, whose tensors have no memory that kernels could read."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "rows are not looked up under torch.func's transforms (grad, vmap, jvp and others): look them up before, "
            "and transform what computes with the result; backward() trains rows and gives per-sample weights their "
            "gradient"
        )


def _to_host(values: Tensor, name: str, device: torch.device) -> NDArray[Any]:
    if values.device.type != "cpu" and values.device != device:
        raise ValueError(f"{name} is on {values.device}; this store works on {device}")
    if values.requires_grad:
        values = values.detach()
    if values.is_cpu and values.numel() and not values.data_ptr():
        raise ValueError(f"{name} has no elements in memory: a fake tensor, or one whose storage was freed")
    return (values.cpu() if values.device.type != "cpu" else values).contiguous().numpy()


def check_offsets(
    offsets: Tensor, num_ids: int, name: str = "offsets", *, device: torch.device = _HOST, is_last_given: bool = True
) -> Int64s:
    """int64 offsets that start at 0, do not descend and end at ``num_ids``; ValueError otherwise. The last is not given
    if the module added it."""
    array = np.ascontiguousarray(check_ids(offsets, name, device=device), np.int64)
    if not len(array) or not kernels.are_offsets(array, num_ids):
        ends = "end at" if is_last_given else "not exceed"
        raise ValueError(f"{name} must start at 0, never descend and {ends} the number of ids, {num_ids}")
    return array


def check_scale(
    scale: Tensor | None, num_ids: int, mode: str, name: str = "per_sample_weights", *, device: torch.device = _HOST
) -> Floats | None:
    """Per-sample weights, float32 [n], or None. TypeError: not float32. ValueError: another length than the ids, or a
    mode other than "sum"."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"{name} must be a float32 Tensor")
    if mode != "sum":
        raise ValueError(f'{name} goes with mode="sum" only, not {mode!r}')
    if scale.shape != (num_ids,):
        raise ValueError(f"{name} must be [{num_ids}] like the ids, not {tuple(scale.shape)}")
    return _to_host(scale, name, device)
