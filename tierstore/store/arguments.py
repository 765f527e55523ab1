"""The tensors that lookups are given, checked: ids, offsets and per-sample weights."""

import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.fx
from numpy.typing import NDArray
from torch import Tensor

from ..hbm.kernel_types import DeviceIds
from ..kernels import slots as kernels
from ..kernels.arrays import Int32s, Int64s
from ..lookup.lookup import DeviceJagged
from ..pool.joined import Jagged

_HOST: Final = torch.device("cpu")
_ID_TYPES: Final = (torch.int64, torch.int32)
FLOAT_TYPES: Final = (torch.float32, torch.float16, torch.bfloat16)  # of per-sample weights, and of rows written
OffsetsType = type[np.int64] | type[np.int32]  # of the offsets that a lookup keeps
_OF_LENGTHS: Final = "(where lengths were given, the sum of those before)"


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
    return _to_host(require_ids(ids, name), name, device)


def require_tensor(value: object, name: str) -> Tensor:
    """TypeError unless it is a tensor; RuntimeError as ``refuse_traces``."""
    if not isinstance(value, Tensor):
        refuse_traces((value,))
        raise TypeError(f"{name} must be a Tensor, not {type(value).__name__}; torch.as_tensor({name}) makes one")
    return value


def require_ids(value: object, name: str) -> Tensor:
    """TypeError unless it is a tensor of an integer dtype that ids may have, ValueError unless it is 1-D."""
    ids = require_tensor(value, name)
    if ids.dtype not in _ID_TYPES:
        raise TypeError(f"{name} must be int64 or int32, not {ids.dtype}; {name}.long() converts")
    if ids.dim() != 1:
        raise ValueError(f"{name} must be 1-D, not of shape {tuple(ids.shape)}; {name}.reshape(-1) flattens")
    return ids


NOT_TRACED: Final = (
    "a model that looks rows up is not traced, scripted or exported: its rows are in the store, and a trace would keep "
    "those of its example. Instead export the dense part, a module that is given the looked-up rows (docs/torch.md). "
    "torch.compile works, without fullgraph=True"
)
_PRE_DISPATCH: Final = torch._C.DispatchKey.PreDispatch
_tracing_state: Final[Any] = torch._C._get_tracing_state
_num_modes: Final[Any] = torch._C._len_torch_dispatch_stack
_is_included: Final[Any] = torch._C._dispatch_tls_is_dispatch_key_included
_IN_TRACES: Final = ("FakeTensor", "FunctionalTensor")  # classes of tensors; to import them takes long


def refuse_traces(given: Sequence[object]) -> None:
    """RuntimeError while torch traces; ``given`` is what would be looked up."""
    if _tracing_state() is not None or _num_modes() > 0 or _is_included(_PRE_DISPATCH):
        proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")  # without it nothing makes proxies of tensors
        if _tracing_state() is not None or (proxies is not None and proxies.get_proxy_mode() is not None):
            raise RuntimeError(NOT_TRACED)
    for each in given:
        if type(each) is not Tensor and (isinstance(each, torch.fx.Proxy) or type(each).__name__ in _IN_TRACES):
            raise RuntimeError(NOT_TRACED)


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
        raise ValueError(
            f"{name} is on {values.device}; this store works on {device}: pass {name}.cpu(), or open the store with "
            f'device="{values.device}"'
        )
    if values.is_cpu and values.numel() and not values.data_ptr():
        raise ValueError(f"{name} has no elements in memory: a fake tensor, or one whose storage was freed")
    values = values.detach() if values.requires_grad else values
    return (values if values.is_cpu else values.cpu()).contiguous().numpy()  # a call that does nothing takes time


def check_offsets(
    offsets: Tensor, num_ids: int, name: str = "offsets", *, device: torch.device = _HOST,
    is_last_given: bool | None = None, dtype: OffsetsType = np.int64,
) -> Any:  # fmt: skip
    """A copy of offsets that start at 0, do not descend and end at ``num_ids``; ValueError otherwise. A last one
    that is not given is added; None: it is, without an option. If ``dtype`` does not hold ``num_ids``, it is int64."""
    given = check_ids(offsets, name, device=device)
    whole = given if is_last_given is not False else np.concatenate((given, (num_ids,)))
    array: Any = np.empty(len(whole), dtype if num_ids < 2**31 else np.int64)
    if len(array) and kernels.copy_offsets(whole, num_ids, array):
        return array
    found = "there are none"
    if len(given):
        starts = given.astype(np.int64)
        wrong = (np.diff(starts, prepend=starts[:1]) < 0) | (starts > num_ids)
        wrong[0] |= starts[0] != 0
        place = int(wrong.argmax()) if wrong.any() else len(starts) - 1
        found = f"the one at index {place} is {starts[place]} {_OF_LENGTHS}"
    raise _offsets_error(name, num_ids, found, is_last_given=is_last_given)


def _offsets_error(name: str, num_ids: int, found: str, *, is_last_given: bool | None) -> ValueError:
    form = "without the end, [bags]" if is_last_given is False else "with the end, [bags + 1]"
    ends = "not exceed" if is_last_given is False else "end at"
    option = "" if is_last_given is None else f" (include_last_offset={is_last_given})"
    rule = f"{name} must start at 0, never descend and {ends} the number of ids, {num_ids}; {found}"
    return ValueError(f"{rule}. They are taken {form}{option}")


def require_scale(scale: Tensor | None, num_ids: int, mode: str, name: str = "per_sample_weights") -> Tensor | None:
    """Per-sample weights as float32 [n], or None. TypeError: not one of ``FLOAT_TYPES``. ValueError: another length
    than the ids, or a mode other than "sum"."""
    if scale is None:
        return None
    if require_tensor(scale, name).dtype not in FLOAT_TYPES:
        raise TypeError(f"{name} must be float32, float16 or bfloat16, not {scale.dtype}; {name}.float() converts")
    if mode != "sum":
        raise ValueError(f'{name} goes with mode="sum" only, not {mode!r}')
    if scale.shape != (num_ids,):
        raise ValueError(f"{name} must be [{num_ids}] like the ids, not {tuple(scale.shape)}")
    return scale.detach().float()


def check_jagged(
    ids: Tensor, offsets: Tensor, scale: Tensor | None, mode: str, *, device: torch.device, offsets_type: OffsetsType,
    is_last_given: bool | None = None, ids_name: str = "ids", scale_name: str = "per_sample_weights",
) -> Jagged | DeviceJagged:  # fmt: skip
    """Checked ids of one feature; see ``check_ids``, ``check_offsets`` and ``require_scale``. Tensors that are all on
    the store's device are not waited for: only what the host knows of them is checked."""

    def on_host() -> Jagged:
        rows = check_ids(ids, ids_name, device=device)
        starts = check_offsets(offsets, len(rows), device=device, is_last_given=is_last_given, dtype=offsets_type)
        own = None if scale is None else require_scale(scale, len(rows), mode, scale_name)
        return Jagged(rows, starts, len(starts) - 1, None if own is None else _to_host(own, scale_name, device))

    if not (is_there(ids, device) and is_there(offsets, device) and (scale is None or is_there(scale, device))):
        return on_host()
    refuse_transforms()
    count, own = len(require_ids(ids, ids_name)), require_scale(scale, len(ids), mode, scale_name)
    starts = require_ids(offsets, "offsets").contiguous()
    given = DeviceIds(ids.contiguous(), starts, None if own is None else own.contiguous())

    def offsets_error(index: int) -> ValueError:
        found = f"the one at index {index} is wrong {_OF_LENGTHS}"
        return _offsets_error("offsets", count, found, is_last_given=is_last_given)

    return DeviceJagged(given, len(offsets) - (is_last_given is not False), on_host, offsets_error)


def is_there(given: object, device: torch.device) -> bool:
    """Whether it is a tensor on that device, from where a copy to the host would be waited for."""
    return isinstance(given, Tensor) and not given.is_cpu and given.device == device
