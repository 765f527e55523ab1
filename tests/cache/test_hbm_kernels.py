"""The device cache's Triton kernels against their torch twins, to the bit; under Triton's interpreter without CUDA."""

import pytest
import torch

from tierstore.cache import hbm_triton, hbm_twin
from tierstore.cache.flags import DIRTY, LOADING, RESIDENT
from tierstore.cache.hbm_books import PIN, WAYS, Books, Status, mixed, sets_of

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def some_books(generator: torch.Generator, capacity: int, share_pinned: float) -> Books:
    """Books after a while: most slots resident in their sets, some pinned, some dirty."""
    books = Books.empty(capacity, torch.device("cpu"))
    num_sets = len(books.flags) // WAYS
    keys = torch.randperm(4 * capacity, generator=generator)
    for key, own in zip(keys.tolist(), sets_of(mixed(keys), num_sets).tolist(), strict=True):
        free = torch.nonzero(books.flags[own * WAYS : (own + 1) * WAYS] == 0)
        if len(free) > 1:
            slot = own * WAYS + int(free[0])
            books.keys[slot] = key
            books.flags[slot] = RESIDENT
    resident = books.flags == RESIDENT
    draw = torch.rand(len(resident), generator=generator)
    books.flags[resident & (draw < 0.3)] |= DIRTY
    draw = torch.rand(len(resident), generator=generator)
    books.flags[resident & (draw < share_pinned)] += 2 * PIN
    counts = torch.randint(1, 4, (len(resident),), generator=generator)
    books.ranks.copy_((counts << 40) | torch.randperm(len(resident), generator=generator))
    return Books(*(tensor.to(DEVICE) for tensor in books))


@pytest.mark.parametrize("capacity", [32, 70])
@pytest.mark.parametrize("share_pinned", [0.1, 0.95])
@pytest.mark.parametrize("lfu", [False, True])
def test_kernels_are_their_twins(capacity: int, share_pinned: float, lfu: bool) -> None:
    generator = torch.Generator().manual_seed(capacity)
    books = some_books(generator, capacity, share_pinned)
    num_sets = len(books.flags) // WAYS
    keys = torch.randperm(4 * capacity, generator=generator)[: 2 * capacity]
    keys = torch.cat([keys, torch.tensor([-1, 2**63 - 1, -(2**63)])]).to(DEVICE)
    sets = sets_of(mixed(keys), num_sets)
    found = hbm_twin.find(books, keys, sets)
    assert torch.equal(hbm_triton.find(books, keys, sets), found)
    assert (found >= 0).any()
    assert (found < 0).any()
    keys, sets = keys[sets.argsort(stable=True)], sets.sort().values
    some = torch.rand(len(keys), generator=generator).to(DEVICE) < 0.2
    asked = torch.randint(1, 4, (len(keys),), generator=generator).to(DEVICE, torch.int32)
    for taken, counts in ((None, None), (some, None), (None, asked), (some, asked)):
        expected = hbm_twin.plan(books, keys, sets, taken, counts)
        planned = hbm_triton.plan(books, keys, sets, taken, counts)
        assert torch.equal(planned.statuses, expected.statuses)
        assert torch.equal(planned.slots, expected.slots)
        seen = set(expected.statuses.tolist())
        assert Status.HIT in seen
        assert Status.DIRTY_VICTIM in seen
        assert Status.CONFLICT in seen or share_pinned < 0.5
        assert (Status.TAKEN in seen) == (taken is not None)
        assert Status.REFUSED not in seen or counts is not None
        assert Status.REFUSED in seen or counts is None or share_pinned > 0.5
        ours, theirs = (Books(*(tensor.clone() for tensor in books)) for _ in range(2))
        hbm_twin.commit(theirs, keys, expected, 2**33, lfu)
        hbm_triton.commit(ours, keys, expected, 2**33, lfu)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
        assert (theirs.flags & LOADING).any()


def test_no_keys() -> None:
    books = Books.empty(40, DEVICE)
    keys, sets = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.empty(0, dtype=torch.int32, device=DEVICE)
    for kernels in (hbm_twin, hbm_triton):
        assert len(kernels.find(books, keys, sets)) == 0
        plan = kernels.plan(books, keys, sets, None, None)
        kernels.commit(books, keys, plan, 0, False)
    assert not books.ranks.any()


def test_mixing_loses_nothing_and_sets_ascend_with_it() -> None:
    keys = torch.cat([torch.arange(-5000, 5000), torch.arange(5000) << 40])
    mixes = mixed(keys)
    assert len(mixes.unique()) == len(keys) - 1  # 0 is in both
    ordered = sets_of(mixes.sort().values, 37)
    assert torch.equal(ordered, ordered.sort().values)
    counts = torch.bincount(ordered, minlength=37)
    assert len(counts) == 37
    assert counts.min() > len(keys) / 37 * 0.75
