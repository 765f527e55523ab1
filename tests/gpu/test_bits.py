"""Training with rows in device memory ends in the bits of training on the CPU without: on a GPU, and by the twins."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from tests.test_exact import OPTIMIZERS
from tierstore import optim

from .support import (
    DEVICES,
    ROWS,
    TINY,
    WHOLE,
    Delays,
    assert_same,
    make_batches,
    make_late,
    make_tables,
    read_all,
    train,
    train_on,
)

STEPS = 6
SETTINGS: list[dict[str, Any]] = [
    {"hbm": WHOLE if depth % 2 else TINY, "depth": depth, "policy": "lfu" if depth % 3 == 2 else "lru"}
    for depth in range(9)
]


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda rule: rule.kind)
def test_every_size_policy_and_depth(tmp_path: Path, optimizer: optim.Optimizer, pooling: str) -> None:
    """On the CPU, ``tests/hbm/test_bits.py`` has it."""
    config: dict[str, Any] = {"optimizer": optimizer, "pooling": pooling}
    batches = make_batches(STEPS, scaled=pooling == "sum")
    expected = train(tmp_path / "plain", batches, config=config)
    there = make_batches(STEPS, scaled=pooling == "sum", device="cuda")
    for number, setting in enumerate(SETTINGS):
        given = there if number % 4 == 0 else batches
        ended = train(tmp_path / str(number), given, device="cuda", config=config, **setting)
        assert_same(ended, expected, setting)
        if setting["hbm"] == TINY:
            assert ended.stats.hbm.evictions > ROWS
        else:
            assert ended.stats.hbm.split_batches == 0
    config["dtype"] = "float16" if pooling == "sum" else "bfloat16"
    expected = train(tmp_path / "half", batches, config=config)
    assert_same(train(tmp_path / "half there", batches, device="cuda", config=config, hbm=TINY, depth=2), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("hbm", "depth"), [(TINY, 0), (TINY, 3), (WHOLE, 2)])
def test_whatever_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hbm: str, depth: int) -> None:
    """On the CPU, ``tests/hbm/tracing.py`` finds what is not waited for."""
    batches = make_batches(STEPS)
    expected = train(tmp_path / "plain", batches)
    for seed in range(4):
        delays = Delays(longest_us=2000, seed=seed)
        with monkeypatch.context() as patch:
            make_late(patch, delays)
            ended = train(tmp_path / f"{seed}", batches, device="cuda", hbm=hbm, depth=depth)
        assert delays.inserted > STEPS
        assert_same(ended, expected, seed)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode_before_training(tmp_path: Path, device: str) -> None:
    """What inference makes, training can write to; and inference changes nothing."""
    batches = make_batches(STEPS)
    expected = train(tmp_path / "plain", batches)
    with tierstore.open(tmp_path / "store", ddr="2MiB", hbm=TINY, device=device) as store:
        make_tables(store)
        collection = tierstore.TieredEmbeddingBagCollection(store)
        with torch.inference_mode():
            first = collection(batches[0]).values().cpu()
        assert torch.equal(first.view(torch.int32), expected.outs[0])
        train_on(store, batches[:3], depth=1)
        with torch.inference_mode():
            collection(batches[4])
        train_on(store, batches[3:], depth=1)
        assert torch.equal(read_all(store), expected.rows)


@pytest.mark.gpu
def test_streams_that_change_from_step_to_step(tmp_path: Path) -> None:
    """Ordered by the user, as torch asks of whoever uses several streams."""
    batches = make_batches(STEPS)
    expected = train(tmp_path / "plain", batches)
    streams = [torch.cuda.Stream() for _ in range(3)]
    with tierstore.open(tmp_path / "store", ddr="2MiB", hbm=TINY, device="cuda") as store:
        make_tables(store)
        before = torch.cuda.current_stream()
        outs = []
        for step, features in enumerate(batches):
            stream = streams[step % 3]
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                outs += train_on(store, [features], depth=0)
            before = stream
        torch.cuda.current_stream().wait_stream(before)
        assert torch.equal(read_all(store), expected.rows)
    assert all(torch.equal(*pair) for pair in zip(outs, expected.outs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_two_stores_on_one_device(tmp_path: Path, device: str) -> None:
    """In a thread each, at the same time."""
    batches = [make_batches(STEPS, seed=seed) for seed in range(2)]
    expected = [train(tmp_path / f"plain {seed}", batches[seed]) for seed in range(2)]

    def work(seed: int) -> Any:
        return train(tmp_path / f"both {seed}", batches[seed], device=device, hbm=(TINY, WHOLE)[seed], depth=2)

    with ThreadPoolExecutor(2) as threads:
        for ended, wanted in zip(threads.map(work, range(2)), expected, strict=True):
            assert_same(ended, wanted)
