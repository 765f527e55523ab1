"""The rest of a model beside sharded tables."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .collection import ShardedCollection


def data_parallel(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """``DistributedDataParallel(model)``, which leaves the rows of sharded tables to their modules.

    Args:
        options: of ``DistributedDataParallel``.
    """
    owned = [f"{name}.rows" for name, each in model.named_modules() if isinstance(each, ShardedCollection)]
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", []), *owned}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model, **options)
