"""The device cache against a model of its sets in dictionaries, through any history of batches."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.base import DIRTY, LOADING, RESIDENT
from tierstore.hbm import launches, twin
from tierstore.hbm.cache import PERIOD, HbmCache, PolicyName
from tierstore.hbm.kernel_types import NUM_STATUSES, PIN, Status, mixed, sets_of

CAPACITY = 40
"""Two sets, the second one of 8 slots."""
KEYS = torch.arange(130)
KEYS = KEYS[mixed(KEYS).argsort()]
SETS = sets_of(mixed(KEYS), 2)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
STALE = 3
"""Keys behind those of a batch, which are nobody's."""


@dataclass
class Row:
    count: int
    stamp: int
    pins: int = 0
    is_dirty: bool = False

    def rank(self, policy: PolicyName) -> tuple[int, int]:
        return (self.count, self.stamp) if policy == "lfu" else (0, self.stamp)


class Model:
    """Rows of the two sets, by key."""

    def __init__(self, policy: PolicyName) -> None:
        self.policy = policy
        self.sets: list[dict[int, Row]] = [{}, {}]
        self.clock = 0

    def plan(self, keys: list[int], own: list[int], taken: set[int]) -> list[Status]:
        planned = [dict(rows) for rows in self.sets]
        busy: set[int] = set()
        statuses = []
        for key, which in zip(keys, own, strict=True):
            rows = planned[which]
            idle = [each for each in rows if each not in busy and not rows[each].pins]
            victim = min(idle, key=lambda each: rows[each].rank(self.policy), default=-1)
            if key in taken:
                status = Status.TAKEN
            elif key in rows:
                status = Status.HIT
            elif len(rows) < (32, 8)[which]:
                status = Status.FREE_SLOT
            elif victim < 0:
                status = Status.CONFLICT
            else:
                status = Status.DIRTY_VICTIM if rows[victim].is_dirty else Status.CLEAN_VICTIM
                del rows[victim]
            statuses.append(status)
            if status < Status.CONFLICT and status != Status.TAKEN:
                busy.add(key)
                rows.setdefault(key, Row(0, 0))
        self.planned = planned
        return statuses

    def commit(self, keys: list[int], own: list[int], statuses: list[Status]) -> None:
        old, self.sets = self.sets, self.planned
        for number, (key, which, status) in enumerate(zip(keys, own, statuses, strict=True)):
            if key in self.sets[which] and status < Status.CONFLICT and status != Status.TAKEN:
                row = old[which][key] if status == Status.HIT else Row(0, 0)
                row.count, row.stamp, row.pins = row.count + 1, self.clock + 1 + number, row.pins + 1
                self.sets[which][key] = row
        self.clock += len(keys)

    @property
    def rows(self) -> dict[int, Row]:
        return self.sets[0] | self.sets[1]


steps = st.tuples(
    st.sets(st.integers(0, len(KEYS) - 1), min_size=1, max_size=50).map(sorted),
    st.sampled_from(["fill", "fill and change", "keep", "age", "clear"]),
    st.randoms(use_true_random=False),
)


Script = list[tuple[list[int], str, object]]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(script=st.lists(steps, max_size=12))
def test_any_history(policy: PolicyName, script: Script) -> None:
    check_history(twin, policy, script)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@settings(max_examples=settings.default.max_examples // 10)  # of Triton's interpreter each takes seconds
@given(script=st.lists(steps, min_size=2, max_size=4))
def test_any_history_in_triton(policy: PolicyName, script: Script) -> None:
    check_history(launches, policy, script)


def check_history(kernels: ModuleType, policy: PolicyName, script: Script) -> None:
    device = DEVICE
    cache = HbmCache(CAPACITY, policy=policy, device=device)
    cache._kernels = kernels
    model, kept = Model(policy), []
    for places, action, random in script:
        keys, sets = KEYS[places], SETS[places]
        listed, own = keys.tolist(), sets.tolist()
        taken = {key for key in listed if key not in model.rows and random.random() < 0.1}  # type: ignore[attr-defined]
        lying = [CAPACITY + number if key in taken else -1 for number, key in enumerate(listed)]
        padded = torch.cat([keys, KEYS[:STALE]]).to(device)
        plan = cache.plan(
            padded, torch.tensor([len(keys)], dtype=torch.int32, device=device),
            lying=torch.tensor(lying + [CAPACITY] * STALE, dtype=torch.int32, device=device) if taken else None,
        )  # fmt: skip
        statuses = model.plan(listed, own, taken)
        assert plan.statuses.tolist() == statuses + [Status.NO_KEY] * STALE
        assert plan.summary.sum(0).tolist() == [statuses.count(each) for each in range(NUM_STATUSES)]
        before = [tensor.clone() for tensor in cache._cache_state]
        cache.commit(plan)
        is_done = max(statuses) < Status.DIRTY_VICTIM
        assert is_done or all(map(torch.equal, before, cache._cache_state))
        leaving = plan.slots[plan.statuses == Status.DIRTY_VICTIM]
        assert all(model.rows[key].is_dirty for key in cache.keys_at(leaving).tolist() if key in model.rows)
        if not is_done:
            model.clock += len(padded)
            cache.clean(leaving)
            cache.commit(plan, forced=True)
        model.commit(listed, own, statuses)
        model.clock += STALE
        assert plan.slots[plan.statuses == Status.TAKEN].tolist() == [each for each in lying if each >= 0]
        slots = plan.slots[(plan.slots >= 0) & (plan.statuses != Status.TAKEN)]
        assert len(set(slots.tolist())) == len(slots)
        rows = [model.rows[key] for key in cache.keys_at(slots).tolist()]
        cache.settle(plan.slots)
        if action == "keep":
            kept.append((slots, rows))
        else:
            beyond = torch.tensor([CAPACITY, CAPACITY + 30], dtype=torch.int32, device=device)
            cache.release(torch.cat([plan.slots, beyond]), changed=action == "fill and change")
            for row in rows:
                row.pins -= 1
                row.is_dirty |= action == "fill and change"
        if len(kept) > 1:
            slots, rows = kept.pop(0)
            cache.release(slots, changed=False)
            for row in rows:
                row.pins -= 1
        if action == "age" and policy == "lfu":
            cache.age()
            for row in model.rows.values():
                row.count = max(row.count // 2, 1)
        if action == "clear":
            cache.clear()
            model.sets = [{k: row for k, row in each.items() if row.pins or row.is_dirty} for each in model.sets]
        cache.check_integrity()
        found = cache.locate(KEYS.to(device)).cpu()
        assert set(KEYS[found >= 0].tolist()) == model.rows.keys()
        assert torch.equal(cache.keys_at(found[found >= 0].to(device)).cpu(), KEYS[found >= 0])
        assert {*cache.keys_at(cache.slots_with(DIRTY)).tolist()} == {
            k for k, row in model.rows.items() if row.is_dirty
        }
        assert cache.num_pinned == sum(row.pins > 0 for row in model.rows.values())
        assert len(cache.slots_with(RESIDENT)) == len(model.rows)


@pytest.mark.parametrize("kernels", [twin, launches])
@pytest.mark.parametrize("size", [0, 1, 257, 300])
def test_keys_are_found_and_flags_edited_by_several_programs(kernels: Any, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    known, asked = torch.randperm(600, generator=generator)[:300], torch.randint(0, 600, (size,), generator=generator)
    ordered, order = torch.sort(torch.cat([known, torch.tensor([-1, -1])]).to(DEVICE))
    found = kernels.find_sorted(ordered, order, asked.to(DEVICE), 9)
    places = {key: place + 9 for place, key in enumerate(known.tolist())}
    assert found.dtype == torch.int32
    assert found.tolist() == [places.get(key, -1) for key in asked.tolist()]
    before = torch.randint(PIN, 4 * PIN, (320,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(310, generator=generator)[:size].to(torch.int32) - 5
    is_slot = (slots >= 0) & (slots < 290)
    for unpin, keep, add in ((True, -1, DIRTY), (False, ~DIRTY, 0), (True, ~LOADING, 0)):
        flags, expected = before.to(DEVICE, copy=True), before.clone()
        expected[slots[is_slot].long()] = (expected[slots[is_slot].long()] - PIN * unpin) & keep | add
        kernels.edit_flags(flags, slots.to(DEVICE), 290, unpin=unpin, keep=keep, add=add)
        assert torch.equal(flags.cpu(), expected)


def test_counts_are_halved_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    halved: list[int] = []
    monkeypatch.setattr(HbmCache, "age", lambda own: halved.append(own._clock))
    cache = HbmCache(2, policy="lfu", device=DEVICE)
    for _ in range(3 * PERIOD):
        plan = cache.plan(KEYS[:1].to(DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE))
        cache.commit(plan)
        cache.settle(plan.slots)
        cache.release(plan.slots, changed=False)
    assert halved == [2 * PERIOD]
