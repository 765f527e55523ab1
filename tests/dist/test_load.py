"""What ``balance`` says of each rank's steps tells the slow rank from those that wait for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, load, open_sharded
from tierstore.dist.load import StepClock, StepTime

from .ranks import run

STEP = StepTime(busy=0.010, exchanging=0.002, ssd=0.001, processor=0.009)


def test_a_step_is_one_with_the_table_that_came_first_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 1_000.0  # set-up, which does not count
    wall_s, processor_s = (lambda: steps * (STEP.busy + STEP.exchanging)), (lambda: steps * STEP.processor)
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=wall_s, process_time=processor_s))
    clock = StepClock(lambda: steps * STEP.exchanging, lambda: steps * STEP.ssd)
    assert clock.mean() == StepTime()
    clock.note_backward("a")
    for factor in (1.0, 2.0):
        for _ in range(5):
            steps += factor
            clock.note_backward("b")
            clock.note_backward("a")
        assert clock.mean() == pytest.approx([factor * each for each in STEP])


def train_at_a_pace() -> list[float]:
    """Each rank's seconds of a step outside of exchanges, where the last rank's clock goes fast."""
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=50, embedding_dim=4))
        module, now = ShardedTieredEmbeddingBagCollection(store), 0.0
        load.time = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now)  # type: ignore[assignment]
        store.ranks.clock._exchanging_s = lambda: 0.0
        batch = tierstore.KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
        for _ in range(5):
            now += 0.5 if store.ranks.rank == 2 else 0.25
            module(batch).values().sum().backward()
        return [each.step.busy for each in store.balance()]


def test_ranks_tell_each_other(tmp_path: Path) -> None:
    assert run(train_at_a_pace, 3, tmp_path) == [[0.25, 0.25, 0.5]] * 3
