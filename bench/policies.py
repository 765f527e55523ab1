"""What share of lookups does a cache of each policy hit, at what cost, and is every eviction what the rules say?

The 26 tables of Criteo share one cache; every lookup is an access, in row order. Then the same lookups in batches, as
training makes them, where rows of batches to come may be announced.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cachetools
import numpy as np
from numpy.typing import NDArray

from tierstore.cache import Admission
from tierstore.cache.ddr import OVERHEAD_BYTES, DdrCache, PolicyName
from tierstore.cache.reference_tinylfu import TinyLFU

from .common import Goal, Report, Run, Table, program
from .data import criteo_batches, criteo_keys, require_criteo
from .oracles import belady_hits, belady_rows_read, perfect_count_hits

__all__ = ["run"]

Keys = NDArray[np.int64]
_PEERS: dict[str, Callable[[int], Any]] = {
    "lru": cachetools.LRUCache,
    "lfu": cachetools.LFUCache,
    "tinylfu": TinyLFU,
}
_ONE_BY_ONE: tuple[PolicyName, ...] = ("lru", "lfu", "tinylfu")


def _cache(policy: PolicyName, capacity: int) -> DdrCache:
    return DdrCache(capacity, weight_words=0, state_words=0, policy=policy)


class Replay(NamedTuple):
    hits: NDArray[np.bool_]
    seconds: float


def _replay(policy: PolicyName, capacity: int, keys: Keys) -> Replay:
    cache = _cache(policy, capacity)
    start = time.perf_counter()
    hits = cache.access(keys)
    seconds = time.perf_counter() - start
    cache.check_integrity()
    return Replay(hits, seconds)


def _replay_peer(policy: PolicyName, capacity: int, keys: Keys) -> Replay:
    cache = _PEERS[policy](capacity)
    access = cache.access if isinstance(cache, TinyLFU) else partial(_access, cache)
    hits = np.zeros(len(keys), np.bool_)
    listed = keys.tolist()
    start = time.perf_counter()
    for position, key in enumerate(listed):
        hits[position] = key in cache
        access(key)
    return Replay(hits, time.perf_counter() - start)


def _access(cache: cachetools.Cache[int, None], key: int) -> None:
    try:
        cache[key]
    except KeyError:
        cache[key] = None


class Outcome(NamedTuple):
    policy: PolicyName
    capacity: int
    hit_rate: float
    is_equal: bool
    ns_per_id: float
    peer_ns_per_id: float


def _compare(policy: PolicyName, capacity: int, keys: Keys, config: dict[str, Any]) -> Outcome:
    own = [_replay(policy, capacity, keys) for _ in range(config["repetitions"])]
    # The twin of TinyLFU is slow; of what it has seen, every access must agree.
    num_peer = len(keys) if policy != "tinylfu" else min(len(keys), config["twin_lookups"])
    peer = _replay_peer(policy, capacity, keys[:num_peer])
    return Outcome(
        policy=policy,
        capacity=capacity,
        hit_rate=float(own[0].hits.mean()),
        is_equal=all(np.array_equal(replay.hits[:num_peer], peer.hits) for replay in own),
        ns_per_id=float(np.median([replay.seconds for replay in own])) / len(keys) * 1e9,
        peer_ns_per_id=peer.seconds / num_peer * 1e9,
    )


class Bound(NamedTuple):
    """What no policy that must be told knows."""

    capacity: int
    perfect_counts: float
    optimum: float


def _bound(capacity: int, keys: Keys) -> Bound:
    return Bound(capacity, perfect_count_hits(keys, capacity) / len(keys), belady_hits(keys, capacity) / len(keys))


class BatchOutcome(NamedTuple):
    policy: PolicyName
    capacity: int
    lookahead: int
    announced: float
    """Batches known at a time, on average: there is no room for more."""
    hit_rate: float
    ns_per_id: float


def _train(policy: PolicyName, capacity: int, batches: list[Keys], lookahead: int) -> BatchOutcome:
    """A loop over the batches that does nothing but keep the cache's books; a row read is a miss."""
    cache = _cache(policy, capacity)
    numbers: deque[int] = deque()
    known = read = announced = 0
    start = time.perf_counter()
    for step, keys in enumerate(batches):
        while known < min(len(batches), step + lookahead + 1) and cache.can_announce(len(batches[known])):
            numbers.append(cache.announce(batches[known]))
            known += 1
        announced += max(0, known - step - 1)
        admission = Admission(keys)
        cache.admit(admission)
        assert admission.consumed == len(keys), "a batch is larger than the cache"
        cache.filled(admission.missing_slots)
        read += admission.num_missing
        if numbers:
            cache.retire(numbers.popleft())
        cache.unpin(admission.slots)
    seconds = time.perf_counter() - start
    cache.check_integrity()
    lookups = sum(map(len, batches))
    return BatchOutcome(
        policy, capacity, lookahead, announced / len(batches), 1 - read / lookups, seconds / lookups * 1e9
    )


def _train_all(batches: list[Keys], config: dict[str, Any]) -> list[BatchOutcome]:
    loops: list[tuple[PolicyName, int]] = [(policy, 0) for policy in _ONE_BY_ONE]
    loops += [("lookahead", lookahead) for lookahead in config["lookaheads"]]
    outcomes = []
    for capacity in config["capacities"]:
        for policy, lookahead in loops:
            runs = [_train(policy, capacity, batches, lookahead) for _ in range(config["repetitions"])]
            outcomes.append(runs[0]._replace(ns_per_id=float(np.median([each.ns_per_id for each in runs]))))
    return outcomes


def _goals(outcomes: list[Outcome], bounds: list[Bound], config: dict[str, Any]) -> list[Goal]:
    rates = [
        Goal(
            name=f"{each.policy.upper()} hit rate with {each.capacity:,} rows",
            value=round(each.hit_rate, 4),
            exactly=config["expected"][each.policy][str(each.capacity)],
        )
        for each in outcomes
    ]
    equal = sum(each.is_equal for each in outcomes)
    tiny = {each.capacity: each.hit_rate for each in outcomes if each.policy == "tinylfu"}
    behind = max(100 * (bound.perfect_counts - tiny[bound.capacity]) for bound in bounds)
    return [
        *rates,
        Goal(name="replays equal to cachetools, or the twin, in every access", value=equal, exactly=len(outcomes)),
        Goal(name="points TINYLFU is behind LFU with perfect counts, at most", value=behind, at_most=0.5),
    ]


def _table(outcomes: list[Outcome], bounds: list[Bound]) -> Table:
    rows = [
        [
            each.policy.upper(),
            f"{each.capacity:,}",
            f"{each.hit_rate:.4f}",
            "every access" if each.is_equal else "NO",
            f"{each.ns_per_id:.0f}",
            f"{each.peer_ns_per_id:,.0f}",
            str(OVERHEAD_BYTES[each.policy]),
        ]
        for each in outcomes
    ]
    known = [("LFU, perfect counts", "perfect_counts"), ("optimum (Belady)", "optimum")]
    rows += [
        [name, f"{bound.capacity:,}", f"{getattr(bound, field):.4f}", "", "", "", ""]
        for name, field in known
        for bound in bounds
    ]
    return Table(
        title="hit rate of Criteo's lookups, 26 tables in one cache",
        columns=["cache", "rows", "hit rate", "as its twin", "ns/id", "twin's ns/id", "overhead B/row"],
        rows=rows,
    )


def _batch_table(outcomes: list[BatchOutcome], optimum: dict[int, float], samples: int) -> Table:
    rows = []
    for capacity, best in optimum.items():
        rows += [
            [
                each.policy.upper(),
                f"{capacity:,}",
                f"{each.lookahead:,}" if each.lookahead else "",
                f"{each.announced:.0f}" if each.lookahead else "",
                f"{each.hit_rate:.4f}",
                f"{each.ns_per_id:.0f}",
            ]
            for each in outcomes
            if each.capacity == capacity
        ]
        rows.append(["optimum (Belady)", f"{capacity:,}", "all", "", f"{best:.4f}", ""])
    return Table(
        title=f"the same lookups in batches of {samples} samples",
        columns=["cache", "rows", "lookahead", "batches known", "hit rate", "ns/id"],
        rows=rows,
    )


def run(request: Run) -> Report:
    config: dict[str, Any] = request.config
    path = require_criteo()
    keys = criteo_keys(path)
    batches = criteo_batches(path, config["batch_samples"])
    if config["lookups"]:
        keys, batches = keys[: config["lookups"]], batches[: config["lookups"] // len(batches[0])]
    for policy in _ONE_BY_ONE:
        _replay(policy, 16, keys[:100])
    for policy in (*_ONE_BY_ONE, "lookahead"):
        _train(policy, len(batches[0]), batches[:1], 1)
    outcomes = [_compare(policy, capacity, keys, config) for policy in _ONE_BY_ONE for capacity in config["capacities"]]
    bounds = [_bound(capacity, keys) for capacity in config["capacities"]]
    lookups = sum(map(len, batches))
    optimum = {each: 1 - belady_rows_read(batches, each) / lookups for each in config["capacities"]}
    in_batches = _train_all(batches, config)
    return Report(
        question="What share of lookups hits, at what cost, and is every eviction what the rules say?",
        tables=[
            _table(outcomes, bounds),
            _batch_table(in_batches, optimum, config["batch_samples"]),
        ],
        figures={
            "lookups": len(keys),
            "distinct_rows": len(np.unique(keys)),
            "overhead_bytes_per_row": dict(OVERHEAD_BYTES),
            "outcomes": [each._asdict() for each in outcomes],
            "bounds": [each._asdict() for each in bounds],
            "batches": [each._asdict() for each in in_batches],
            "batch_optimum": optimum,
        },
        # The expected rates are those of the whole file.
        goals=[] if config["lookups"] else _goals(outcomes, bounds, config),
        notes=[
            f"{len(keys):,} lookups of {len(np.unique(keys)):,} distinct rows. One thread; index and policy, no rows "
            "to copy. LFU is as cachetools defines it: a row that returns starts to count anew. TINYLFU is compared "
            f"with its twin over the first {config['twin_lookups']:,} lookups. LFU with perfect counts and the optimum "
            "are computed by programs of their own; the optimum knows all lookups to come.",
            f"In batches of {config['batch_samples']} samples (the file has 80,000), a lookup misses if its row must "
            "be read, once a batch. Lookahead is how many batches are announced ahead, at most: there is room for six "
            "announced uses a cached row. Its time is that of announcing too.",
        ],
    )


if __name__ == "__main__":
    sys.exit(program("policies", run))
