"""The device cache against a model of its sets in dictionaries, through any history of batches."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.cache.base import DIRTY, LOADING, RESIDENT
from tierstore.hbm.books import Status, mixed, sets_of
from tierstore.hbm.cache import HbmCache, PolicyName

CAPACITY = 40
"""Two sets, the second one of 8 slots."""
KEYS = torch.arange(130)
KEYS = KEYS[mixed(KEYS).argsort()]
SETS = sets_of(mixed(KEYS), 2)
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

    def plan(self, keys: list[int], own: list[int], asked: list[int] | None, taken: set[int]) -> list[Status]:
        planned = [dict(rows) for rows in self.sets]
        busy: set[int] = set()
        statuses = []
        for number, (key, which) in enumerate(zip(keys, own, strict=True)):
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
            elif asked is not None and asked[number] < rows[victim].count:
                status = Status.REFUSED
            else:
                status = Status.DIRTY_VICTIM if rows[victim].is_dirty else Status.CLEAN_VICTIM
                del rows[victim]
            statuses.append(status)
            if status < Status.CONFLICT and status != Status.TAKEN:
                busy.add(key)
                rows.setdefault(key, Row(0, 0))
        self.planned = planned
        return statuses

    def commit(self, keys: list[int], own: list[int], asked: list[int] | None, statuses: list[Status]) -> None:
        old, self.sets = self.sets, self.planned
        for number, (key, which, status) in enumerate(zip(keys, own, statuses, strict=True)):
            if key in self.sets[which] and status < Status.CONFLICT and status != Status.TAKEN:
                row = old[which][key] if status == Status.HIT else Row(0 if asked is None else asked[number] - 1, 0)
                row.count, row.stamp, row.pins = row.count + 1, self.clock + 1 + number, row.pins + 1
                self.sets[which][key] = row
        self.clock += len(keys)

    @property
    def rows(self) -> dict[int, Row]:
        return self.sets[0] | self.sets[1]


devices = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
steps = st.tuples(
    st.sets(st.integers(0, len(KEYS) - 1), min_size=1, max_size=50).map(sorted),
    st.sampled_from(["fill", "fill and change", "keep", "give up", "age", "clear"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)


@pytest.mark.parametrize("device", devices)
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@given(script=st.lists(steps, max_size=12))
def test_any_history(policy: PolicyName, device: str, script: list[tuple[list[int], str, bool, object]]) -> None:
    cache = HbmCache(CAPACITY, weight_words=1, state_words=0, policy=policy, device=torch.device(device))
    model, kept = Model(policy), []
    for places, action, is_asked, random in script:
        keys, sets = KEYS[places], SETS[places]
        listed, own = keys.tolist(), sets.tolist()
        asked = [random.randint(1, 3) for _ in listed] if is_asked and policy == "lfu" else None  # type: ignore[attr-defined]
        taken = {key for key in listed if key not in model.rows and random.random() < 0.1}  # type: ignore[attr-defined]
        lying = [CAPACITY + number if key in taken else -1 for number, key in enumerate(listed)]
        padded = torch.cat([keys, KEYS[:STALE]]).to(device)
        plan = cache.plan(
            padded, torch.tensor([len(keys)], dtype=torch.int32, device=device),
            lying=torch.tensor(lying + [CAPACITY] * STALE, dtype=torch.int32, device=device) if taken else None,
            counts=None if asked is None else torch.tensor(asked + [0] * STALE, dtype=torch.int32, device=device),
        )  # fmt: skip
        statuses = model.plan(listed, own, asked, taken)
        assert plan.statuses.tolist() == statuses + [Status.NO_KEY] * STALE
        assert plan.summary.sum(0).tolist() == [statuses.count(each) for each in Status]
        before = [tensor.clone() for tensor in cache._books]
        cache.commit(plan)
        is_done = max(statuses) < Status.DIRTY_VICTIM
        assert is_done or all(map(torch.equal, before, cache._books))
        leaving = plan.slots[plan.statuses == Status.DIRTY_VICTIM]
        assert all(model.rows[key].is_dirty for key in cache.keys_at(leaving).tolist() if key in model.rows)
        if not is_done:
            model.clock += len(padded)
            cache.clean(leaving)
            cache.commit(plan, forced=True)
        model.commit(listed, own, asked, statuses)
        model.clock += STALE
        assert plan.slots[plan.statuses == Status.TAKEN].tolist() == [each for each in lying if each >= 0]
        slots = plan.slots[(plan.slots >= 0) & (plan.statuses != Status.TAKEN)]
        assert len(set(slots.tolist())) == len(slots)
        rows = [model.rows[key] for key in cache.keys_at(slots).tolist()]
        if action == "give up":
            entered = cache.keys_at(slots[torch.isin(slots, cache.slots_with(LOADING))]).tolist()
            cache.drop_loading(plan.slots)
            model.sets = [{key: row for key, row in each.items() if key not in entered} for each in model.sets]
        else:
            cache.settle(plan.slots)
        if action == "keep":
            kept.append((slots, rows))
        else:
            if action != "give up":
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


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda books: books.keys.copy_(books.keys.flip(0)), "outside their set"),
        (lambda books: books.ranks.fill_(3), "ranks twice"),
        (lambda books: books.ranks.add_(1 << 30), "used later than the clock"),
        (lambda books: books.flags[0].fill_(DIRTY), "free slots with flags"),
        (lambda books: books.flags[:2].fill_(RESIDENT | LOADING), "loading unpinned"),
        (lambda books: books.flags[-1].fill_(0), "beyond the capacity"),
    ],
)
def test_check_integrity_sees_damage(damage: object, law: str) -> None:
    cache = HbmCache(CAPACITY, weight_words=0, state_words=0, policy="lru", device=torch.device("cpu"))
    cache.commit(cache.plan(KEYS, torch.tensor([len(KEYS)], dtype=torch.int32)), forced=True)
    cache.check_integrity()
    damage(cache._books)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=rf"'[^']*{law}[^']*': [1-9]"):
        cache.check_integrity()


def test_every_tensor_is_counted() -> None:
    cache = HbmCache(70, weight_words=3, state_words=2, policy="lru", device=torch.device("cpu"), extra_rows=5)
    tensors = [each for each in vars(cache).values() if isinstance(each, torch.Tensor)]
    storages = {each.data_ptr(): each for each in (own.untyped_storage() for own in (*tensors, *cache._books))}
    assert cache.size_bytes == sum(each.nbytes() for each in storages.values())
