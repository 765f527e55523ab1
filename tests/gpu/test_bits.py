"""Training with rows in device memory ends in the bits of training on the CPU; what it takes of device and host."""

import gc
import json
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from bench import gpu
from bench.common import Run, plain
from bench.data import ROOT
from bench.gpu.rig import Rig
from tests.test_exact import OPTIMIZERS
from tierstore import optim
from tierstore.errors import BudgetError
from tierstore.hbm.full import FullRows

from . import sanitized
from .support import (
    BAGS,
    DEVICES,
    DIM,
    FEATURES,
    ROWS,
    TINY,
    WHOLE,
    assert_same,
    make_batches,
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
    batches = [make_batches(STEPS, seed=seed) for seed in range(2)]
    expected = [train(tmp_path / f"plain {seed}", batches[seed]) for seed in range(2)]

    def work(seed: int) -> Any:
        return train(tmp_path / f"both {seed}", batches[seed], device=device, hbm=(TINY, WHOLE)[seed], depth=2)

    with ThreadPoolExecutor(2) as threads:
        for ended, wanted in zip(threads.map(work, range(2)), expected, strict=True):
            assert_same(ended, wanted)


def in_use(store: tierstore.Store) -> dict[str, int]:
    gc.collect()
    hot: Any = store["table 0"].pool.tier
    if store.device.type == "cuda":
        torch.cuda.synchronize()
    assert hot.num_leased == 0  # which also lets go of what is no longer used
    hot.retain()  # and so does this, of all but itself
    released = 0 if isinstance(hot, FullRows) else len(hot.released)
    found = {"released": released, "retained": len(hot._retained), "tier": hot.size_bytes + hot.host_bytes}
    if store.device.type == "cuda":
        found |= {"device": torch.cuda.memory_allocated()}
        if hasattr(torch.cuda, "host_memory_stats"):
            found |= {"pinned": torch.cuda.host_memory_stats().get("num_host_alloc", 0)}
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("hbm", "depth"), [(TINY, 2), (WHOLE, 0), (WHOLE, 3)])
def test_memory_does_not_grow(store_dir: Path, hbm: str, depth: int, device: str) -> None:
    steps = 24 if device == "cpu" else 200
    batches = make_batches(steps)
    with tierstore.open(store_dir, ddr="2MiB", hbm=hbm, device=device) as store:
        make_tables(store)
        train_on(store, batches[: steps // 4], depth=depth)
        before = in_use(store)
        assert (before["released"], before["retained"]) == (0, 1)
        train_on(store, batches, depth=depth)
        after = in_use(store)
        # The sorted keys of overflow slots are there or not. One leaked batch takes more than 4 KiB, 200 of them 800.
        assert after.pop("device", 0) <= before.pop("device", 0) + 32 * 2**10
        # Blocks that torch keeps for the host: as many as were ever in use at once, which is a matter of pace.
        assert after.pop("pinned", 0) <= before.pop("pinned", 0) + steps // 50
        assert after == before


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """RuntimeError from whatever makes the host wait for the device, in any thread."""
    with warnings.catch_warnings():
        # It says of itself that it is a prototype.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_a_prefetched_step_waits_for_nothing_on_the_host(store_dir: Path, pooling: str) -> None:
    batches = make_batches(6, scaled=pooling == "sum")
    with tierstore.open(store_dir, ddr="2MiB", hbm=WHOLE, device="cuda") as store:
        make_tables(store, pooling=pooling)
        train_on(store, batches, depth=0)  # which compiles the kernels
        collection = tierstore.TieredEmbeddingBagCollection(store)
        gradient = torch.randn((BAGS, len(FEATURES) * DIM), device="cuda")
        for features in batches[:2]:
            collection.bring_in(collection.prepare(features))
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        busy.record()
        with waiting_forbidden():
            for features in batches[:2]:
                collection(features).values().backward(gradient)
        assert not busy.query(), "the host waited for the stream, about a second"
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_more_memory_than_the_device_has(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="25%", hbm="1000TiB", device="cuda") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=10**9, embedding_dim=64))
        with pytest.raises(BudgetError, match="1000TiB"):
            store["t"].read(torch.arange(3))
    # And the device is as usable as before.
    with tierstore.open(store_dir, ddr="25%", hbm="64MiB", device="cuda") as store:
        assert store["t"].read(torch.arange(3)).is_cuda


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tmp_path: Path, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of NVIDIA's CUDA toolkit, is not on PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]
    command += [sys.executable, "-m", "tests.gpu.sanitized", str(tmp_path)]
    # A block of its own for each tensor: to read past one's end is then not to read a neighbour in the same block.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1400, check=False
    )  # fmt: skip
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    assert "the same bits" in done.stdout


def test_what_compute_sanitizer_watches_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sanitized.main(tmp_path, "cpu")
    assert capsys.readouterr().out == "the same bits\n"


CONFIG = tomllib.loads((ROOT / "bench" / "gpu.toml").read_text())
QUICK = CONFIG.pop("quick")


def test_quick_sizes_have_the_keys_of_the_whole_ones() -> None:
    assert set(CONFIG) - {"seed"} == set(QUICK) == {*gpu.PARTS}
    assert {name: set(QUICK[name]) for name in gpu.PARTS} == {name: set(CONFIG[name]) for name in gpu.PARTS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", gpu.PARTS)
def test_each_part_works(tmp_path: Path, name: str, device: str) -> None:
    part: Any = getattr(gpu, name)
    found = part.measure(Rig(device), QUICK[name], tmp_path)
    figures = json.loads(json.dumps(plain(found), allow_nan=False))
    report = part.tell(figures)
    assert report.tables
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows)
    if name == "cached":
        assert [goal.met for goal in report.goals if goal.exactly is not None] == [True]
        assert len({case["bits"] for case in figures["cases"].values()}) == 1


@pytest.mark.gpu
def test_events_time_the_work_and_not_its_launch() -> None:
    rig = Rig("cuda")
    value = torch.zeros(2**28, dtype=torch.uint8, device=rig.device)
    cycles = 5_000_000
    slept = rig.times({"sleep": lambda _: torch.cuda._sleep(cycles)}, repetitions=3)["sleep"]
    assert 1e-3 < min(slept) <= max(slept) < 1e-1
    copied = rig.times({"copy": lambda _: value.add_(1)}, repetitions=5)["copy"]
    assert max(copied) < min(slept)
    assert rig.copy_bytes_per_s() > 1e11


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.run(Run(config={}, quick=False, folder=tmp_path))
    assert not ended.value.code
    assert capsys.readouterr().out == "no CUDA device: nothing measured\n"
    assert list(tmp_path.iterdir()) == []
