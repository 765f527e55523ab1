"""A whole job saved and loaded: a run that went on from a checkpoint has the bits of one that never stopped."""

import collections
import itertools
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.torch_version import TorchVersion

import tierstore
from tierstore import checkpoint, errors, optim
from tierstore.exchange import rows as chunked
from tierstore.exchange.rows import read_rows

ROWS, DIM = 300, 20


class Job:
    def __init__(self, store: tierstore.Store, **config: Any) -> None:
        self.store = store
        if "t" not in store:
            config = {"optimizer": tierstore.optim.Adam(lr=0.05), **config}
            store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, **config))
        torch.manual_seed(0)
        self.model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(DIM, 8), nn.Dropout(0.2))
        self.rows, self.dense = store.optimizer(), torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (self.rows, self.dense)]
        self.all = self.model, [self.rows, self.dense], self.schedulers

    def train(self, steps: range) -> None:
        for step in steps:
            ids = torch.randint(0, ROWS, (8, 5), generator=torch.Generator().manual_seed(step))
            self.model(ids).square().mean().backward()
            for each in (self.rows, self.dense):
                each.step()
                each.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()


def everything(store: tierstore.Store) -> list[Tensor]:
    table = store["t"]
    state = torch.from_numpy(read_rows(table, 0, ROWS).state)
    return [table.read(torch.arange(ROWS)).float(), state, torch.tensor(table.state, dtype=torch.float64)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


ON_DEVICE: dict[str, Any] = {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"}


@pytest.mark.parametrize("way", ["commit", "background", "dcp"])
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
def test_a_job_goes_on_where_it_was_saved(tmp_path, tiers, config, way):
    def tensors_of(job: Job) -> list[Tensor]:
        return [*everything(job.store), *(each.detach().clone() for each in job.model[1].parameters())]

    def state_of(job: Job) -> dict[str, Any]:
        schedulers = dict(zip("ab", job.schedulers, strict=True))
        own = {"model": job.model, "rows": job.rows, "dense": job.dense, **schedulers}
        return own | {"tables": checkpoint.rows(job.store)}

    with tierstore.open(cold="memory") as store:
        whole = Job(store, **config)
        whole.train(range(6))
        expected = tensors_of(whole)
    with tierstore.open(tmp_path / "one", **tiers) as store:
        job = Job(store, **config)
        job.train(range(3))
        rng = torch.get_rng_state()
        if way == "dcp":
            dcp.save(state_of(job), storage_writer=dcp.FileSystemWriter(tmp_path / "saved", thread_count=2))
        elif way == "background":
            saved = checkpoint.save_async(store, *job.all, extra={"step": 3})
            job.train(range(3, 5))  # not in the version
            assert saved.result() == 1
        else:
            assert checkpoint.save(store, *job.all, extra={"step": 3}) == 1
    with tierstore.open(tmp_path / ("two" if way == "dcp" else "one"), **tiers) as store:
        job = Job(store, **config)
        if way == "dcp":
            job.train(range(7, 9))  # torch loads the state of optimizers that have some
            dcp.load(state_of(job), checkpoint_id=tmp_path / "saved")
            torch.set_rng_state(rng)
        else:
            torch.manual_seed(5)
            assert checkpoint.load(store, *job.all) == {"step": 3}
        job.train(range(3, 6))
        assert same(tensors_of(job), expected)


def test_weights_do_not_go_back_without_their_rows(tmp_path):
    def weights() -> Tensor:
        return job.model[1].weight.detach().clone()

    with tierstore.open(tmp_path) as store:
        job = Job(store)
        job.train(range(2))
        checkpoint.save(store, *job.all)
        assert store.changed_tables == ()
        checkpoint.load(store, *job.all)
        job.train(range(2, 4))
        assert store.changed_tables == ("t",)
        trained, rate = weights(), store["t"].learning_rate
        with pytest.raises(
            errors.TierstoreError, match=r"'t' .* since version 1.*: call store.rollback\(store.version\)"
        ):
            checkpoint.load(store, *job.all)
        assert torch.equal(weights(), trained)
        assert store["t"].learning_rate == rate
        pending = checkpoint.save_async(store, *job.all)
        job.train(range(4, 5))
        pending.result()
        assert store.changed_tables == ("t",)
        store.rollback(store.version)
        checkpoint.load(store, *job.all)
        assert torch.equal(weights(), trained)
        store["t"].write(torch.tensor([3]), torch.ones(1, DIM))
        with pytest.raises(errors.TierstoreError, match="changed since version 2"):
            checkpoint.load(store, *job.all)
        store.rollback(store.version)


def test_a_commit_of_rows_alone_drops_no_checkpoint(tmp_path):
    with tierstore.open(tmp_path) as store:
        job = Job(store)
        checkpoint.save(store, *job.all)
    with tierstore.open(tmp_path) as store:
        job.train(range(0))
        with pytest.raises(ValueError, match=r"version 1 .*checkpoint.save.*keep=2 or more.*commit\(tensors=\{\}\)"):
            store.commit()
        assert store.version == 1
        checkpoint.load(store, *Job(store).all)
        checkpoint.save(store, *job.all)
        assert store.commit(tensors={}) == 3
        assert store.commit() == 4
    with tierstore.open(tmp_path, keep=2) as store:
        checkpoint.save(store, *job.all)
        store.commit()
        with pytest.raises(ValueError, match=r"version 5 .*keep=2\): .*open the store with keep=3"):
            store.commit()
        assert store.versions == (5, 6)


class Kept:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": [0, self.value]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["value"] == [0, "refused"]:
            raise ValueError("refused")
        self.value = state["value"][1]


def listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: listed(each) for key, each in state.items()}
    if isinstance(state, list | tuple):
        return [listed(each) for each in state]
    return state.tolist() if isinstance(state, Tensor) else state


def test_what_is_saved_is_what_load_reads(tmp_path):
    with tierstore.open(tmp_path, keep=1) as store:
        model = nn.BatchNorm1d(2)
        for value in (np.float64(0.1), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("a"), 1 << 70, "b", None):
            state: dict[str, Any] = {"kept": [0, value]}
            checkpoint.save(store, model, [], [Kept(value)], extra=state)
            extra = checkpoint.load(store, model, [], [kept := Kept()])
            for found in (kept.value, extra["kept"][1]):
                assert found == value
                assert not isinstance(found, np.generic)
        saved = store.version
        for value in (collections.deque([1]), collections.defaultdict(int, a=1), Path("a"), np.zeros(2), print):
            kind = type(value).__name__
            for place, given in (("optimizers", ([Kept(value)], [])), ("schedulers", ([], [Kept(value)]))):
                with pytest.raises(TypeError, match=rf"^{place}\[0\]\['value'\]\[1\] is a {kind}, which"):
                    checkpoint.save(store, model, *given)
            with pytest.raises(TypeError, match=rf"^extra\['a'\]\[1\] is a {kind}, but extra must hold"):
                checkpoint.save(store, model, extra={"a": [0, value]})
        with pytest.raises(TypeError, match=r"^extra\['a'\] has a key '1' of type int"):
            store.commit(extra={"a": {1: 2}}, tensors={})
        assert store.version == saved
        checkpoint.load(store, model, [], [kept])
        assert kept.value is None


def test_parts_of_a_checkpoint_are_loaded(tmp_path):
    with tierstore.open(tmp_path) as store:
        job = Job(store)
        job.train(range(3))
        checkpoint.save(store, *job.all, extra={"step": 3})
        weight, rate = job.model[1].weight.detach().clone(), job.rows.param_groups[0]["lr"]
    with tierstore.open(tmp_path, mode="r") as store:
        model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(DIM, 8))
        torch.manual_seed(7)
        assert checkpoint.load(store, model) == {"step": 3}
        assert torch.equal(model[1].weight, weight)
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3)), "random numbers go on"
        bigger = nn.Sequential(*model, nn.Dropout(), nn.Linear(8, 1))
        with pytest.raises(RuntimeError, match="Missing key"):
            checkpoint.load(store, bigger)
        checkpoint.load(store, bigger, strict=False)
        with pytest.raises(ValueError, match="0 schedulers given, but the checkpoint has 2; give None"):
            checkpoint.load(store, model, [None, None])
    with tierstore.open(tmp_path) as store:
        store.create_table(tierstore.TableConfig(name="new", num_embeddings=9, embedding_dim=DIM))
        job = Job(store)
        other = torch.optim.SGD(job.model.parameters(), lr=0.3)
        checkpoint.load(store, job.model, [job.rows, None], [job.schedulers[0], None])
        assert {group["name"]: group["lr"] for group in job.rows.param_groups} == {"t": rate, "new": 0.01}
        assert other.param_groups[0]["lr"] == 0.3
        assert job.schedulers[0].last_epoch == 3
        assert job.schedulers[1].last_epoch == 0


def test_a_load_that_fails_changes_nothing():
    with tierstore.open(cold="memory") as store:
        job = Job(store)
        job.train(range(2))
        kept = Kept("refused")
        stateful = [*itertools.chain(*job.all[1:]), kept]
        checkpoint.save(store, job.model, stateful)
        kept.value = "mine"
        with torch.no_grad():
            job.model[1].weight.zero_()
        for each in (job.rows, job.dense):
            each.param_groups[0]["lr"] = 0.125
        rate = store["t"].learning_rate
        torch.manual_seed(3)
        before = listed([each.state_dict() for each in (job.model, *stateful)])
        with pytest.raises(ValueError, match="refused"):
            checkpoint.load(store, job.model, stateful)
        assert listed([each.state_dict() for each in (job.model, *stateful)]) == before
        assert store["t"].learning_rate == rate
        wider = nn.Sequential(job.model[0], nn.Linear(DIM, 8), nn.Linear(8, 2))
        first = listed(wider.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            checkpoint.load(store, wider)
        assert listed(wider.state_dict()) == first


@pytest.mark.parametrize("has_places", [True, False])
def test_a_job_is_loaded_after_its_tables_got_other_names_or_went(tmp_path, has_places, caplog):
    """Each table goes on at the rates that it would have had; of states saved without places a renamed one begins
    again, and says so."""

    def job(store: tierstore.Store) -> tuple[nn.ModuleDict, Any, Any]:
        modules = nn.ModuleDict({name: tierstore.TieredEmbeddingBag(store[name]) for name in store.tables})
        optimizer = store.optimizer(torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.5))
        kinds = torch.optim.lr_scheduler
        parts = [kinds.LambdaLR(optimizer, lambda step: 0.9**step), kinds.StepLR(optimizer, 2)]
        return modules, optimizer, kinds.SequentialLR(optimizer, parts, [3])

    def step(modules: nn.ModuleDict, optimizer: Any, scheduler: Any) -> dict[str, float]:
        optimizer.zero_grad()
        sum(each(torch.arange(9)[None]).sum() for each in modules.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
        return {group.get("name", ""): group["lr"] for group in optimizer.param_groups}

    with tierstore.open(tmp_path) as store:
        for place, name in enumerate("abc"):
            rule = tierstore.optim.SGD(lr=1.0 + place)
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=9, embedding_dim=4, optimizer=rule))
        modules, optimizer, scheduler = job(store)
        for _ in range(2):
            step(modules, optimizer, scheduler)
        if not has_places:
            for group in optimizer.param_groups:
                group.pop("place", None)
        checkpoint.save(store, modules, [optimizer], [scheduler])
        expected = [step(modules, optimizer, scheduler) for _ in range(4)]
    with tierstore.open(tmp_path) as store:
        store.change_table("c", name="z")
        store.drop_table("b")
        modules, optimizer, scheduler = job(store)
        checkpoint.load(store, modules, [optimizer], [scheduler])
        found = [step(modules, optimizer, scheduler) for _ in range(4)]
    for one, other in zip(found, expected, strict=True):
        assert [one[""], one["a"]] == pytest.approx([other[""], other["a"]])
        assert one["z"] == pytest.approx(other["c"]) or not has_places
    assert ("'z' was last trained at learning rate" in caplog.text) is not has_places


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
KEY = "embedding_bags.t"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 16 * 1024)


TABLE = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=optim.SGD(lr=0.05))


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.10",
    reason="torch.save keeps what it wrote until the garbage collector runs, before torch 2.10",
)
def test_memory_is_a_few_chunks(tmp_path, monkeypatch):
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


def test_a_checkpoint_of_another_table_is_refused(tmp_path):
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


def test_a_checkpoint_names_the_version_that_has_the_rows(tmp_path):
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
    for version in (1, 2):
        with tierstore.open(tmp_path / "moved", mode="r", version=version) as store:
            state = {"store": checkpoint.StoreVersion(store)}
            if version == 1:
                dcp.load(state, checkpoint_id=tmp_path / "0")
            else:
                dcp.save(state, checkpoint_id=tmp_path / "shown")
                dcp.load(state, checkpoint_id=tmp_path / "shown")
                with pytest.raises(errors.TierstoreError, match=r"shows version 2, .* version 1: .* version=1"):
                    dcp.load(state, checkpoint_id=tmp_path / "0")
    with tierstore.open(tmp_path / "moved", keep=2) as store:
        dcp.load({"store": checkpoint.StoreVersion(store)}, checkpoint_id=tmp_path / "0")
        assert (store.version, store["t"].read(ids).unique().tolist()) == (1, [0])
    with tierstore.open(tmp_path / "other", keep=2) as store:
        store.create_table(TABLE)
        store.commit()
        with pytest.raises(errors.TierstoreError, match=r"version 1 of .*/s .* among the commits of .*/other: open"):
            dcp.load({"store": checkpoint.StoreVersion(store)}, checkpoint_id=tmp_path / "0")
    with tierstore.open(tmp_path / "other") as store, pytest.raises(ValueError, match=r"keep=1 of .* with keep=2"):
        checkpoint.StoreVersion(store)
