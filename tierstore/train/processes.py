"""The processes that train a run together: one alone, or the ranks that torchrun started."""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..dist import (
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    TowerTieredEmbeddingBagCollection,
    average,
    open_sharded,
)
from ..dist.ranks import Ranks, ranks_on_host
from ..errors import RankError
from ..nn.collection import TieredEmbeddingBagCollection
from ..nn.jagged import KeyedJaggedTensor
from ..store import Store, open_store
from ..store.commits import PendingCommit
from ..system.processes import launched_rank
from .config import RunConfig, StoreSection

_T = TypeVar("_T")
_POLL_SECONDS: Final = 0.02
_MIN_KEPT: Final = 2  # commits that each rank keeps: not all may have the last


class OneProcess:
    """This process alone. Its methods are what a run asks of the processes that train it, which all call them."""

    rank = 0
    size = 1

    def open(self, config: RunConfig, **options: Any) -> Store:
        return open_store(config.store.path, mode="w", keep=config.store.keep, **options)

    def local(self, store: Store) -> Store:
        """The store of this process, or its part."""
        return store

    def make_embeddings(
        self, store: Store, tables: Sequence[str], _modules: Sequence[nn.Module]
    ) -> TieredEmbeddingBagCollection:
        """Over all tables; over hosts with modules, one for each tower."""
        return TieredEmbeddingBagCollection(store, tables=tables)

    def commit(self, store: Store, extra: dict[str, Any], tensors: Mapping[str, Tensor]) -> PendingCommit:
        return store.commit_async(extra=extra, tensors=tensors)

    def read(self, store: Store, table: str, ids: Tensor) -> Tensor:
        """Rows of int64 [n] ids, [n, dim] of the table's dtype, in the process of rank 0."""
        return store[table].read(ids)

    def average(self, gradients: Sequence[Tensor], loss: Tensor, stop: bool) -> tuple[Tensor, bool]:  # noqa: ARG002
        """Replace gradients by their means over the processes. Returns the loss's mean, and whether any stops."""
        return loss, stop

    def gather(self, value: _T) -> list[_T]:
        """What each process has, in order."""
        return [value]


ALONE: Final = OneProcess()


class ManyProcesses:
    """The ranks of torch.distributed's group of all; methods as of ``OneProcess``."""

    def __init__(self) -> None:
        self._ranks = Ranks()
        self.rank, self.size = self._ranks.rank, self._ranks.size

    def open(self, config: RunConfig, **options: Any) -> Any:
        section, train, ranks = config.store, config.train, config.ranks
        with self._ranks.together():
            if section.record:
                raise ValueError(
                    f"store.record = {section.record!r}: a run over ranks is not recorded; its lookups are those of "
                    "one process, which tierstore trace record writes down without training"
                )
            if config.data.follow or train.keep_best or train.test_every_minutes or train.commit_seconds:
                raise ValueError(
                    "data.follow, train.keep_best, test_every_minutes and commit_seconds are for one process; over "
                    "ranks set train.test_every_steps, commit_every and, for tierstore rollback, more of store.keep"
                )
        if section.ddr == StoreSection().ddr:
            options["ddr"] = None
        options |= {"plan": ranks.plan or None, "keep": max(section.keep, _MIN_KEPT)}
        options |= {name: getattr(ranks, name) for name in ("forward_precision", "backward_precision")}
        opened = partial(open_sharded, section.path, **options)
        towers, on_host = config.model.towers, self.gather(ranks_on_host(self.size))
        if len(towers) > 1 and set(on_host) == {self.size / len(towers)}:
            with contextlib.suppress(ValueError):  # the plan, or the last commit, has tables on other hosts
                return opened(towers=towers)
        return opened()

    def local(self, store: Any) -> Store:
        local: Store = store.local
        return local

    def make_embeddings(
        self, store: Any, tables: Sequence[str], modules: Sequence[nn.Module]
    ) -> TieredEmbeddingBagCollection:
        is_pooled = all(store.tables[name].sharding.exchange == "pooled" for name in tables)
        if store.owners.towers is not None and is_pooled:
            return TowerTieredEmbeddingBagCollection(store, modules, tables=tables)
        return ShardedTieredEmbeddingBagCollection(store, tables=tables)

    def commit(self, store: Any, extra: dict[str, Any], tensors: Mapping[str, Tensor]) -> PendingCommit:
        number = store.commit(extra=extra, tensors=tensors)
        done = PendingCommit(number)
        done.set_result(number)
        return done

    def read(self, store: Any, table: str, ids: Tensor) -> Tensor:
        (feature,) = store.tables[table].config.feature_names
        wanted = ids if self.rank == 0 else ids[:0]
        module = ShardedTieredEmbeddingCollection(store, tables=[table])
        with torch.no_grad():
            rows = module(KeyedJaggedTensor([feature], wanted, lengths=torch.ones(len(wanted), dtype=torch.int64)))
        values: Tensor = rows[feature].values()
        return values.to(self.local(store)[table].layout.torch_dtype)

    def average(self, gradients: Sequence[Tensor], loss: Tensor, stop: bool) -> tuple[Tensor, bool]:
        shared = torch.stack([loss, torch.tensor(float(stop))])
        average([*gradients, shared], self._ranks)
        return shared[0], bool(shared[1] > 0)

    def gather(self, value: _T) -> list[_T]:
        return self._ranks.gather(value)


Processes = OneProcess | ManyProcesses


@contextlib.contextmanager
def joined(config: RunConfig) -> Iterator[Processes]:
    """The ranks of the process group that there is, or that torchrun's environment names, which is joined within; else
    this process alone. RankError: the others did not come within ``ranks.timeout_seconds``."""
    if dist.is_available() and dist.is_initialized():
        yield ManyProcesses()
    elif launched_rank() is not None:
        with meeting(config.ranks.timeout_seconds):
            yield ManyProcesses()
    else:
        yield ALONE


@contextlib.contextmanager
def meeting(seconds: int) -> Iterator[None]:
    """All ranks are in a process group of gloo within, by torchrun's environment, with a store of this start's own.
    RankError: they did not come in time."""
    try:
        timeout = timedelta(seconds=seconds)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        own: Any = dist.PrefixStore(_start(store, rank, size, seconds), store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RankError(
            f"the {os.environ['WORLD_SIZE']} ranks did not meet within {seconds} s: start all of them, and let each "
            f"reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({error})"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _start(store: Any, rank: int, size: int, seconds: int) -> str:
    """A name of this start, the same in all ranks and in no other start: torchrun's store outlives restarts. Each rank
    draws a token and shows which tokens it sees. All see the same once each shows those of now."""

    def shown(what: str) -> list[str]:
        """By each rank; "" if nothing yet."""
        keys = [f"tierstore/{what}/{other}" for other in range(size)]
        return [store.get(key).decode() if store.check([key]) else "" for key in keys]

    token, deadline = secrets.token_hex(8), time.monotonic() + seconds
    store.set(f"tierstore/token/{rank}", token)
    while time.monotonic() < deadline:
        tokens = shown("token")
        seen = " ".join(tokens)
        store.set(f"tierstore/seen/{rank}", seen)
        if all(tokens) and set(shown("seen")) == {seen}:
            return hashlib.sha256(seen.encode()).hexdigest()
        time.sleep(_POLL_SECONDS)
    missing = ", ".join(str(other) for other, one in enumerate(tokens) if not one)
    raise RuntimeError(f"rank {missing} did not come" if missing else "a rank left again")
