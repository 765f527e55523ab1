"""Ranks that make different calls: an error on all, no process that ends or hangs, and one version after; and what
crosses in calls: values in fewer bits, and the seconds that tell the slow rank from others."""

import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

import tierstore
from tierstore.dist import ShardedStore, ShardedTieredEmbeddingBagCollection, average, open_sharded
from tierstore.dist.ranks import Precision, Ranks, decoded, encoded
from tierstore.errors import TierstoreError
from tierstore.lookup.lookup import Lookup

from .ranks import run

ROWS, DIM, SIZE = 40, 4, 2
SHARDINGS: dict[str, dict[str, Any]] = {
    "rows": {},
    "pooled": {"sharding_type": "table_wise", "exchange": "pooled"},
    "everywhere": {"sharding_type": "data_parallel"},
}
STEP = ("look up", "train")
BLOCKS: list[tuple[str, ...]] = [
    *([STEP] * 4), ("look up", "look up", "train", "train"), ("prefetch",), ("clip",), ("average",), ("balance",),
    ("create",), ("commit",), ("commit",),
]  # fmt: skip
MISTAKES = ["leave out", "do twice", "swap", "wrong id", "owner fails", "wrong extra", "disk full", "raise", "new rate"]
SEEDS: Final = range(len(MISTAKES))
OF: Final = {"wrong id": "look up", "owner fails": "look up", "wrong extra": "commit", "disk full": "commit"}
"""Calls that mistakes are made in; others are in any."""


class Call(NamedTuple):
    """What a rank does; ``place`` in the schedule that all ranks were to keep."""

    name: str
    table: str
    place: int
    wrong: str = ""


def schedule(seed: int) -> list[Call]:
    draw = random.Random(seed)
    names: list[tuple[str, str]] = []
    for _ in range(8):
        table = draw.choice(list(SHARDINGS))
        names += [(name, table) for name in draw.choice(BLOCKS)]
    return [Call(name, table, place) for place, (name, table) in enumerate(names)]


def mistaken(calls: Sequence[Call], seed: int) -> list[Call]:
    """What the rank calls that makes a mistake."""
    draw, found = random.Random(-seed), list(calls)
    mistake = MISTAKES[seed % len(MISTAKES)]
    place = draw.choice([n for n, call in enumerate(calls[:-1]) if call.name == OF.get(mistake, call.name)])
    if mistake == "leave out":
        del found[place]
    elif mistake == "do twice":
        found.insert(place, found[place])
    elif mistake == "swap" and found[place].name != found[place + 1].name:
        found[place : place + 2] = reversed(found[place : place + 2])
    else:
        found[place] = found[place]._replace(wrong="raise" if mistake == "swap" else mistake)
    return found


def ids_of(call: Call, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * call.place + rank)
    count = int(torch.randint(0, 9, (), generator=generator))  # none, now and then
    return torch.randint(0, ROWS, (count,), generator=generator)


def batch_of(call: Call, ids: Tensor) -> tierstore.KeyedJaggedTensor:
    return tierstore.KeyedJaggedTensor([call.table], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def config(name: str) -> tierstore.TableConfig:
    return tierstore.TableConfig(
        name=name, num_embeddings=ROWS, embedding_dim=DIM, optimizer=tierstore.optim.SGD(lr=0.5)
    )


class Rank:
    """Works a schedule off. ``tried``: of each commit that was begun, the rows that this rank has."""

    def __init__(self, folder: Path) -> None:
        self.store: ShardedStore = open_sharded(folder, ddr="500KiB", threads=1)
        for name, sharding in SHARDINGS.items():
            self.store.create_table(config(name), **sharding)
        self.modules = {name: ShardedTieredEmbeddingBagCollection(self.store, tables=[name]) for name in SHARDINGS}
        self.optimizer = self.store.optimizer()
        self.outputs: dict[str, list[Tensor]] = {name: [] for name in SHARDINGS}
        self.tried: dict[int, list[Any]] = {}
        self.committed: list[int] = []

    def work(self, calls: Sequence[Call]) -> str:
        end = "the end of its process"
        try:
            for call in calls:
                self.do(call)
            self.store.ranks.counts([0] * SIZE, end)
        except (RuntimeError, ValueError, TypeError, tierstore.errors.TierstoreError) as error:
            return f"{type(error).__name__}: {error}"
        except IndexError as error:  # outside of the store, which cannot tell the others
            with contextlib.suppress(tierstore.errors.RankError):
                self.store.ranks.counts([0] * SIZE, end)
            return str(error)
        return ""

    def do(self, call: Call) -> None:
        store, module, rank = self.store, self.modules[call.table], self.store.ranks.rank
        if call.wrong == "raise":
            raise IndexError("of the user's own")
        ids = ids_of(call, rank)
        if call.wrong == "wrong id":
            ids = torch.full((3,), ROWS)
        if call.wrong == "new rate":
            for group in self.optimizer.param_groups:
                group["lr"] = 0.25
            self.optimizer.step()
        match call.name:
            case "look up":
                with pytest.MonkeyPatch.context() as patch:
                    if call.wrong == "owner fails":
                        patch.setattr(Lookup, "forward", fail)
                    self.outputs[call.table].append(module(batch_of(call, ids)).values())
            case "train":
                self.outputs[call.table].pop().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            case "prefetch":
                batches = [batch_of(call, ids[n:]) for n in range(3)]
                with torch.no_grad():
                    for batch in tierstore.prefetch(batches, module, depth=2):
                        module(batch)
            case "clip":
                self.optimizer.clip_grad_norm_(max_norm=1.0)
            case "average":
                average([torch.ones(3)], store.ranks)
            case "balance":
                store.balance()
            case "create":
                store.create_table(config(f"more {call.place}"))
            case "commit":
                self.commit(call)

    def commit(self, call: Call) -> None:
        extra: dict[str, Any] = {"place": object() if call.wrong == "wrong extra" else call.place}
        self.tried[self.store.version + 1] = self.rows()
        with pytest.MonkeyPatch.context() as patch:
            if call.wrong == "disk full":
                patch.setattr(self.store.local, "commit", no_room)
            self.committed.append(self.store.commit(extra=extra))

    def rows(self) -> list[Any]:
        return [
            self.store[name].local.read(torch.arange(self.store[name].rows.start, self.store[name].rows.stop)).tolist()
            for name in SHARDINGS
        ]


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("this owner cannot")


def no_room(**_: Any) -> int:
    raise tierstore.errors.DiskFullError("no room left")


def work_off(folder: Path, seeds: Sequence[int]) -> list[tuple[str, list[int], Any, Any]]:
    """Of each seed: the error, the commits that returned, what was tried, and what is there when it is opened again."""
    found = []
    for seed in seeds:
        rank = Rank(folder / str(seed))
        calls = schedule(seed)
        error = rank.work(mistaken(calls, seed) if rank.store.ranks.rank == seed % SIZE else calls)
        rank.store.close()
        again = Rank(folder / str(seed))
        reopened = again.store.version, again.store.extra.get("place"), again.rows()
        again.store.close()
        found.append((error, rank.committed, rank.tried, reopened))
    return found


def test_a_mistake_of_one_rank_is_an_error_on_all_and_all_reopen_one_version(tmp_path: Path) -> None:
    failed, checked = 0, 0
    by_rank = run(work_off, SIZE, tmp_path, tmp_path, SEEDS, timeout_s=30)
    for seed, ranks in zip(SEEDS, zip(*by_rank, strict=True), strict=True):
        errors, returned, tried, reopened = zip(*ranks, strict=True)
        assert bool(errors[0]) == bool(errors[1]), f"{seed}: {errors}"
        assert not any("did not answer" in error for error in errors), f"{seed}: a rank waited for ever: {errors}"
        assert returned[0] == returned[1], f"{seed}: commits returned on one rank only"
        (version, place, _), (other_version, other_place, _) = reopened
        assert (version, place) == (other_version, other_place), seed
        assert version == max(returned[0], default=0), f"{seed}: what returned last is there"
        for own, (_, _, rows) in zip(tried, reopened, strict=True):
            assert not version or rows == own[version], f"{seed}: rows as they were when it was committed"
        checked += bool(version)
        failed += bool(errors[0])
    assert failed > len(SEEDS) // 2
    assert checked


def cut_short(folder: Path) -> str:
    """Rank 1 leaves a lookup after its first exchange. What its commit after that says, or the lookup of the others."""
    rank = Rank(folder)
    call = Call("look up", "rows", 0)
    if not rank.store.ranks.rank:
        with pytest.raises(tierstore.errors.RankError) as raised:
            rank.do(call)
        return str(raised.value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rank.do(call)
    with pytest.raises(tierstore.errors.RankError) as raised:
        rank.store.commit()
    rank.store.close()
    return str(raised.value)


def interrupted(*_: Any) -> Tensor:
    raise KeyboardInterrupt


def test_a_rank_that_left_a_call_amid_its_exchanges_makes_no_other(tmp_path: Path) -> None:
    other, own = run(cut_short, SIZE, tmp_path, tmp_path / "store")
    assert "rank 1 ended" in other
    assert "an earlier call ended here amid an exchange" in own


WIDE = 64
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
    found = {}
    for precision in get_args(Precision):
        wire = {"forward_precision": precision, "backward_precision": precision}
        with open_sharded(None, cold="memory", ddr="1MiB", **wire) as store:
            for name, exchange in (("a", "rows"), ("b", "pooled")):
                config = tierstore.TableConfig(name=name, num_embeddings=300, embedding_dim=WIDE)
                store.create_table(config, exchange=exchange)  # type: ignore[arg-type]
            module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
            for step in range(3):
                ids = torch.randint(0, 300, (400,), generator=torch.Generator().manual_seed(2 * step + rank))
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


def train_at_a_pace() -> list[float]:
    """Seconds of each rank in exchanges, where the last one is slow."""
    with open_sharded(None, cold="memory", ddr="1MiB", threads=1) as store:
        store.create_table(config("a"))
        module = ShardedTieredEmbeddingBagCollection(store)
        for _ in range(3):
            time.sleep(0.2 * (store.ranks.rank == 2))
            module(batch_of(Call("look up", "a", 0), torch.arange(3))).values().sum().backward()
        return [each.traffic.seconds for each in store.balance()]


def test_the_slow_rank_waits_the_least(tmp_path: Path) -> None:
    for first, second, slow in run(train_at_a_pace, 3, tmp_path):
        assert min(first, second) > slow + 0.3


KINDS = {"columns": {"sharding_type": "column_wise"}, "replicated": {"sharding_type": "data_parallel"}}
KINDS |= {"pooled": {"exchange": "pooled"}, "rows": {}, "dynamic": {}}


def train(kind, value, lr, calls, steps):
    """Steps, in the first of which rank 1 has the value in the gradient of the last call's sample 1, and a commit: how
    each ended; what was found; and whether this rank's rows are as they were."""
    fields = {"num_embeddings": 40, "embedding_dim": 4, "optimizer": tierstore.optim.SGD(lr=lr)}
    ids = tierstore.DynamicIds() if kind == "dynamic" else None
    store = open_sharded(cold="memory", ddr="1MiB", threads=1, check_finite="error")
    config = tierstore.TableConfig(name="t", feature_names=("a", "b"), ids=ids, **fields)
    local, ended, found = store.create_table(config, **KINDS[kind]).local, [], []
    module, rank = ShardedTieredEmbeddingBagCollection(store), store.ranks.rank
    values = torch.arange(12) + 12 * rank + (2**40 if ids else 0)
    batch = tierstore.KeyedJaggedTensor(["a", "b"], values, lengths=torch.full((6,), 2))
    own = values[:0] if ids else torch.arange(local.rows.start, local.rows.stop)
    before = local.read(own)

    def end(call):
        try:
            ended.append(call() and "")
        except TierstoreError as error:
            ended.append(f"{type(error).__name__}: {error}")
            found.append(getattr(error, "found", None))

    for bad in (value, 0.0)[:steps]:
        outputs, gradient = [module(batch).values() for _ in range(calls)], torch.zeros(3, 8)
        gradient[1, 4] = bad if rank else 0.0
        end(((outputs[-1] * gradient).sum() + sum(0.0 * each.sum() for each in outputs[:-1])).backward)
    end(lambda: store.commit() * "")
    return ended, found, torch.equal(before, local.read(own))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_refused_on_all_ranks_and_a_row_named_by_its_owner(tmp_path, kind):
    for calls in (1, 2):
        others, own = run(train, 2, tmp_path, kind, float("nan"), 0.5, calls, 2)
        named = {"source": "gradient", "table": "t", "feature": "b", "sample": 1, "update": 1}
        assert own[1:] == ([named | {"id": 20 + (2**40 if kind == "dynamic" else 0)}], True)
        assert own[0][0].startswith("NonFiniteError: not finite: source 'gradient', table 't'")
        assert others[0][0].startswith("RankError: rank 1 cannot take part in this step")
        assert (own[0][1:], others[0][1:], others[2]) == ([None, ""], [None, ""], True)  # the next step, and a commit
    if kind not in ("columns", "replicated"):  # of which several ranks find it
        ranks = run(train, 2, tmp_path, kind, 1e30, 1e30, 1, 1)
        (row,) = [each for _, found, _ in ranks for each in found if each]
        assert row.pop("id") % 2**40 in (20, 21)
        assert row == {"source": "row", "table": "t", "feature": None, "sample": None, "update": 1}
        assert {ended[-1].split(":")[0] for ended, *_ in ranks} <= {"PartlyTrainedError", "RankError"}
