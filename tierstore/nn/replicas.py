"""Refusing to train rows in a module that several processes replicate."""

from torch.nn.parallel import DistributedDataParallel

from ..store import Store

__all__ = ["require_one_process"]


def require_one_process(store: Store) -> None:
    """RuntimeError inside the forward of a DistributedDataParallel of several processes, which would each train rows of
    their own: DDP exchanges gradients of parameters, and rows are none."""
    replicated = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if replicated is not None and replicated.process_group.size() > 1:
        raise RuntimeError(
            f"rows of the store at {store.directory} cannot be trained inside DistributedDataParallel by "
            f"{replicated.process_group.size()} processes: each would train rows of its own, and nothing would bring "
            "them together. Train tables in one process; sharding over processes does not exist yet. Tables that are "
            'not trained may be replicated: open their store with mode="r", or look them up under torch.no_grad()'
        )
