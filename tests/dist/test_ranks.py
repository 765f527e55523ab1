"""What crosses between ranks: values in fewer bits, and counted bytes; and what tells the slow rank from others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, load, open_sharded
from tierstore.dist.load import StepClock, StepTime
from tierstore.dist.ranks import Precision, decoded, encoded

from .ranks import run

ROWS, WIDE = 300, 64
RELATIVE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127}
"""Of an element; of int8, of the largest of its row."""


@pytest.mark.parametrize("precision", get_args(Precision))
def test_values_come_back_as_near_as_their_bits_allow(precision: Any) -> None:
    rows = torch.randn(100, WIDE, generator=torch.Generator().manual_seed(1)) * 10
    rows[3] = 0
    unit = rows.abs().amax(1, keepdim=True) if precision == "int8" else rows.abs()
    sent = encoded(rows, precision)
    assert len(sent) == len(rows)
    assert ((decoded(sent, precision) - rows).abs() <= unit * RELATIVE[precision] * (1 + 1e-6)).all()
    assert decoded(encoded(rows[:0], precision), precision).shape == (0, WIDE)
    rows[5, 7] = torch.nan
    assert decoded(encoded(rows, precision), precision)[5].isnan().any(), "what went wrong stays seen"


def train_in_each() -> dict[str, tuple[Tensor, int]]:
    """By precision (results of the last step, bytes sent)."""
    found = {}
    for precision in get_args(Precision):
        wire = {"forward_precision": precision, "backward_precision": precision}
        with open_sharded(None, cold="memory", ddr="1MiB", **wire) as store:
            for name, exchange in (("a", "rows"), ("b", "pooled")):
                config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=WIDE)
                store.create_table(config, exchange=exchange)  # type: ignore[arg-type]
            module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
            for step in range(3):
                ids = torch.randint(0, ROWS, (400,), generator=torch.Generator().manual_seed(2 * step + rank))
                ones = torch.ones(400, dtype=torch.int64)
                out = module(tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=ones)).values()
                (out - 1).square().sum().backward()
            found[precision] = out.detach(), store.balance()[rank].traffic.bytes_sent
    return found


def test_fewer_bits_are_fewer_bytes_and_nearly_the_same_training(tmp_path: Path) -> None:
    found = run(train_in_each, 2, tmp_path)[0]
    exact, most = found["fp32"]
    saved = {precision: most - size for precision, (_, size) in found.items()}
    assert saved["bf16"] == saved["fp16"] > most / 3, "two bytes of each value; the rest are ids"
    assert saved["int8"] / saved["bf16"] == (4 - (WIDE + 4) / WIDE) / 2
    assert all(0 < (found[each][0] - exact).abs().max() < 0.01 for each in ("fp16", "bf16", "int8"))


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


def test_ranks_tell_each_other_their_steps_times(tmp_path: Path) -> None:
    assert run(train_at_a_pace, 3, tmp_path) == [[0.25, 0.25, 0.5]] * 3
