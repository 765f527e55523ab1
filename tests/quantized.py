"""torch's own quantized rows: what ours are held against."""

from typing import Any

import torch
from torch import Tensor

OPERATORS: dict[str, Any] = {
    "int8": (
        torch.ops.quantized.embedding_bag_byte_prepack,
        torch.ops.quantized.embedding_bag_byte_unpack,
        torch.ops.quantized.embedding_bag_byte_rowwise_offsets,
    ),
    "int4": (
        torch.ops.quantized.embedding_bag_4bit_prepack,
        torch.ops.quantized.embedding_bag_4bit_unpack,
        torch.ops.quantized.embedding_bag_4bit_rowwise_offsets,
    ),
}
"""Pack, unpack, pooled lookup."""
KINDS = ("normal", "scales", "constant", "zero", "subnormal", "zeros")


def packed(rows: Tensor, dtype: str) -> Tensor:
    """uint8 [n, stored columns]. torch packs pairs of columns: an odd last one gets a partner that changes no bit."""
    dim = rows.shape[1]
    if dtype == "int8" or dim % 2 == 0:
        found: Tensor = OPERATORS[dtype][0](rows)
        return found
    found = OPERATORS[dtype][0](torch.cat([rows, rows[:, :1]], 1))
    found[:, dim // 2] &= 15
    return found


def rows_of_kind(kind: str, count: int, dim: int) -> Tensor:
    """float32 [count, dim] without infinite float16 in it."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(count, dim, generator=generator)
    if kind == "scales":
        return rows * torch.exp(torch.randn(count, 1, generator=generator) * 8 - 14).clamp(max=2000)
    if kind == "constant":
        return rows[:, :1].expand(count, dim).contiguous()
    if kind == "subnormal":
        return rows * 1e-40
    return rows if kind == "normal" else torch.zeros(count, dim) if kind == "zero" else rows.clamp(min=0)
