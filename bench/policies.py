"""What share of lookups does a cache of each policy hit, and at what cost?

The 26 tables of Criteo share one cache. Batches look rows up, as in training; rows of batches to come may be announced.
Tests compare every eviction with cachetools, or a twin.
"""

import sys
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.cache import Admission
from tierstore.cache.ddr import OVERHEAD_BYTES, DdrCache, PolicyName

from .common import Goal, Report, Run, Table, program
from .data import criteo_batches, criteo_keys, require_criteo
from .oracles import belady_hits, belady_rows_read, perfect_count_hits

__all__ = ["run"]

Keys = NDArray[np.int64]
_ONE_BY_ONE: tuple[PolicyName, ...] = ("lru", "lfu", "tinylfu")
_BEHIND_MAX = 0.5


def _cache(policy: PolicyName, capacity: int) -> DdrCache:
    return DdrCache(capacity, weight_words=0, state_words=0, policy=policy)


class Outcome(NamedTuple):
    """Attributes:
    announced: batches known at a time, on average: there is no room for more.
    """

    cache: str
    capacity: int
    hit_rate: float
    ns_per_id: float = float("nan")
    lookahead: int = 0
    announced: float = 0.0

    @property
    def cells(self) -> list[str]:
        known = [f"{self.lookahead:,}", f"{self.announced:.0f}"] if self.lookahead else ["", ""]
        time = "" if np.isnan(self.ns_per_id) else f"{self.ns_per_id:.0f}"
        return [self.cache, f"{self.capacity:,}", *known, f"{self.hit_rate:.4f}", time]


def _replay(policy: PolicyName, capacity: int, keys: Keys) -> Outcome:
    cache = _cache(policy, capacity)
    start = time.perf_counter()
    hits = cache.access(keys)
    ns_per_id = (time.perf_counter() - start) / len(keys) * 1e9
    cache.check_integrity()
    return Outcome(policy.upper(), capacity, float(hits.mean()), ns_per_id)


def _train(policy: PolicyName, capacity: int, batches: list[Keys], lookahead: int) -> Outcome:
    """A loop over the batches that does nothing but use the cache; a row read is a miss."""
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
    lookups = sum(map(len, batches))
    ns_per_id = (time.perf_counter() - start) / lookups * 1e9
    cache.check_integrity()
    return Outcome(policy.upper(), capacity, 1 - read / lookups, ns_per_id, lookahead, announced / len(batches))


def _median(outcomes: list[Outcome]) -> Outcome:
    return outcomes[0]._replace(ns_per_id=float(np.median([each.ns_per_id for each in outcomes])))


def _table(title: str, outcomes: list[Outcome]) -> Table:
    columns = ["cache", "rows", "lookahead", "batches known", "hit rate", "ns/id"]
    return Table(title=title, columns=columns, rows=[each.cells for each in outcomes])


def run(request: Run) -> Report:
    config: dict[str, Any] = request.config
    path, count, capacities = require_criteo(), config["lookups"], config["capacities"]
    keys, batches = criteo_keys(path), criteo_batches(path, config["batch_samples"])
    if count:
        keys, batches = keys[:count], batches[: count // len(batches[0])]
    loops: list[tuple[PolicyName, int]] = [(policy, 0) for policy in _ONE_BY_ONE]
    loops += [("lookahead", lookahead) for lookahead in config["lookaheads"]]
    for policy, _ in loops:  # kernels are compiled
        _train(policy, len(batches[0]), batches[:1], 1)
        _replay(policy if policy in _ONE_BY_ONE else "lru", 16, keys[:100])
    one_by_one, in_batches, goals, lookups = list[Outcome](), list[Outcome](), list[Goal](), sum(map(len, batches))
    repetitions = range(config["repetitions"])
    for capacity in capacities:
        own = [_median([_replay(policy, capacity, keys) for _ in repetitions]) for policy in _ONE_BY_ONE]
        perfect = Outcome("LFU, perfect counts", capacity, perfect_count_hits(keys, capacity) / len(keys))
        optimum = Outcome("optimum (Belady)", capacity, belady_hits(keys, capacity) / len(keys))
        one_by_one += [*own, perfect, optimum]
        for policy, each in zip(_ONE_BY_ONE, own, strict=True):
            wanted = config["expected"][policy][str(capacity)]
            goals.append(
                Goal(
                    name=f"{each.cache} hit rate with {capacity:,} rows", value=round(each.hit_rate, 4), exactly=wanted
                )
            )
        name = f"points TINYLFU is behind LFU with perfect counts, {capacity:,} rows"
        goals.append(Goal(name=name, value=100 * (perfect.hit_rate - own[-1].hit_rate), at_most=_BEHIND_MAX))
        for policy, lookahead in loops:
            in_batches.append(_median([_train(policy, capacity, batches, lookahead) for _ in repetitions]))
        best = 1 - belady_rows_read(batches, capacity) / lookups
        in_batches.append(Outcome("optimum (Belady)", capacity, best))
    return Report(
        question="What share of lookups hits, and at what cost?",
        tables=[
            _table("hit rate of Criteo's lookups, 26 tables in one cache", one_by_one),
            _table(f"the same lookups in batches of {config['batch_samples']} samples", in_batches),
        ],
        figures={
            "lookups": len(keys),
            "overhead_bytes_per_row": dict(OVERHEAD_BYTES),
            "outcomes": [each._asdict() for each in one_by_one],
            "batches": [each._asdict() for each in in_batches],
        },
        # The expected rates are those of the whole file.
        goals=[] if count else goals,
        notes=[
            f"{len(keys):,} lookups of {len(np.unique(keys)):,} distinct rows. One thread; index and policy, no rows "
            "to copy. LFU is as cachetools defines it: a row that returns starts to count again. LFU with perfect "
            "counts and the optimum are computed by programs of their own; the optimum knows all lookups to come.",
            f"In batches of {config['batch_samples']} samples (the file has 80,000), a lookup misses if its row must "
            "be read, once a batch. Lookahead is how many batches are announced, at most: there is room for six "
            "announced uses a cached row. Its time includes announcing.",
        ],
    )


if __name__ == "__main__":
    sys.exit(program("policies", run))
