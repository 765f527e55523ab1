"""What does a 32-way cache with bounded overflow lose against one that evicts exactly the least used row of all?

Criteo's lookups, batch by batch, the 26 tables sharing a cache: the HBM tier (its torch twin, on the CPU) beside the
DDR tier's caches of as many rows. A lookup misses if its row has to be brought in; duplicates in a batch hit.
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierstore import optim
from tierstore.cache import Admission, make_cache
from tierstore.cache.hbm import INDEX_BYTES, PolicyName
from tierstore.cache.hbm_sketch import SKETCH_BYTES
from tierstore.config import TableConfig
from tierstore.hbm.lanes import HostLane
from tierstore.hbm.pool import HbmPool, HbmSize
from tierstore.io import MemoryColdTier
from tierstore.kernels.threads import Workers
from tierstore.pool import Pool

from .common import Goal, Report, Run, Table, program
from .data import criteo_keys, require_criteo

__all__ = ["run"]


class Outcome(NamedTuple):
    policy: str
    capacity: int
    hit_rate: float
    exact_hit_rate: float
    conflict_misses: int
    lookups: int


def _batches(keys: NDArray[np.int64], size: int) -> Iterator[NDArray[np.int64]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def _exact_hit_rate(policy: str, capacity: int, keys: NDArray[np.int64], size: int) -> float:
    cache = make_cache(policy, capacity, weight_words=0, state_words=0)
    for batch in _batches(keys, size):
        rest = batch
        while len(rest):
            admission = Admission(rest)
            cache.admit(admission)
            cache.filled(admission.missing_slots)
            cache.unpin(admission.slots)
            rest = rest[admission.consumed :]
    return 1 - cache.counters().misses / len(keys)


def _hbm(policy: PolicyName, capacity: int, keys: NDArray[np.int64], size: int, overflow_share: float) -> HbmPool:
    """The tier after all lookups; it and its overflow have ``capacity`` rows together."""
    rows = int(keys.max()) + 1
    config = TableConfig(name="t", num_embeddings=rows, embedding_dim=2, optimizer=optim.SGD())
    layout = config.layout(4096)
    cold = MemoryColdTier()
    cold.add_table(0, layout, rows)
    below = make_cache("lru", rows, weight_words=layout.weight_words, state_words=layout.state_words)
    pool = Pool(layout, below, cold, Workers(1), transaction_bytes=1 << 20, outbox_rows=64, epoch=1, readonly=True)
    pool.filler.add_table(0, config)
    overflow = int(capacity * overflow_share)
    sizes = HbmSize(cached_rows=capacity - overflow, overflow_rows=overflow, staging_rows=4096)
    hot = HbmPool(pool, sizes, HostLane(), torch.device("cpu"), policy)
    for batch in _batches(keys, size):
        for _ in hot.parts(torch.from_numpy(batch)):
            pass
    hot.check_integrity()
    return hot


def _compare(policy: PolicyName, capacity: int, keys: NDArray[np.int64], config: dict[str, Any]) -> Outcome:
    size = config["batch_lookups"]
    hot = _hbm(policy, capacity, keys, size, config["overflow_share"])
    return Outcome(
        policy=policy,
        capacity=capacity,
        hit_rate=1 - hot.cache.counters().misses / len(keys),
        exact_hit_rate=_exact_hit_rate(policy, capacity, keys, size),
        conflict_misses=hot.conflict_misses,
        lookups=len(keys),
    )


def _table(outcomes: list[Outcome]) -> Table:
    index = {"lru": INDEX_BYTES, "lfu": INDEX_BYTES + SKETCH_BYTES}
    return Table(
        title="hit rate of Criteo's lookups, 26 tables in one cache",
        columns=["policy", "rows", "32-way", "exact", "difference", "conflict misses", "index B/row"],
        rows=[
            [
                each.policy.upper(),
                f"{each.capacity:,}",
                f"{each.hit_rate:.4f}",
                f"{each.exact_hit_rate:.4f}",
                f"{each.hit_rate - each.exact_hit_rate:+.4f}",
                f"{each.conflict_misses / each.lookups:.2%}",
                str(index[each.policy]),
            ]
            for each in outcomes
        ],
    )


def run(request: Run) -> Report:
    config: dict[str, Any] = request.config
    keys = np.unique(criteo_keys(require_criteo()), return_inverse=True)[1].astype(np.int64)
    if config["lookups"]:
        keys = keys[: config["lookups"]]
    policies: tuple[PolicyName, ...] = ("lru", "lfu")
    outcomes = [_compare(policy, capacity, keys, config) for policy in policies for capacity in config["capacities"]]
    worst = min(each.hit_rate - each.exact_hit_rate for each in outcomes)
    return Report(
        question="What does a 32-way cache lose against one that evicts exactly the least used row of all?",
        tables=[_table(outcomes)],
        figures={"lookups": len(keys), "outcomes": [each._asdict() for each in outcomes]},
        goals=[Goal(name="worst difference in hit rate", value=round(worst, 4), at_least=config["worst_difference"])],
        notes=[
            f"Batches of {config['batch_lookups']:,} lookups; {config['overflow_share']:.0%} of the rows are overflow "
            "slots. A lookup misses if its row has to be brought in; duplicates in a batch hit. LFU in the HBM tier "
            "counts accesses beyond residence (a sketch) and admits by them; exact LFU starts to count anew."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("associative", run))
