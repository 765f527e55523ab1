"""Whatever the streams' speeds, no row is overwritten, moved or read before it may be; and the bits are the same."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.hbm import tracing
from tests.hbm.stores import few_slots
from tierstore import optim
from tierstore.hbm import base, cache, launches
from tierstore.store import arguments

ROWS, DIM, STEPS = 600, 4, 10


def train(
    directory: Path, *, depth: int = 2, rows: int = ROWS, steps: int = STEPS, ids: Any = None, **settings: Any
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    config = tierstore.TableConfig(
        name="t", num_embeddings=rows // 6 if ids else rows, embedding_dim=DIM, ids=ids,
        init=tierstore.init.Uniform(-1, 1), optimizer=optim.RowWiseAdagrad(lr=0.1),
    )  # fmt: skip
    with tierstore.open(directory, ddr="2MiB", **settings) as store:
        bag = tierstore.TieredEmbeddingBag(store.create_table(config), mode="sum")
        batches = [((torch.rand(24, 3, generator=generator) ** 2) * rows).long() for _ in range(steps)]
        for number, batch in enumerate(tierstore.prefetch(batches, bag, depth=depth, features=lambda ids: ids)):
            out = bag(batch)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            if number == steps // 2:
                store.commit()
        return store["t"].read(torch.arange(rows))


@pytest.mark.parametrize("hbm", ["8KiB", "64KiB"])
def test_uses_of_a_row_are_ordered_with_dynamic_ids(tmp_path, monkeypatch, hbm):
    """Without them, ``test_bits.py`` has it."""
    trace = tracing.install(monkeypatch, 0)
    with few_slots(40) if hbm == "8KiB" else contextlib.nullcontext():
        train(tmp_path / "store", hbm=hbm, ids=tierstore.DynamicIds())
    assert (trace.problems, trace.num_accesses > 1000) == ([], True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled for a CUDA device")
@pytest.mark.parametrize(("policy", "budget", "is_there"), [("lfu", "12KiB", True), ("lru", "64KiB", False)])
def test_training_with_triton_kernels(tmp_path, monkeypatch, policy, budget, is_there):
    expected = train(tmp_path / "plain", depth=0, rows=200, steps=2)
    for module in (base, cache):
        monkeypatch.setattr(module, "kernels_of", lambda _: launches)
    monkeypatch.setattr(arguments, "is_there", lambda *_: is_there)
    assert torch.equal(train(tmp_path / policy, depth=0, rows=200, steps=2, hbm=budget, policy=policy), expected)
