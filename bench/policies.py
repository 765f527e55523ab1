"""What share of real lookups does a cache of each policy hit, and does it evict exactly what cachetools would?

The 26 tables of Criteo share one cache; every lookup is an access, in row order.
"""

import sys
import time
from typing import Any, NamedTuple

import cachetools
import numpy as np
from numpy.typing import NDArray

from tierstore.cache.ddr import OVERHEAD_BYTES, DdrCache, PolicyName

from .common import Goal, Report, Run, Table, program
from .data import criteo_keys, require_criteo

__all__ = ["run"]

_PEERS = {"lru": cachetools.LRUCache, "lfu": cachetools.LFUCache}


class Replay(NamedTuple):
    hits: NDArray[np.bool_]
    accesses_per_s: float


def _replay(policy: PolicyName, capacity: int, keys: NDArray[np.int64]) -> Replay:
    cache = DdrCache(capacity, weight_words=0, state_words=0, policy=policy)
    start = time.perf_counter()
    hits = cache.access(keys)
    seconds = time.perf_counter() - start
    cache.check_integrity()
    return Replay(hits, len(keys) / seconds)


def _replay_peer(policy: PolicyName, capacity: int, keys: NDArray[np.int64]) -> Replay:
    cache: cachetools.Cache[int, None] = _PEERS[policy](capacity)
    hits = np.zeros(len(keys), np.bool_)
    listed = keys.tolist()
    start = time.perf_counter()
    for position, key in enumerate(listed):
        try:
            cache[key]
            hits[position] = True
        except KeyError:
            cache[key] = None
    return Replay(hits, len(keys) / (time.perf_counter() - start))


class Outcome(NamedTuple):
    policy: PolicyName
    capacity: int
    hit_rate: float
    is_equal: bool
    accesses_per_s: float
    peer_accesses_per_s: float


def _compare(policy: PolicyName, capacity: int, keys: NDArray[np.int64], repetitions: int) -> Outcome:
    own = [_replay(policy, capacity, keys) for _ in range(repetitions)]
    peer = _replay_peer(policy, capacity, keys)
    return Outcome(
        policy=policy,
        capacity=capacity,
        hit_rate=float(own[0].hits.mean()),
        is_equal=all(np.array_equal(replay.hits, peer.hits) for replay in own),
        accesses_per_s=float(np.median([replay.accesses_per_s for replay in own])),
        peer_accesses_per_s=peer.accesses_per_s,
    )


def _goals(outcomes: list[Outcome], expected: dict[str, dict[str, float]]) -> list[Goal]:
    rates = [
        Goal(
            name=f"{each.policy.upper()} hit rate with {each.capacity:,} rows",
            value=round(each.hit_rate, 4),
            exactly=expected[each.policy][str(each.capacity)],
        )
        for each in outcomes
    ]
    equal = sum(each.is_equal for each in outcomes)
    return [*rates, Goal(name="replays equal to cachetools in every access", value=equal, exactly=len(outcomes))]


def _table(outcomes: list[Outcome]) -> Table:
    return Table(
        title="hit rate of Criteo's lookups, 26 tables in one cache",
        columns=[
            "cache",
            "rows",
            "hit rate",
            "as cachetools",
            "accesses/s",
            "cachetools/s",
            "overhead B/row",
        ],
        rows=[
            [
                each.policy.upper(),
                f"{each.capacity:,}",
                f"{each.hit_rate:.4f}",
                "every access" if each.is_equal else "NO",
                f"{each.accesses_per_s / 1e6:.1f} M",
                f"{each.peer_accesses_per_s / 1e6:.2f} M",
                str(OVERHEAD_BYTES[each.policy]),
            ]
            for each in outcomes
        ],
    )


def run(request: Run) -> Report:
    config: dict[str, Any] = request.config
    keys = criteo_keys(require_criteo())
    if config["lookups"]:
        keys = keys[: config["lookups"]]
    _replay("lru", 16, keys[:100])
    _replay("lfu", 16, keys[:100])
    outcomes = [
        _compare(policy, capacity, keys, config["repetitions"])
        for policy in ("lru", "lfu")
        for capacity in config["capacities"]
    ]
    return Report(
        question="What share of real lookups hits, and is every eviction what cachetools would evict?",
        tables=[_table(outcomes)],
        figures={
            "lookups": len(keys),
            "distinct_rows": len(np.unique(keys)),
            "overhead_bytes_per_row": dict(OVERHEAD_BYTES),
            "outcomes": [each._asdict() for each in outcomes],
        },
        # The expected rates are those of the whole file.
        goals=[] if config["lookups"] else _goals(outcomes, config["expected"]),
        notes=[
            f"{len(keys):,} lookups of {len(np.unique(keys)):,} distinct rows. One thread; index and policy, no rows "
            "to copy. LFU is as cachetools defines it: a row that returns starts to count anew."
        ],
    )


if __name__ == "__main__":
    sys.exit(program("policies", run))
