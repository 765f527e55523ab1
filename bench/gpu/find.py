"""Finding and grouping a million ids of a cache of ten million slots: time against the bytes that have to move."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tierstore.cache import hbm_twin
from tierstore.cache.flags import RESIDENT
from tierstore.cache.hbm import HbmCache
from tierstore.cache.hbm_books import WAYS, mixed, sets_of
from tierstore.hbm.grouping import group_keys

from ..common import Spread, Table
from .ids import Zipf
from .part import Part
from .rig import Rig, rounds_of

__all__ = ["run"]

_ELSEWHERE: Final = 1 << 50
"""Added to a key, it makes one that is in no cache here."""

# Bytes, as the kernels count them: a key, its set's keys, a sector of flags, a slot.
_FIND_BYTES: Final = 8 + 256 + 4
_SECTOR_BYTES: Final = 32


class _Batch(NamedTuple):
    keys: Tensor
    sets: Tensor


def run(rig: Rig, config: dict[str, Any], folder: Path) -> Iterator[Part]:
    del folder
    limit = rig.copy_bytes_per_s()
    cache = HbmCache(config["slots"], weight_words=0, state_words=0, policy="lru", device=rig.device)
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
    books = cache._books
    books.keys[slots], books.flags[slots] = keys, RESIDENT
    return keys[torch.randperm(len(keys), generator=rig.generator, device=rig.device)]


def _draw(rig: Rig, cache: HbmCache, resident: Tensor, zipf: Zipf, share: float, count: int) -> _Batch:
    keys = resident[zipf.ranks(count)]
    misses = torch.rand(count, generator=rig.generator, device=rig.device) >= share
    keys = torch.where(misses, keys + _ELSEWHERE, keys)
    return _Batch(keys, sets_of(mixed(keys), cache.num_sets))


def _measure(
    rig: Rig, cache: HbmCache, resident: Tensor, exponent: float, share: float, config: dict[str, Any], limit: float
) -> dict[str, Any]:
    zipf = Zipf(rig, len(resident), exponent)
    count = rounds_of(config["repetitions"])
    batches = [_draw(rig, cache, resident, zipf, share, config["ids"]) for _ in range(count)]
    find = _find_kernel(rig)
    found = find(cache._books, batches[0].keys, batches[0].sets)
    hits = float((found >= 0).float().mean())
    if not torch.equal(found, cache.locate(batches[0].keys)) or abs(hits - share) > 0.01 + 10 / config["ids"] ** 0.5:
        raise RuntimeError(f"{hits:.3f} of the ids were found, where {share} are resident")
    steps: dict[str, Callable[[int], object]] = {
        "find, kernel alone": lambda i: find(cache._books, batches[i].keys, batches[i].sets),
        "find": lambda i: cache.locate(batches[i].keys),
        "group": lambda i: group_keys(batches[i].keys),
    }
    seconds = rig.times(steps, repetitions=config["repetitions"])
    floor = config["ids"] * (_FIND_BYTES + share * _SECTOR_BYTES) / limit
    return {
        "exponent": exponent,
        "hit_share": share,
        "distinct": len(torch.unique(batches[0].keys)),
        "steps": {name: asdict(Spread.of(each)) for name, each in seconds.items()},
        "floor_s": {"find, kernel alone": floor, "find": floor},
    }


def _find_kernel(rig: Rig) -> Callable[..., Tensor]:
    if not rig.is_cuda:
        return hbm_twin.find
    from tierstore.cache import hbm_triton

    kernel: Callable[..., Tensor] = hbm_triton.find
    return kernel


def _report(cases: list[dict[str, Any]], left: list[str], resident: int, limit: float, config: dict[str, Any]) -> Part:
    return Part(
        tables=[
            Table(
                title=f"{config['ids']:,} ids in a cache of {config['slots']:,} slots, {resident:,} in use",
                columns=["ids", "hits", "step", "us", "floor us", "of the floor's rate"],
                rows=[_row(case, step) for case in cases for step in case["steps"]],
            )
        ],
        figures={"copy_bytes_per_s": limit, "resident": resident, "cases": cases},
        notes=[
            "Finding: the kernel alone, and with mixing the keys (locate). Floors: the bytes each step must move "
            f"({_FIND_BYTES} an id and {_SECTOR_BYTES} a hit) at the rate of a device copy. Repeated ids are served by "
            "the L2 cache, so that Zipf ids may beat the floor. Grouping sorts all ids."
        ],
        left=left,
    )


def _row(case: dict[str, Any], step: str) -> list[str]:
    ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
    median, floor = case["steps"][step]["median"], case["floor_s"].get(step)
    shown = ["", ""] if floor is None else [f"{floor * 1e6:.1f}", f"{floor / median:.2f}"]
    return [ids, f"{case['hit_share']:.0%}", step, f"{median * 1e6:.1f}", *shown]
