"""Commits of a sharded store: one version of all ranks, whichever of them ends when."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, open_sharded
from tierstore.dist import lookup as dist_lookup
from tierstore.dist.parts import Commits, in_common
from tierstore.errors import DiskFullError, RankError, TableError
from tierstore.lookup.lookup import Lookup
from tierstore.system import killpoints

from .ranks import DIED, run

ROWS, DIM = 200, 8
TABLE = tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.Adam(lr=0.1))


def opened(folder: Path) -> ShardedStore:
    store = open_sharded(folder, ddr="500KiB", threads=1)
    store.create_table(TABLE)
    return store


def train(store: ShardedStore, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + store.ranks.rank)
    ids = torch.randint(0, ROWS, (64,), generator=generator)
    jagged = tierstore.KeyedJaggedTensor(["t"], ids, offsets=torch.arange(0, 65, 4))
    gradient = torch.randn(16, DIM, generator=generator)
    ShardedTieredEmbeddingBagCollection(store)(jagged).values().backward(gradient)


def rows(store: ShardedStore) -> list[list[float]]:
    half = ROWS // 2
    found: list[list[float]] = store.local["t"].read(torch.arange(half) + half * store.ranks.rank).tolist()
    return found


def train_and_commit(folder: Path, steps: int) -> tuple[int, dict[str, Any], list[Any]]:
    """Go on to ``steps`` steps, with a commit after each; (version, extra and rows at the start)."""
    with opened(folder) as store:
        found = store.version, store.extra, rows(store)
        for step in range(store.extra.get("steps", 0), steps):
            train(store, step)
            store.commit(extra={"steps": step + 1})
        assert steps < 3 or len(store.local.versions) == 2, "as keep says"
        return found


def no_room(**_: Any) -> int:
    raise DiskFullError("no room left")


def die_in_commit(folder: Path, dying: int, point: str) -> str:
    """Commit two steps; the second's fails once for want of room, and in the next try a rank ends at ``point``. What
    another rank was told."""
    with opened(folder) as store:
        train(store, 0)
        store.commit(extra={"steps": 1})
        with pytest.MonkeyPatch.context() as patch:
            if store.ranks.rank == dying:
                patch.setattr(store.local, "commit", no_room)
            with pytest.raises((RuntimeError, DiskFullError)):
                store.commit(extra={"steps": 1.5})
        train(store, 1)
        if store.ranks.rank == dying:
            killpoints.hook = lambda name: os._exit(DIED) if name == point else None
        try:
            store.commit(extra={"steps": 2})
        except RuntimeError as error:
            return str(error)
        return "committed"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Rows of each rank after 0, 1, 2 and 3 steps."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(train_and_commit, 2, folder, folder / "store", 0)
    return [[each[2] for each in run(train_and_commit, 2, folder, folder / "store", steps)] for steps in (1, 2, 3, 3)]


@pytest.mark.parametrize(
    ("point", "dying"),
    [
        ("commit: rows frozen", 1), ("commit: transaction committed", 0), ("commit: transaction committed", 1),
        ("prune: done", 0),
    ],
)  # fmt: skip
def test_ranks_reopen_at_the_newest_version_that_all_have(
    point: str, dying: int, tmp_path: Path, uninterrupted: list[list[Any]]
) -> None:
    store = tmp_path / "store"
    run(die_in_commit, 2, tmp_path, store, dying, point, statuses=[DIED, 0] if not dying else [0, DIED])
    for more in (0, 3):
        found = run(train_and_commit, 2, tmp_path, store, more)
        steps = found[0][1]["steps"]
        assert steps in ((1, 2) if point != "commit: rows frozen" else (1,))
        assert [each[1]["steps"] for each in found] == [steps, steps]
        assert [each[2] for each in found] == uninterrupted[steps]
    assert [each[2] for each in run(train_and_commit, 2, tmp_path, store, 3)] == uninterrupted[3]


def go_back(folder: Path, dying: int | None) -> tuple[list[list[float]], list[list[float]]]:
    """Three steps, back to the first, and two steps again; rows after the way back, and in the end."""
    with open_sharded(folder, ddr="500KiB", threads=1, keep=3) as store:
        assert "t" not in store
        store.create_table(TABLE)
        assert "t" in store
        numbers = []
        for step in range(3):
            train(store, step)
            numbers.append(store.commit(extra={"steps": step + 1}))
        assert store.versions == tuple(numbers)
        train(store, 3)
        with pytest.raises(ValueError, match=r"version=99 is not kept by all ranks, but \d, \d, \d\. Open with keep=N"):
            store.rollback(99)
        with pytest.raises(RankError, match="different calls"):
            store.rollback(numbers[store.ranks.rank])
        if dying == store.ranks.rank:
            killpoints.hook = lambda name: os._exit(DIED) if name == "rollback: head put" else None
        with contextlib.suppress(*(() if dying is None else (RuntimeError,))):
            store.rollback(numbers[0])
        if dying is not None:
            return [], []
        assert (store.version, store.extra, store.versions) == (numbers[0], {"steps": 1}, tuple(numbers[:1]))
        found = rows(store)
        for step in (1, 2):
            train(store, step)
            assert store.commit(extra={"steps": step + 1}) > numbers[2]
        return found, rows(store)


def test_ranks_go_back_together(tmp_path: Path, uninterrupted: list[list[Any]]) -> None:
    found = run(go_back, 2, tmp_path, tmp_path / "store", None)
    assert [each[0] for each in found] == uninterrupted[1]
    assert [each[1] for each in found] == uninterrupted[3]
    run(go_back, 2, tmp_path, tmp_path / "killed", 1, statuses=[0, DIED])
    found = run(train_and_commit, 2, tmp_path, tmp_path / "killed", 0)
    assert [(each[1]["steps"], each[2]) for each in found] == [(1, rows) for rows in uninterrupted[1]]


def test_ranks_pair_by_the_commit_and_not_by_its_number(tmp_path: Path) -> None:
    """Ranks' parts that went on from one commit each for itself have its number in common, and no later one."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(train_and_commit, 2, tmp_path, one, 1)
    shutil.copytree(one, other)
    for folder in (one, other):
        run(train_and_commit, 2, tmp_path, folder, 2)
    shutil.rmtree(one / "1-of-2")
    (other / "1-of-2").rename(one / "1-of-2")
    with tierstore.open(one, mode="r", ddr="1MiB") as whole:
        assert (whole.version, whole.extra) == (1, {"steps": 1})
    for steps in (0, 2, 0):
        found = run(train_and_commit, 2, tmp_path, one, steps)
    assert [each[:2] for each in found] == [(2, {"steps": 2})] * 2


def train_differently() -> list[str]:
    """Opens, steps and commits of ranks that differ in what they train by. What each rank was told."""
    told, rank = [], dist.get_rank()

    @contextlib.contextmanager
    def raising(kind: type[Exception]) -> Iterator[None]:
        with pytest.raises(kind) as raised:
            yield
        told.append(str(raised.value))

    with raising(ValueError):
        open_sharded(None, cold="memory", ddr="500KiB", backward_precision="bf16" if rank else "fp32")
    with open_sharded(None, cold="memory", ddr="500KiB", threads=1) as store:
        store.create_table(TABLE, sharding_type="data_parallel")
        optimizer, before = store.optimizer(), rows(store)
        (group,) = optimizer.param_groups
        group["lr"] = 0.5 if rank else 0.1  # as a scheduler does that goes by each rank's own loss
        train(store, 0)
        with raising(RankError):
            optimizer.step()
        assert rows(store) == before
        with raising(TableError):
            store.commit()
        group["lr"] = 0.1
        optimizer.step()
        assert store.commit() == 1
        if rank:
            store.local["t"].next_hyper()  # as if a step had been skipped elsewhere
        with raising(TableError):
            store.commit()
        assert store.version == 1
    return told


def test_ranks_that_train_differently_are_told(tmp_path: Path) -> None:
    one, other = run(train_differently, 2, tmp_path)
    assert one == other
    wanted = "precision", "rate 0.1; rank 1: backward of t, ", "learning rate is 0.1 and 0.5", "updates"
    assert all(words in told for words, told in zip(wanted, one, strict=True))


def test_commits_of_earlier_releases_pair_by_number() -> None:
    """They have no identities; one that has none is not one that has."""
    old, new = ({"run": "r", "number": 2, "versions": {"1": 1}, "shardings": {}} for _ in range(2))
    assert in_common([Commits.read(old, 2), Commits.read(old, 3)]) == [1, 2]
    assert in_common([Commits.read(old, 2), Commits.read(new | {"ids": {"2": "some"}}, 2)]) == [1]


def open_alone(folder: Path) -> str:
    with pytest.raises((tierstore.errors.TierstoreError, RuntimeError)) as raised:
        opened(folder)
    return str(raised.value)


def test_ranks_of_other_runs_or_numbers_and_lost_ranks_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        run(train_and_commit, 2, tmp_path, folder, 1)
    (one / "1-of-2").rename(tmp_path / "kept")
    assert all("rank 1 has none at all" in told for told in run(open_alone, 2, tmp_path, one))
    shutil.rmtree(one / "1-of-2")
    (other / "1-of-2").rename(one / "1-of-2")
    assert all("of 2 different runs" in told for told in run(open_alone, 2, tmp_path, one))


def refused(*_: Any, **__: Any) -> None:
    raise RuntimeError("this owner cannot")


def fail_to_look_up(rank: int) -> list[str]:
    """Lookups that fail in one rank: of a wrong id, of a wrong feature, and where it owns rows."""
    told = []
    with open_sharded(None, cold="memory", ddr="500KiB") as store:
        store.create_table(TABLE)
        with pytest.raises(TableError, match="only a part here"):
            tierstore.TieredEmbeddingBag(store.local["t"])(torch.arange(2), torch.tensor([0]))
        module, fails = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank == rank
        for name, row, owner in (
            ("t", ROWS, None), ("x", 0, None), ("t", 0, (dist_lookup, "make_lookup")), ("t", 0, (Lookup, "forward"))
        ):  # fmt: skip
            ids = torch.tensor([row if fails else 0])
            jagged = tierstore.KeyedJaggedTensor([name if fails else "t"], ids, offsets=torch.tensor([0, 1]))
            with pytest.MonkeyPatch.context() as patch:
                if fails and owner is not None:
                    patch.setattr(*owner, refused)
                with pytest.raises((ValueError, RuntimeError)) as raised:
                    module(jagged)
            told.append(str(raised.value))
            dist.barrier()
            train(store, 0)
        return told


def test_a_lookup_that_fails_in_one_rank_is_an_error_in_all_and_the_end_of_none(tmp_path: Path) -> None:
    others, own = run(fail_to_look_up, 2, tmp_path, 1)
    assert all("rank 1" in told for told in others)
    assert f"id {ROWS} is not a row of table 't'" in own[0]
    assert "feature 't' is missing" in own[1]
    assert own[2:] == ["this owner cannot"] * 2
