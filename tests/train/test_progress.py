"""What is shown of a run while it goes on and when it has ended."""

import pytest
import torch

from tierstore.pool.stats import Stats, TierStats
from tierstore.train.history import History
from tierstore.train.summary import Summary
from tierstore.train.terminal import Progress

IDLE = Stats(TierStats(), TierStats(unique=4, hits=1, capacity_rows=8, bytes=2048), TierStats(bytes_read=4096))
HOT = IDLE._replace(hbm=TierStats(unique=4, hits=3, capacity_rows=2, bytes=1024))


def test_the_loss_is_the_mean_of_the_last_hundred_in_python_numbers():
    losses = torch.rand(130, generator=torch.Generator().manual_seed(3))
    history = History(lambda: IDLE)
    assert history.loss is None
    for step, loss in enumerate(losses, start=1):
        history.step(1, loss)
        expected = [each.item() for each in losses[max(0, step - 100) : step]]
        assert history.loss == sum(expected) / len(expected)


def test_a_tier_in_device_memory_is_shown_where_there_is_one():
    history = History(lambda: IDLE)
    progress = Progress(history, total_rows=None, done_rows=0)
    history.step(1, torch.tensor(0.25))
    assert progress._describe(IDLE) == "loss 0.2500, DDR hits 25.0 %, from SSD 4.0 KiB"
    assert progress._describe(HOT) == "loss 0.2500, HBM hits 75.0 %, DDR hits 25.0 %, from SSD 4.0 KiB"


@pytest.mark.parametrize(
    ("tiers", "lines"), [(IDLE, []), (HOT, ["HBM      1.0 KiB, capacity 2 rows, 75.0 % hits, on cuda:0"])]
)
def test_a_summary_shows_it_too(tiers, lines):
    summary = Summary(
        store="run", device="cuda:0", version=1, interrupted=False, step=1, epochs=1, rows=1, seconds=1.0,
        samples_per_second=1.0, loss=None, test=None, tiers=tiers, start_bytes=1, end_bytes=1, peak_rss_bytes=1,
        bits=None,
    )  # fmt: skip
    assert [line for line in summary.describe().splitlines() if line.startswith("HBM")] == lines
    assert "DDR      2.0 KiB, capacity 8 rows, 25.0 % hits" in summary.describe().splitlines()
    assert summary.to_dict()["device"] == "cuda:0"
    assert summary.to_dict()["tiers"]["hbm"]["hit_rate"] == tiers.hbm.hit_rate
