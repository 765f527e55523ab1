"""What a GPU would be given for rows that are cached in its memory, and where the host would wait for it."""

import pytest
import torch

from tests.hbm.counting import counting
from tests.hbm.test_pool import STAGED, Below, below, cold, make, read

__all__ = ["below", "cold"]  # fixtures


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_launches_and_waits(below: Below, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    hot = make(below, policy)
    read(hot, range(20))
    resident, new = torch.arange(20).repeat(3), torch.arange(10, 20 + 2 * STAGED)

    def step(keys: torch.Tensor) -> None:
        lease = hot.acquire(hot.group(keys), len(keys))
        assert lease is not None
        lease.release(changed=True)
        count.catch_up()

    with counting(monkeypatch) as count:
        step(resident)
        count.clear()
        step(resident)
        step(resident)
        estimating = ["sketch_estimate", "sketch_count"] if policy == "lfu" else []
        expected = ["mix_keys", "sort", "place_starts", "place_starts", "edit_flags", "plan", "copy_", "commit"]
        assert sorted(count.launches) == sorted((expected + estimating) * 2)
        assert count.waits == ["synchronize"] * 2
        count.clear()
        step(new)
        assert count.waits == ["synchronize"] * 2
        listing = ["sort", "list_keys", "move_rows", "move_rows", "edit_flags"]
        assert sorted(count.launches) == sorted(expected + estimating + listing)
        count.clear()
        step(torch.arange(30, 40))  # over dirty victims
        # The summary; six dirty rows go down by two buffers; the third buffer of rows that go up waits for the first.
        assert hot.counters.evictions == 6
        assert count.waits == ["synchronize"] * (1 + 2 + 1)
    hot.check_integrity()
