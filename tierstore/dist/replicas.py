"""The rest of a model, alongside sharded tables."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .collection import ShardedCollection
from .ranks import Ranks


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel(model)``, which leaves the rows of sharded tables to their modules.

    Args:
        options: of ``DistributedDataParallel``.
    """
    owned = [f"{name}.rows" for name, each in model.named_modules() if isinstance(each, ShardedCollection)]
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", []), *owned}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, **options)


def average(tensors: Sequence[Tensor], ranks: Ranks) -> None:
    """Replace tensors by their means over the ranks, in place; collective. For dense gradients between ``backward``
    and ``step``, in place of ``DistributedDataParallel``.

    A mean is the sum, in order of the ranks, of each one's value divided by their number: the same bits on all ranks
    and whenever it is done again, which gloo's own sum does not promise. Each rank sums a part of the values.

    Args:
        tensors: float32, on the CPU, of the same shapes on all ranks.
        ranks: ``ShardedStore.ranks``.
    """
    with ranks.telling():
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) / ranks.size
        part = -(-len(flat) // ranks.size)
        counts = [part] * ranks.size
        padded = nn.functional.pad(flat, (0, part * ranks.size - len(flat)))
    ranks.counts(counts, f"average of {len(flat)} values", then=2)
    parts = ranks.exchange(padded, counts, counts).view(ranks.size, part)
    total = parts[0].clone()
    for each in parts[1:]:
        total += each
    means = ranks.exchange(total.repeat(ranks.size), counts, counts)
    begin = 0
    for tensor in tensors:
        tensor.copy_(means[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
