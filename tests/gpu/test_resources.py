"""What the device tier takes of the device, and of the host's time."""

import gc
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tierstore
from bench.data import ROOT
from tierstore.errors import BudgetError
from tierstore.hbm.full import FullRows

from . import sanitized
from .support import BAGS, DEVICES, DIM, FEATURES, TINY, WHOLE, make_batches, make_tables, train_on


def in_use(store: tierstore.Store) -> dict[str, int]:
    """Everything that must not grow, once all that was given to the device is done."""
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
