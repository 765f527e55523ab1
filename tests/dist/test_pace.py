"""A slow rank is named, with what it spends its time on."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.dist.pace import WINDOW, Pace, StepTime

from .ranks import run

STEP = StepTime(busy=0.010, exchanging=0.002, ssd=0.001, processor=0.009)
SLOW = {
    "reads and writes SSD": STEP._replace(busy=0.020, ssd=0.011),
    "computes": STEP._replace(busy=0.020, processor=0.019),
    "waits": STEP._replace(busy=0.020),
    "": STEP._replace(busy=0.014),
}


class Clock:
    """Seconds that a rank has spent, by what; a step adds to them."""

    def __init__(self, step: StepTime) -> None:
        self.step, self.steps = step, 0

    def pace(self) -> Pace:
        def of(*names: str) -> Callable[[], float]:
            return lambda: self.steps * sum(getattr(self.step, name) for name in names)

        return Pace(of("exchanging"), of("ssd"), of("busy", "exchanging"), of("processor"))


def told_by(paces: list[Pace]) -> tuple[list[int], list[list[int]]]:
    windows, *times = map(list, zip(*(each.report for each in paces), strict=True))
    return windows, times


@pytest.mark.parametrize("cause", SLOW)
def test_a_slow_rank_is_named_once_a_window_with_its_cause(cause: str, caplog: pytest.LogCaptureFixture) -> None:
    clocks = [Clock(STEP), Clock(SLOW[cause])]
    paces = [clock.pace() for clock in clocks]
    with caplog.at_level(logging.WARNING, logger="tierstore"):
        for step in range(2 * WINDOW + 5):
            for clock, pace in zip(clocks, paces, strict=True):
                clock.steps += 1
                pace.note_backward("a")
                pace.note_backward("b")
            for _, (rank, pace) in itertools.product(range(2), enumerate(paces)):
                pace.note(*told_by(paces), rank, [4, 6])
            assert len(caplog.records) == step // WINDOW * bool(cause)
    assert all("rank 6 is slow" in each and cause in each for each in caplog.messages)
    for clock, pace in zip(clocks, paces, strict=True):
        assert pace.recent() == pytest.approx(clock.step)


def test_windows_that_ranks_have_not_all_ended_are_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    slow, fast = Clock(SLOW["waits"]), Clock(STEP)
    paces = [slow.pace(), fast.pace()]
    for _ in range(WINDOW + 1):
        slow.steps += 1
        paces[0].note_backward("a")
    paces[0].note(*told_by(paces), 0, range(2))
    assert not caplog.records


def train_at_a_pace() -> tuple[list[str], list[float]]:
    """(warnings; each rank's seconds of a step outside of exchanges), where the last rank's clock goes fast."""
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1) as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=50, embedding_dim=4))
        module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
        now, messages = 0.0, list[str]()
        of_rank = store.ranks.pace = store._pace = Pace(lambda: 0.0, lambda: 0.0, lambda: now, lambda: now)
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("tierstore").addHandler(handler)
        batch = tierstore.KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
        for _ in range(2 * WINDOW + 2):
            module(batch).values().sum().backward()
            now += 0.5 if rank == 2 else 0.25
        seconds = 0.5 if rank == 2 else 0.25
        assert of_rank.recent() == StepTime(busy=seconds, processor=seconds)
        return messages, [each.step.busy for each in store.balance()]


def test_ranks_tell_each_other_in_exchanges_that_there_are_anyway(tmp_path: Path) -> None:
    found = run(train_at_a_pace, 3, tmp_path)
    assert [each[1] for each in found] == [[0.25, 0.25, 0.5]] * 3
    assert [len(each[0]) for each in found] == [2, 0, 0], "once a window, by rank 0"
    assert "rank 2 is slow" in found[0][0][0]
    assert "computes" in found[0][0][0]


def test_set_up_before_the_first_step_does_not_count() -> None:
    clock = Clock(STEP)
    pace = clock.pace()
    clock.steps += 1_000
    for _ in range(WINDOW + 1):
        pace.note_backward("a")
        clock.steps += 1
    assert pace.recent() == pytest.approx(STEP)
