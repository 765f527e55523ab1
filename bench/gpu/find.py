"""Finding a million ids in a cache of ten million slots: time against the bytes that have to move."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tierstore.cache import hbm_twin
from tierstore.cache.flags import RESIDENT
from tierstore.cache.hbm import HbmCache
from tierstore.cache.hbm_books import Plan, mixed, sets_of
from tierstore.hbm.grouping import Grouping, group

from ..common import Spread, Table
from .ids import Zipf
from .part import Part
from .rig import Rig

__all__ = ["run"]

_FILL_KEYS: Final = 1_000_000
_ELSEWHERE: Final = 1 << 50
"""Added to a key, it makes one that is in no cache here."""

# Bytes, as the kernels count them: a key, its set's keys, a sector of flags, a slot.
_FIND_BYTES: Final = 8 + 256 + 4
_SECTOR_BYTES: Final = 32
_PLAN_SET_BYTES: Final = 640
_PLAN_KEY_BYTES: Final = 8 + 4 + 4 + 1
"""Key and set read; slot and status written."""
_COMMIT_KEY_BYTES: Final = 8 + 4 + 1 + 3 * _SECTOR_BYTES
"""Key, slot and status read; a sector of keys, of ranks and of flags written."""


class _Batch(NamedTuple):
    keys: Tensor
    sets: Tensor
    grouping: Grouping


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Part:
    del folder
    limit = rig.copy_bytes_per_s()
    cache = HbmCache(config["slots"], weight_words=0, state_words=0, policy="lru", device=rig.device)
    resident = _fill(rig, cache, int(config["slots"] * config["fill"]))
    cases = [
        _measure(rig, cache, resident, exponent, share, config, limit)
        for exponent in config["exponents"]
        for share in config["hit_shares"]
    ]
    columns = ["ids", "hits", "step", "us", "floor us", "of the floor's rate"]
    return Part(
        tables=[
            Table(
                title=f"{config['ids']:,} ids in a cache of {config['slots']:,} slots, {len(resident):,} in use",
                columns=columns,
                rows=[_row(case, step) for case in cases for step in case["steps"]],
            )
        ],
        figures={"copy_bytes_per_s": limit, "resident": len(resident), "cases": cases},
        notes=[
            "Finding: the kernel alone, and with mixing the keys (locate). Floors: the bytes each step must move "
            f"(finding: {_FIND_BYTES} an id and {_SECTOR_BYTES} a hit) at the rate of a device copy. Repeated ids are "
            "served by the L2 cache, so that Zipf ids may beat the floor. Grouping sorts all ids and waits for the "
            "host once; plan and commit are of the distinct ids, as a batch is admitted."
        ],
    )


def _fill(rig: Rig, cache: HbmCache, count: int) -> Tensor:
    """Admit that many rows; keys of those that are resident then, in random order."""
    for start in range(0, count, _FILL_KEYS):
        keys = torch.arange(start, min(start + _FILL_KEYS, count), device=rig.device)
        grouping = group(keys, cache.num_sets)
        _admit(cache, grouping)
    keys = cache.keys_at(cache.slots_with(RESIDENT).long())
    return keys[torch.randperm(len(keys), generator=rig.generator, device=rig.device)]


def _admit(cache: HbmCache, grouping: Grouping) -> None:
    plan = cache.plan(grouping.keys, grouping.sets)
    cache.commit(grouping.keys, plan)
    slots = plan.slots[plan.slots >= 0]
    cache.settle(slots)
    cache.release(slots, changed=False)


def _draw(rig: Rig, cache: HbmCache, resident: Tensor, zipf: Zipf, share: float, count: int) -> _Batch:
    keys = resident[zipf.ranks(count)]
    misses = torch.rand(count, generator=rig.generator, device=rig.device) >= share
    keys = torch.where(misses, keys + _ELSEWHERE, keys)
    grouping = group(keys, cache.num_sets)
    return _Batch(keys, sets_of(mixed(keys), cache.num_sets), grouping)


def _measure(
    rig: Rig, cache: HbmCache, resident: Tensor, exponent: float, share: float, config: dict[str, Any], limit: float
) -> dict[str, Any]:
    zipf = Zipf(rig, len(resident), exponent)
    batches = [_draw(rig, cache, resident, zipf, share, config["ids"]) for _ in range(config["batches"])]
    find = _find_kernel(rig)
    found = find(cache._books, batches[0].keys, batches[0].sets)
    hits = float((found >= 0).float().mean())
    if not torch.equal(found, cache.locate(batches[0].keys)) or abs(hits - share) > 0.01 + 10 / config["ids"] ** 0.5:
        raise RuntimeError(f"{hits:.3f} of the ids were found, where {share} are resident")
    of = batches.__getitem__
    count = len(batches)
    steps: dict[str, Callable[[int], object]] = {
        "find, kernel alone": lambda i: find(cache._books, of(i % count).keys, of(i % count).sets),
        "find": lambda i: cache.locate(of(i % count).keys),
        "group": lambda i: group(of(i % count).keys, cache.num_sets),
        "plan": lambda i: cache.plan(of(i % count).grouping.keys, of(i % count).grouping.sets),
    }
    seconds = rig.times(steps, repetitions=config["repetitions"])
    seconds["commit"] = _commit_seconds(rig, cache, batches, config["repetitions"])
    distinct = len(batches[0].grouping.keys)
    sets = len(torch.unique_consecutive(batches[0].grouping.sets))
    find_bytes = config["ids"] * (_FIND_BYTES + share * _SECTOR_BYTES)
    floors = {
        "find, kernel alone": find_bytes,
        "find": find_bytes,
        "plan": sets * _PLAN_SET_BYTES + distinct * _PLAN_KEY_BYTES,
        "commit": distinct * _COMMIT_KEY_BYTES,
    }
    return {
        "exponent": exponent,
        "hit_share": share,
        "distinct": distinct,
        "steps": {name: asdict(Spread.of(each)) for name, each in seconds.items()},
        "floor_s": {name: size / limit for name, size in floors.items()},
    }


def _commit_seconds(rig: Rig, cache: HbmCache, batches: list[_Batch], repetitions: int) -> list[float]:
    """Each commit of a plan of its own, on the cache as it was; so it is left, too."""
    saved = [own.clone() for own in cache._books]
    plans: list[Plan] = []

    def prepare(number: int) -> None:
        for own, copy in zip(cache._books, saved, strict=True):
            own.copy_(copy)
        batch = batches[number % len(batches)]
        plans[:] = [cache.plan(batch.grouping.keys, batch.grouping.sets)]

    def commit(number: int) -> None:
        keys = batches[number % len(batches)].grouping.keys
        cache.commit(keys, plans[0])

    seconds = rig.times({"commit": commit}, repetitions=repetitions, before={"commit": prepare})["commit"]
    prepare(0)
    return seconds


def _find_kernel(rig: Rig) -> Callable[..., Tensor]:
    if not rig.is_cuda:
        return hbm_twin.find
    from tierstore.cache import hbm_triton

    kernel: Callable[..., Tensor] = hbm_triton.find
    return kernel


def _row(case: dict[str, Any], step: str) -> list[str]:
    ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
    median, floor = case["steps"][step]["median"], case["floor_s"].get(step)
    shown = ["", ""] if floor is None else [f"{floor * 1e6:.1f}", f"{floor / median:.2f}"]
    return [ids, f"{case['hit_share']:.0%}", step, f"{median * 1e6:.1f}", *shown]
