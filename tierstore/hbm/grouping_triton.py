"""The kernels of ``grouping`` in Triton. Their twins in ``grouping_twin`` specify and check what they compute.

Bytes a key: mixing 16, counting 8, placing 28 and a sector (32 bytes) each of inverse and keys, as order is random.
"""

# Triton takes an annotation for a type of its own.
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cache_triton import mix
from .triton_launch import launch

TILE: Final = 1024
"""Places of a sorted batch that one program looks at."""


@triton.jit(do_not_specialize=["count"])
def mix_tile(keys, mixed, count, BLOCK: tl.constexpr) -> None:
    """BLOCK keys, such that the order of the signed results is that of the unsigned mixes."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    value = mix(tl.load(keys + place, mask=inside, other=0)) ^ (1 << 63)
    tl.store(mixed + place, value.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def starts_of_tile(ordered, place, count):
    """int32: 1 where a value differs from the one before, 0 elsewhere and outside."""
    inside = place < count
    value = tl.load(ordered + place, mask=inside, other=0)
    before = tl.load(ordered + place - 1, mask=inside & (place > 0), other=0)
    return (inside & ((place == 0) | (value != before))).to(tl.int32)


@triton.jit(do_not_specialize=["count"])
def count_tile(ordered, counts, count, BLOCK: tl.constexpr) -> None:
    """A tile of BLOCK sorted values."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(starts_of_tile(ordered, place, count), axis=0))


@triton.jit(do_not_specialize=["count"])
def place_tile(
    ordered, order, counts, keys, distinct, starts, num_unique, inverse, count,
    HAS_KEYS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of BLOCK sorted values, numbered from the sum of all earlier tiles' counts."""
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    earlier = tl.zeros([BLOCK], tl.int32)
    for first in range(0, tile, BLOCK):
        earlier += tl.load(counts + first + lane, mask=first + lane < tile, other=0)
    place = tile * BLOCK + lane
    inside = place < count
    begins = starts_of_tile(ordered, place, count)
    number = tl.sum(earlier, axis=0) + tl.cumsum(begins, axis=0) - 1
    is_start = begins != 0
    if HAS_KEYS:
        position = tl.load(order + place, mask=inside, other=0)
        tl.store(inverse + position, number, mask=inside)
        value = tl.load(keys + position, mask=is_start, other=0)
    else:
        value = tl.load(ordered + place, mask=is_start, other=0)
    tl.store(distinct + number, value, mask=is_start)
    tl.store(starts + number, place, mask=is_start)
    is_last = place == count - 1
    tl.store(starts + number + 1, place + 1, mask=is_last)
    tl.store(num_unique + lane * 0, number + 1, mask=is_last)


def mix_keys(keys: Tensor) -> Tensor:
    mixed = torch.empty_like(keys)
    launch(mix_tile, _tiles(keys), keys, mixed, len(keys), BLOCK=TILE)
    return mixed


def place_starts(ordered: Tensor, order: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See ``grouping_twin.place_starts``. Two kernels."""
    count, device, grid = len(ordered), ordered.device, _tiles(ordered)
    counts = torch.empty(grid, dtype=torch.int32, device=device)
    launch(count_tile, grid, ordered, counts, count, BLOCK=TILE)
    distinct = torch.empty_like(ordered)
    starts = torch.empty(count + 1, dtype=torch.int32, device=device)
    num_unique = torch.empty(1, dtype=torch.int32, device=device)
    inverse = None if keys is None else torch.empty(count, dtype=torch.int32, device=device)
    launch(
        place_tile, grid, ordered, order, counts, ordered if keys is None else keys, distinct, starts, num_unique,
        starts if inverse is None else inverse, count, HAS_KEYS=keys is not None, BLOCK=TILE,
    )  # fmt: skip
    return distinct, starts, num_unique, inverse


def _tiles(values: Tensor) -> tuple[int]:
    return (triton.cdiv(len(values), TILE),)
