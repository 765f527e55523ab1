"""Admitting a million ids to a cache of ten million slots: grouping, planning, committing, against bytes that move."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tierstore.cache.base import RESIDENT
from tierstore.hbm.cache import HbmCache, group
from tierstore.hbm.kernel_types import WAYS, Groups, Plan, Status, mixed, sets_of

from ..common import Spread, Table
from .ids import Zipf
from .part import Part
from .rig import Action, Rig, rounds_of

__all__ = ["run"]

_ELSEWHERE: Final = 1 << 50
"""Added to a key, it makes one that is in no cache here."""

_SET_BYTES: Final = 640
"""Keys, ranks and flags of a set."""
_SECTOR_BYTES: Final = 32
_KEY_BYTES: Final = 2 * (8 + 4 + 1) + 3 * _SECTOR_BYTES
"""Of a distinct key: the key read, its slot and status written, by the plan, and all three read by the commit, which
writes a sector of keys, of ranks and of flags."""


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Iterator[Part]:
    del folder
    limit = rig.copy_bytes_per_s()
    cache = HbmCache(config["slots"], policy="lru", device=rig.device)
    resident = _fill(rig, cache, int(config["slots"] * config["fill"]))
    shapes = list(product(config["exponents"], config["hit_shares"]))
    left = [f"exponent {exponent}, {share:.0%} hits" for exponent, share in shapes]
    cases: list[dict[str, Any]] = []
    for exponent, share in shapes:
        cases.append(_measure(rig, cache, resident, exponent, share, config, limit))
        yield _report(cases, left[len(cases) :], len(resident), limit, config)


def _fill(rig: Rig, cache: HbmCache, count: int) -> Tensor:
    """Make the rows 0 to ``count`` resident, but for those whose set is full; keys of these, in random order."""
    keys = torch.arange(count, device=rig.device)
    sets = sets_of(mixed(keys), cache.num_sets).long()
    sets, order = torch.sort(sets)
    sizes = torch.bincount(sets, minlength=cache.num_sets)
    way = torch.arange(count, device=rig.device) - (sizes.cumsum(0) - sizes)[sets]
    slots = sets * WAYS + way
    chosen = (way < WAYS) & (slots < cache.capacity)
    slots, keys = slots[chosen], keys[order[chosen]]
    cache_state = cache._cache_state
    cache_state.keys[slots], cache_state.flags[slots] = keys, RESIDENT
    return keys[torch.randperm(len(keys), generator=rig.generator, device=rig.device)]


def _draw(rig: Rig, resident: Tensor, zipf: Zipf, share: float, count: int) -> Tensor:
    """int64 [count], keys."""
    keys = resident[zipf.ranks(count)]
    misses = torch.rand(count, generator=rig.generator, device=rig.device) >= share
    return torch.where(misses, keys + _ELSEWHERE, keys)


class _Admitting:
    """Steps of admitting batches, the cache before each as it was at first."""

    def __init__(self, cache: HbmCache, batches: list[Tensor]) -> None:
        self._cache = cache
        self._batches = batches
        self._saved = [own.clone() for own in cache._cache_state]
        self.groups: Groups | None = None
        self.plan: Plan | None = None

    def group(self, number: int) -> None:
        self.groups = group(self._batches[number])

    def restore(self, number: int) -> None:
        """The cache as it was, and the batch grouped."""
        self.group(number)
        for own, copy in zip(self._cache._cache_state, self._saved, strict=True):
            own.copy_(copy)

    def admit(self, number: int) -> None:
        del number
        assert self.groups is not None
        self.plan = self._cache.plan(self.groups.distinct, self.groups.num_unique)
        self._cache.commit(self.plan, forced=True)

    def release(self, number: int) -> None:
        del number
        assert self.plan is not None
        self._cache.release(self.plan.slots, changed=False)


def _measure(
    rig: Rig, cache: HbmCache, resident: Tensor, exponent: float, share: float, config: dict[str, Any], limit: float
) -> dict[str, Any]:
    zipf = Zipf(rig, len(resident), exponent)
    count = rounds_of(config["repetitions"])
    steps = _Admitting(cache, [_draw(rig, resident, zipf, share, config["ids"]) for _ in range(count)])
    distinct, sets = _check(cache, steps)
    actions: dict[str, Action] = {"group": steps.group, "plan and commit": steps.admit, "release": steps.release}
    seconds = rig.times(actions, repetitions=config["repetitions"], before={"plan and commit": steps.restore})
    steps.restore(0)
    return {
        "exponent": exponent,
        "hit_share": share,
        "distinct": distinct,
        "steps": {name: asdict(Spread.of(each)) for name, each in seconds.items()},
        "floor_s": {"plan and commit": (sets * _SET_BYTES + distinct * _KEY_BYTES) / limit},
    }


def _check(cache: HbmCache, steps: _Admitting) -> tuple[int, int]:
    """(distinct keys, sets) of the first batch; RuntimeError unless the plan finds the keys that are resident.

    Where there are misses, it may find fewer: one may evict a row before that row's turn.
    """
    steps.restore(0)
    steps.admit(0)
    assert steps.groups is not None
    assert steps.plan is not None
    distinct = int(steps.groups.num_unique)
    keys = steps.groups.distinct[:distinct]
    wanted, hits = int((keys < _ELSEWHERE).sum()), int((steps.plan.statuses[:distinct] == Status.HIT).sum())
    if hits > wanted or (wanted == distinct and hits < wanted):
        raise RuntimeError(f"{hits} keys were found, of {wanted} that are resident")
    steps.release(0)
    return distinct, len(torch.unique(sets_of(mixed(keys), cache.num_sets)))


def _report(cases: list[dict[str, Any]], left: list[str], resident: int, limit: float, config: dict[str, Any]) -> Part:
    return Part(
        tables=[
            Table(
                title=f"{config['ids']:,} ids in a cache of {config['slots']:,} slots, {resident:,} in use",
                columns=["ids", "hits", "distinct", "step", "us", "floor us", "of the floor's rate"],
                rows=[_row(case, step) for case in cases for step in case["steps"]],
            )
        ],
        figures={"copy_bytes_per_s": limit, "resident": resident, "cases": cases},
        notes=[
            "Admitting: ids are grouped (a sort and three kernels), the plan looks at each set of the cache that a "
            f"distinct id falls into, the commit writes it down. Floor: {_SET_BYTES} bytes a set and {_KEY_BYTES} a "
            "distinct id, at the rate of a device copy."
        ],
        left=left,
    )


def _row(case: dict[str, Any], step: str) -> list[str]:
    ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
    median, floor = case["steps"][step]["median"], case["floor_s"].get(step)
    shown = ["", ""] if floor is None else [f"{floor * 1e6:.1f}", f"{floor / median:.2f}"]
    return [ids, f"{case['hit_share']:.0%}", f"{case['distinct']:,}", step, f"{median * 1e6:.1f}", *shown]
