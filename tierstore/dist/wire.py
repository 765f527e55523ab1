"""Rows of float32 in fewer bits, for the way between ranks."""

from typing import Final, Literal

import torch
from torch import Tensor

Precision = Literal["fp32", "fp16", "bf16", "int8"]
"""TorchRec's names. "int8": each row as 8-bit integers and one float32, the largest magnitude of the row over 127."""
_HALVES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_LEVELS: Final = 127
_SCALE_BYTES: Final = 4


def encoded(rows: Tensor, precision: Precision) -> Tensor:
    """What goes over the wire for float32 [n, dim]: as many rows."""
    if precision == "fp32":
        return rows
    if precision in _HALVES:
        return rows.to(_HALVES[precision])
    scale = (rows.abs().amax(1) / _LEVELS).view(-1, 1)
    levels = torch.round(rows / torch.where(scale > 0, scale, 1)).to(torch.int8)
    return torch.cat([levels, scale.view(torch.int8)], dim=1)


def decoded(sent: Tensor, precision: Precision) -> Tensor:
    """float32 [n, dim] of what ``encoded`` gave."""
    if precision == "int8":
        scale = sent[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
        return sent[:, :-_SCALE_BYTES].to(torch.float32) * scale
    return sent.to(torch.float32)
