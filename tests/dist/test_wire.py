"""Values in fewer bits between ranks: as exact as the bits allow, and as few bytes."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.dist.ranks import Precision, Ranks, decoded, encoded

from .ranks import run

ROWS, DIM = 500, 64
RELATIVE = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127}
"""Of an element; of int8, of the largest of its row."""


@pytest.mark.parametrize("precision", get_args(Precision))
def test_values_come_back_as_near_as_their_bits_allow(precision: Any) -> None:
    rows = torch.randn(100, DIM, generator=torch.Generator().manual_seed(1)) * 10
    rows[3] = 0
    unit = rows.abs().amax(1, keepdim=True) if precision == "int8" else rows.abs()
    sent = encoded(rows, precision)
    assert len(sent) == len(rows)
    assert ((decoded(sent, precision) - rows).abs() <= unit * RELATIVE[precision] * (1 + 1e-6)).all()
    assert decoded(encoded(rows[:0], precision), precision).shape == (0, DIM)
    assert decoded(encoded(rows[:1, :6], precision), precision).shape == (1, 6)
    rows[5, 7] = torch.nan
    assert decoded(encoded(rows, precision), precision)[5].isnan().any(), "what went wrong stays seen"


def train(precision: Any) -> tuple[Tensor, int]:
    """(results of the last step, bytes sent)."""
    with open_sharded(
        None, cold="memory", ddr="1MiB", forward_precision=precision, backward_precision=precision
    ) as store:
        for name, exchange in (("a", "rows"), ("b", "pooled")):
            config = tierstore.TableConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM)
            store.create_table(config, exchange=exchange)  # type: ignore[arg-type]
        module = ShardedTieredEmbeddingBagCollection(store)
        for step in range(3):
            ids = torch.randint(0, ROWS, (400,), generator=torch.Generator().manual_seed(2 * step + store.ranks.rank))
            out = module(
                tierstore.KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(400, dtype=torch.int64))
            ).values()
            (out - 1).square().sum().backward()
        return out.detach(), store.balance()[store.ranks.rank].traffic.bytes_sent


def test_fewer_bits_are_fewer_bytes_and_nearly_the_same_training(tmp_path: Path) -> None:
    found = {precision: run(train, 2, tmp_path, precision)[0] for precision in get_args(Precision)}
    exact, most = found["fp32"]
    saved = {precision: most - size for precision, (_, size) in found.items()}
    assert saved["bf16"] == saved["fp16"] > most / 3, "two bytes of each value; the rest are ids"
    assert saved["int8"] / saved["bf16"] == (4 - (DIM + 4) / DIM) / 2
    assert all(0 < (found[each][0] - exact).abs().max() < 0.01 for each in ("fp16", "bf16", "int8"))


def carried() -> dict[str, bool]:
    ranks = Ranks()
    return {device: ranks._carries(device) for device in ("cpu", "cuda", "mps")}


def test_gloo_is_given_what_is_on_the_host(tmp_path: Path) -> None:
    assert run(carried, 1, tmp_path) == [{"cpu": True, "cuda": False, "mps": False}]


def refused_without_a_backend_for_the_host() -> str:
    with pytest.raises(ValueError, match="cpu:gloo,cuda:nccl") as told:
        open_sharded(None, group=dist.new_group(backend="cuda:gloo"), cold="memory", ddr="1MiB")
    return str(told.value)


def test_a_group_that_cannot_carry_ids_is_refused_with_the_way_out(tmp_path: Path) -> None:
    assert "no backend for tensors on the CPU" in run(refused_without_a_backend_for_the_host, 1, tmp_path)[0]
