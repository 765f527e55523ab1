"""Tables in checkpoints of torch.distributed.checkpoint: all their rows, or the version of the store that has them."""

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

import tierstore
from tests.nn.test_checkpoint import DIM, ROWS, Job
from tierstore import checkpoint, errors, optim
from tierstore.exchange import rows as chunked
from tierstore.exchange.rows import read_rows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
KEY = "embedding_bags.t"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 16 * 1024)


def state_of(job: Job) -> dict[str, Any]:
    schedulers = dict(zip("ab", job.schedulers, strict=True))
    return {"model": job.model, "rows": job.rows, "dense": job.dense, **schedulers}


def everything(store: tierstore.Store) -> list[Tensor]:
    table = store["t"]
    state = torch.from_numpy(read_rows(table, 0, ROWS).state)
    return [table.read(torch.arange(ROWS)).float(), state, torch.tensor(table.state, dtype=torch.float64)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


TABLE = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=optim.SGD(lr=0.05))


ON_DEVICE: dict[str, Any] = {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"}


@pytest.mark.parametrize(
    ("tiers", "config"),
    [
        ({"ddr": "1MiB"}, {"optimizer": optim.RowWiseAdagrad(lr=0.05)}),
        (ON_DEVICE, {"optimizer": optim.Adam(lr=0.05)}),
        ({"ddr": "460KiB"}, {"optimizer": optim.Adagrad(lr=0.05), "dtype": "bfloat16"}),
        (ON_DEVICE, {"optimizer": optim.SGD(lr=0.05), "dtype": "float16"}),
    ],
    ids=["in place", "on a device", "evicting", "of halfs"],
)
def test_a_job_goes_on_where_its_rows_were_saved(tmp_path: Path, tiers: dict[str, Any], config: dict[str, Any]) -> None:
    with tierstore.open(cold="memory") as store:
        whole = Job(store, **config)
        whole.train(range(6))
        expected = everything(store)
    with tierstore.open(cold="memory", **tiers) as store:
        job = Job(store, **config)
        job.train(range(3))
        written = dcp.FileSystemWriter(tmp_path / "saved", thread_count=2)
        dcp.save({**state_of(job), "tables": checkpoint.rows(store)}, storage_writer=written)
        saved, rng = everything(store), torch.get_rng_state()
    with tierstore.open(tmp_path / "other", **tiers) as store:
        job = Job(store, **config)
        job.train(range(7, 9))  # torch loads the state of optimizers that have some
        dcp.load({**state_of(job), "tables": checkpoint.rows(store)}, checkpoint_id=tmp_path / "saved")
        assert same(everything(store), saved)
        torch.set_rng_state(rng)
        job.train(range(3, 6))
        assert same(everything(store), expected)


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10",
    reason="torch.save keeps what it wrote until the garbage collector runs, before torch 2.10",
)
def test_memory_is_a_few_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's, that is, all but the one chunk that torch has read; of one table of many chunks, and many of one."""
    chunk = 256 * 1024
    monkeypatch.setattr(chunked, "CHUNK_BYTES", chunk)
    sizes = {"large": 20_000, **{f"small{number}": 1_300 for number in range(10)}}

    def peak(work: Callable[[], Any]) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        work()
        return tracemalloc.get_traced_memory()[1] - before

    weight = "embedding_bags.large.weight"
    dcp.save({"tables": {weight: torch.ones(sizes["large"], 32)}}, checkpoint_id=tmp_path / "in one chunk")
    tracemalloc.start()
    try:
        for directory, work, path in (
            ("from", dcp.save, "saved"),
            ("to", dcp.load, "saved"),
            ("again", dcp.load, "in one chunk"),
        ):
            with tierstore.open(tmp_path / directory, ddr="2MiB") as store:
                for name, size in sizes.items():
                    store.create_table(tierstore.TableConfig(name=name, num_embeddings=size, embedding_dim=32))
                store["large"].read(torch.tensor([1]))  # the caches are made
                rows = checkpoint.rows(store)
                state = {"tables": rows if path == "saved" else {weight: rows[weight]}}
                assert peak(lambda: work(state, checkpoint_id=tmp_path / path)) < 6 * chunk  # noqa: B023
    finally:
        tracemalloc.stop()


def test_a_checkpoint_of_another_table_is_refused(tmp_path: Path) -> None:
    weight, step, rate = torch.ones(ROWS, DIM), torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    wrong = {
        "Size mismatch": (torch.ones(ROWS + 1, DIM), step, rate),
        f"Missing key.*{KEY}.step": (weight,),
        "has torch.bfloat16 where table 't' has torch.float32": (weight.bfloat16(), step, rate),
    }
    with tierstore.open(cold="memory") as store:
        store.create_table(TABLE)
        before = everything(store)
        for number, (said, tensors) in enumerate(wrong.items()):
            saved = dict(zip((f"{KEY}.weight", f"{KEY}.step", f"{KEY}.lr"), tensors, strict=False))
            dcp.save({"tables": saved}, checkpoint_id=tmp_path / str(number))
            with pytest.raises(CheckpointException, match=said):
                dcp.load({"tables": checkpoint.rows(store)}, checkpoint_id=tmp_path / str(number))
            assert same(everything(store), before)


def test_a_checkpoint_names_the_version_that_has_the_rows(tmp_path: Path) -> None:
    ids = torch.arange(ROWS)
    with tierstore.open(tmp_path / "s", keep=3) as store:
        table, state = store.create_table(TABLE), {"store": checkpoint.StoreVersion(store)}
        for number, save in enumerate((dcp.save, dcp.save, dcp.async_save)):
            table.write(ids, torch.full((ROWS, DIM), float(number)))
            saving: Any = save(state, checkpoint_id=tmp_path / str(number))
            table.write(ids, torch.full((ROWS, DIM), 9.0))
        saving.result()
        assert store.versions == (1, 2, 3)
        for number in (2, 1):
            dcp.load(state, checkpoint_id=tmp_path / str(number))
            assert table.read(ids).unique().tolist() == [number]
        assert store.versions == (1, 2)
        with pytest.raises(errors.TierstoreError, match=rf"version 3 of {tmp_path}/s .*not among the commits"):
            dcp.load(state, checkpoint_id=tmp_path / "2")
        store.backup(tmp_path / "backup")
        store.commit()
        store.commit()
        with pytest.raises(ValueError, match=r"version=1 of .*/s is not kept; kept: 2, 4, 5. Open with keep=N"):
            dcp.load(state, checkpoint_id=tmp_path / "0")
    shutil.move(tmp_path / "backup", tmp_path / "moved")
    with tierstore.open(tmp_path / "moved", keep=2) as store:
        dcp.load({"store": checkpoint.StoreVersion(store)}, checkpoint_id=tmp_path / "0")
        assert (store.version, store["t"].read(ids).unique().tolist()) == (1, [0])
    with tierstore.open(tmp_path / "other", keep=2) as store:
        store.create_table(TABLE)
        store.commit()
        with pytest.raises(errors.TierstoreError, match=r"version 1 of .*/s .* among the commits of .*/other: open"):
            dcp.load({"store": checkpoint.StoreVersion(store)}, checkpoint_id=tmp_path / "0")


def test_a_reader_shows_the_version_of_a_checkpoint_or_says_how(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "s", keep=2) as store:
        store.create_table(TABLE)
        store.commit()
        store.commit()
    for version in (1, 2):
        with tierstore.open(tmp_path / "s", mode="r", version=version) as store:
            state = {"store": checkpoint.StoreVersion(store)}
            if version == 1:
                dcp.save(state, checkpoint_id=tmp_path / "saved")
                dcp.load(state, checkpoint_id=tmp_path / "saved")
            else:
                with pytest.raises(errors.TierstoreError, match=r"shows version 2, .* version 1: .* version=1"):
                    dcp.load(state, checkpoint_id=tmp_path / "saved")
    with tierstore.open(tmp_path / "s") as store, pytest.raises(ValueError, match=r"keep=1 of .* with keep=2"):
        checkpoint.StoreVersion(store)
