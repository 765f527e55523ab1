"""The history of a run: true totals at some of its steps, in bounded memory."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.pool.stats import Stats, TierStats
from tierstore.train import train, trainer
from tierstore.train.history import RANGES_MAX, History, Point, together

from .runs import TRAIN_ROWS, config_of

COUNTED = ("hbm_hits", "hbm_unique", "ddr_hits", "ddr_unique", "bytes_read", "bytes_written")


def stats_of(hbm_hits, hbm_unique, ddr_hits, ddr_unique, bytes_read, bytes_written):
    return Stats(
        TierStats(hits=hbm_hits, unique=hbm_unique),
        TierStats(hits=ddr_hits, unique=ddr_unique),
        TierStats(bytes_read=bytes_read, bytes_written=bytes_written),
    )


@settings(max_examples=15)
@given(st.one_of(st.integers(0, 2 * RANGES_MAX + 2), st.integers(0, 2000)), st.integers(0, 10**9), st.integers(0, 99))
def test_every_point_holds_the_totals_of_its_step_and_neighbours_merge_when_there_are_too_many(num_steps, begin, seed):
    random = np.random.default_rng(seed)
    totals = random.integers(0, 2**40, (num_steps + 2, 6)).cumsum(axis=0).tolist()
    samples, losses = random.integers(1, 512, num_steps).tolist(), random.random(num_steps, dtype=np.float32)
    done = 0
    history = History(lambda: stats_of(*totals[done]), step=begin)
    for each, loss in zip(samples, losses, strict=True):
        done += 1
        history.step(each, torch.tensor(loss))
    done += 1  # a last commit
    history.close()
    points = history.points()
    assert (points[0].step, points[-1].step, points[0].samples) == (begin, begin + num_steps, 0)
    for point in points:
        done = point.step - begin
        row = totals[-1] if done == num_steps else totals[done]
        assert [getattr(point, name) for name in COUNTED] == [a - b for a, b in zip(row, totals[0], strict=True)]
        assert point.samples == sum(samples[:done])
        assert point.loss_sum == pytest.approx(losses[:done].sum(dtype=np.float64), rel=1e-12)
    *widths, last = [b.step - a.step for a, b in pairwise(points)] or [0]
    assert len(set(widths)) <= 1
    assert last <= max(widths, default=1)
    assert min(num_steps, RANGES_MAX // 2) <= len(points) - 1 <= RANGES_MAX
    assert all(a.seconds <= b.seconds for a, b in pairwise(points))


def test_of_ranks_the_tiers_add_up_and_the_steps_are_the_same():
    one, two = ([Point(4, 9, seconds, 2.5, 1, 2, 3, 4, 5, 6)] for seconds in (0.5, 0.75))
    assert together([one, two]) == (Point(4, 9, 0.5, 2.5, 2, 4, 6, 8, 10, 12),)


def test_a_run_adds_up_to_its_summary_and_one_that_resumes_says_where(tmp_path, monkeypatch):
    losses, real = [], trainer.train_step

    def step(*arguments):
        loss, stop = real(*arguments)
        losses.append(loss.item())
        return loss, stop or len(losses) == 7

    monkeypatch.setattr(trainer, "train_step", step)
    config = config_of(tmp_path, "run", store__ddr=424_000, train__commit_every=3)
    for begin, resume in ((0, False), (7, True)):
        run = train(config, resume=resume)
        first, *_, last = run.history
        assert (first.step, last.step, last.samples) == (begin, run.step, run.rows)
        assert (last.ddr_hits, last.ddr_unique) == (run.tiers.ddr.hits, run.tiers.ddr.unique)
        assert (last.bytes_read, last.bytes_written) == (run.tiers.ssd.bytes_read, run.tiers.ssd.bytes_written)
        assert last.bytes_written > 0
        assert [b.loss_sum - a.loss_sum for a, b in pairwise(run.history)] == pytest.approx(losses[begin:])
    assert run.rows < 2 * TRAIN_ROWS
    whole = train(config, resume=True)
    assert [point.step for point in whole.history] == [run.step]
    assert whole.rows == 0
