"""Refusing to train rows in a module that several processes replicate."""

import weakref
from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

from ..store import Store

_REPLICATED: Final["weakref.WeakKeyDictionary[torch.nn.Module, int]"] = weakref.WeakKeyDictionary()
"""Processes that replicate a module: a reentrant checkpoint trains in backward, where nothing tells of them."""


def require_one_process(module: torch.nn.Module, store: Store) -> None:
    """RuntimeError if rows are trained in the forward of a DistributedDataParallel of several processes, which would
    each train rows of their own: DDP exchanges gradients of parameters, and rows are none."""
    replicated = getattr(DistributedDataParallel, "_active_ddp_module", None)  # of any thread
    if replicated is not None and any(each is module for each in replicated.modules()):
        _REPLICATED[module] = replicated.process_group.size()
    elif torch._C._current_graph_task_id() < 0:
        _REPLICATED.pop(module, None)
    processes = _REPLICATED.get(module, 1)
    if processes > 1 and torch.is_grad_enabled():
        raise RuntimeError(
            f"rows of the store at {store.directory} cannot be trained inside DistributedDataParallel by {processes} "
            "processes: each would train rows of its own, and nothing would bring them together. Shard the tables over "
            "the processes (tierstore.dist), or train them in one. Tables that are not trained may be replicated: open "
            'their store with mode="r", or freeze the module by requires_grad_(False) before it is replicated'
        )
