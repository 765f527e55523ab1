"""A model sharded as it stands trains as one whose sharded modules were written by hand, to the same bits."""

import copy
import importlib
import re
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tierstore
from tests.dist.placement.support import costs_of
from tierstore import optim
from tierstore.cli import entry as cli
from tierstore.dist import (
    Plan,
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    Sharding,
    data_parallel,
    open_sharded,
    shard,
)
from tierstore.dist import model as dist_model
from tierstore.errors import RankError, TableError
from tierstore.exchange.rows import read_rows
from tierstore.models import DLRM

from .ranks import run

ROWS, DIM, SAMPLES, STEPS = 60, 8, 16, 3
RULE = optim.Adam(lr=0.1)
SMALL: dict[str, Any] = {"cold": "memory", "ddr": "2MiB", "threads": 1}


class Words(nn.Module):
    """Bags and single rows, which share a weight, and a bag of its own."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", device=device)
        self.row = nn.Embedding(ROWS, DIM, device=device)
        self.row.weight = self.bag.weight
        self.other = nn.ModuleDict({"mean": nn.EmbeddingBag(ROWS + 1, DIM, padding_idx=2, device=device)})
        self.dense = nn.Linear(3 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Of int64 [samples, 4]."""
        found: Tensor = self.dense(torch.cat([self.bag(ids), self.row(ids[:, 0]), self.other["mean"](ids)], 1))
        return found


def words(seed: int = 0, device: str = "cpu") -> Words:
    torch.manual_seed(seed)
    return Words(device)


def config_of(name: str) -> tierstore.TableConfig:
    rows, pooling = (ROWS, "sum") if name == "item" else (ROWS + 1, "mean")
    shape: Any = {"num_embeddings": rows, "embedding_dim": DIM, "pooling": pooling}
    return tierstore.TableConfig(name=name, optimizer=RULE, init=tierstore.init.Normal(std=1.0), **shape)


def by_hand(store: Any, model: Words) -> nn.Module:
    for name in ("item", "other"):
        store.create_table(config_of(name))
    model.bag = ShardedTieredEmbeddingBag(store, "item")  # type: ignore[assignment]
    model.row = ShardedTieredEmbedding(store, "item")  # type: ignore[assignment]
    model.other["mean"] = ShardedTieredEmbeddingBag(store, "other", padding_idx=2)
    return data_parallel(model)


def write(store: Any, weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        table = store[name]
        if len(table.rows):
            rows = torch.arange(table.rows.start, table.rows.stop)
            table.local.write(rows, weight.detach()[rows][:, table.columns.start : table.columns.stop])


NAMES = {"bag": "item", "other.mean": "other"}


def train(store: Any, model: Any, batch: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Bits of this rank's losses, the dense weights, and its rows with their optimizer state, in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(10 * step + dist.get_rank())).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [losses, [each.detach().numpy().tobytes() for each in model.parameters() if each.numel()], bits_of(store)]


def bits_of(store: Any) -> dict[str, tuple[bytes, bytes]]:
    rows = {name: read_rows(each.local, each.rows.start, each.rows.stop) for name, each in store.tables.items()}
    return {name: (each.weights.tobytes(), each.state.tobytes()) for name, each in rows.items()}


def ids(seed: int) -> tuple[Tensor]:
    return (torch.randint(0, ROWS, (SAMPLES, 4), generator=torch.Generator().manual_seed(seed)),)


def torchs_modules(folder: Path) -> None:
    given = words(seed=1)
    weights = {"item": given.bag.weight, "other": given.other["mean"].weight}
    rank = dist.get_rank()
    with tierstore.open(folder / f"plain-{rank}", ddr="2MiB") as plain:
        for name, weight in weights.items():
            plain.create_table(config_of(name)).write(torch.arange(len(weight)), weight)
        plain.commit()
    with open_sharded(**SMALL) as store:
        on_meta = train(store, by_hand(store, words()), ids)
    with open_sharded(**SMALL) as store:
        model = by_hand(store, words())
        write(store, weights)
        copied = train(store, model, ids)
    assert on_meta[0] != copied[0]
    for expected, model, source in (
        (on_meta, words(device="meta"), None),
        (copied, words(), None),
        (copied, words(device="meta"), folder / f"plain-{rank}"),
        (copied, words(), folder / f"plain-{rank}"),
    ):
        if source is None and not model.bag.weight.is_meta:
            model.bag.weight.data.copy_(given.bag.weight)
            model.other["mean"].weight.data.copy_(given.other["mean"].weight)
        if model.bag.weight.is_meta:
            model.row.weight = model.bag.weight
            torch.manual_seed(0)
            model.dense = words().dense
        with open_sharded(**SMALL) as store:
            held = [model.bag]
            sharded: Any = shard(model, store, None, tables=NAMES, optimizer=RULE, source=source)
            assert held[0] is model.bag
            assert sharded.module is model
            assert list(store.tables) == ["item", "other"]
            assert train(store, sharded, ids) == expected


def test_torchs_modules_are_sharded_as_by_hand(tmp_path: Path) -> None:
    run(torchs_modules, 2, tmp_path, tmp_path)


def plain_model(store: Any) -> Any:
    """Modules over a plain store: fixed ids with rows and without, dynamic ids, all shared by two collections."""
    rule = optim.RowWiseAdagrad(lr=0.1)
    for name, more in (("a", {}), ("b", {"ids": tierstore.DynamicIds()}), ("c", {"dtype": "bfloat16"})):
        config: Any = {"name": name, "num_embeddings": ROWS, "embedding_dim": DIM, "optimizer": rule, **more}
        store.create_table(tierstore.TableConfig(**config))
    torch.manual_seed(3)
    bags = tierstore.TieredEmbeddingBagCollection(store, tables=list("abc"), is_weighted=False)
    model = DLRM(bags, num_features=3, embedding_dim=DIM, num_dense=2)
    model.rows = tierstore.TieredEmbeddingCollection(store, tables=["a"])
    return model


def jagged(seed: int) -> tuple[Tensor, tierstore.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * SAMPLES,), generator=generator)
    found = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return torch.rand(SAMPLES, 2, generator=generator), tierstore.KeyedJaggedTensor(list("abc"), found, lengths=lengths)


def over_a_plain_store(folder: Path, plan: str) -> None:
    """A trained model goes on over ranks: as by the command, and a second run from the last commit."""
    with tierstore.open(folder / "plain", mode="r") as plain:
        model: Any = shard(plain_model(plain), store := open_sharded(folder / "ours", ddr="2MiB", threads=1), plan)
        found = train(store, model, jagged)
    assert store["a"].sharding == Sharding("column_wise", (1, 0))
    assert not model.module.embeddings.is_weighted()
    assert isinstance(model.module.rows, tierstore.TieredEmbeddingCollection)
    store.commit()
    store.close()
    with tierstore.open(folder / "plain", mode="r") as plain, open_sharded(folder / "theirs", ddr="2MiB") as store:
        model = plain_model(plain)
        model.embeddings = ShardedTieredEmbeddingBagCollection(store, is_weighted=False)
        assert train(store, data_parallel(model), jagged) == found
    with tierstore.open(cold="memory", ddr="2MiB") as plain, open_sharded(folder / "ours", ddr="2MiB") as store:
        shard(plain_model(plain), store, None, source=folder / "is not there")
        assert bits_of(store) == found[2]


def test_a_model_over_a_plain_store_goes_on_over_ranks(tmp_path: Path) -> None:
    with tierstore.open(tmp_path / "plain", ddr="2MiB") as store:
        model = plain_model(store)
        for step in range(STEPS):
            model.embeddings(jagged(step)[1])["a"].sum().backward()
            (-model.embeddings(jagged(step)[1]).values()).square().sum().backward()
        store.commit()
    plan = tmp_path / "plan.json"
    Plan(2, {"a": Sharding("column_wise", (1, 0)), "c": Sharding("table_wise", (1,))}).save(plan)
    words = ["reshard", str(tmp_path / "plain"), str(tmp_path / "theirs"), "--ranks", "2", "--plan", str(plan)]
    assert cli.main(words) == 0
    run(over_a_plain_store, 2, tmp_path, tmp_path, str(plan))


def half_trained(folder: Path) -> None:
    """Weights with the state of torch's optimizer, as ``convert`` takes them."""
    model: Any = words()
    adam = torch.optim.Adam([model.bag.weight, model.other["mean"].weight], lr=0.1)
    for seed in range(2):
        model(*ids(seed)).square().mean().backward()
        adam.step()
    twin, twins_adam = copy.deepcopy((model, adam))
    with open_sharded(folder / "ours", ddr="2MiB", threads=1) as store:
        shard(model, store, Plan(2, {"bag": Sharding("column_wise", (0, 1))}), optimizer=adam)
        assert not adam.state
        assert store["bag"].local.state.step == 2
        store.commit()
    if dist.get_rank() == 0:
        with tierstore.open(folder / "theirs", ddr="2MiB") as plain:
            tierstore.convert(twin, plain, optimizer=twins_adam)
            plain.commit()
    for name in ("ours", "theirs"):  # another run, whose optimizer has another rate
        model = words()
        adam = torch.optim.Adam([model.bag.weight, model.other["mean"].weight], lr=0.02)
        if name == "ours":
            with open_sharded(folder / name, ddr="2MiB", threads=1) as store:
                shard(model, store, optimizer=adam)
                assert {each.learning_rate for each in store.tables.values()} == {0.02}
        elif dist.get_rank() == 0:
            with tierstore.open(folder / name, ddr="2MiB") as plain:
                tierstore.convert(model, plain, optimizer=adam, copy=False)
                assert {each.learning_rate for each in plain.tables.values()} == {0.02}


def test_optimizer_state_of_torch_comes_along_and_a_run_that_resumes_has_its_own_rate(tmp_path: Path) -> None:
    run(half_trained, 2, tmp_path, tmp_path)
    found = []
    for name in ("ours", "theirs"):
        with tierstore.open(tmp_path / name, mode="r") as store:
            found.append((bits_of(store), [each.state for each in store.tables.values()]))
    assert found[0] == found[1]
    assert list(found[0][0]) == ["bag", "other.mean"]


class EmbeddingBagCollection(nn.Module):
    """As TorchRec's, as far as it is looked at."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict(
            {name: nn.EmbeddingBag(ROWS, DIM, mode="mean", device=device) for name in "ab"}
        )

    def embedding_bag_configs(self) -> list[Any]:
        init = partial(nn.init.uniform_, a=-0.5, b=0.5)
        shape: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM, "init_fn": init}
        kinds = {"pooling": Enum("PoolingType", "MEAN")["MEAN"]}
        bounds = {"get_weight_init_min": lambda: -0.5, "get_weight_init_max": lambda: 0.5}
        features = {"a": ["a"], "b": ["b", "c"]}
        return [SimpleNamespace(name=n, feature_names=features[n], **shape, **kinds, **bounds) for n in "ab"]

    def is_weighted(self) -> bool:
        return False


def torchrecs() -> None:
    for device in ("cpu", "meta"):
        torchrec(device)


def torchrec(device: str) -> None:
    in_backward: Any = importlib.import_module("torch.distributed.optim")  # warns of what torch itself deprecates
    torch.manual_seed(0)
    bags = EmbeddingBagCollection(device)
    model = DLRM(bags, num_features=3, embedding_dim=DIM, num_dense=2)
    given: Any = {name: each.weight.detach() for name, each in bags.embedding_bags.items()}
    in_backward._apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": 0.1})
    twin = DLRM(nn.Identity(), num_features=3, embedding_dim=DIM, num_dense=2)
    twin.load_state_dict(model.state_dict(), strict=False)
    with open_sharded(**SMALL) as store:
        found = train(store, shard(model, store, None), jagged)
        assert store["b"].config.init == tierstore.init.Uniform(-0.5, 0.5)
    with open_sharded(**SMALL) as store:
        for name, features in (("a", ["a"]), ("b", ["b", "c"])):
            config: Any = {"name": name, "num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": features}
            more: Any = {"pooling": "mean", "optimizer": optim.Adagrad(lr=0.1, eps=1e-10)}
            store.create_table(tierstore.TableConfig(**config, **more, init=tierstore.init.Uniform(-0.5, 0.5)))
        twin.embeddings = ShardedTieredEmbeddingBagCollection(store, is_weighted=False)
        if device == "cpu":
            write(store, given)
        assert train(store, data_parallel(twin), jagged) == found


def test_collections_of_torchrec_are_sharded_with_their_optimizers(tmp_path: Path) -> None:
    run(torchrecs, 2, tmp_path)


def planned() -> dict[str, Sharding]:
    costs = costs_of(2, other={"data_parallel": {"rows": 9.0}}, optimizer="rowwise_adagrad")
    with tierstore.open(cold="memory", ddr="2MiB") as plain, open_sharded(**SMALL) as store:
        plain.create_table(tierstore.TableConfig(name="before", num_embeddings=1, embedding_dim=1))
        plain.drop_table("before")  # first values go by the place in a store
        model, own = shard(plain_model(plain), store, costs=costs), torch.arange(ROWS)
        for name in "ac":
            first, local = plain[name].read(own), store[name].local
            assert torch.equal(local.read(own[list(local.rows)]), first[list(local.rows)])
        train(store, model, jagged)
        return {name: table.sharding for name, table in store.tables.items()}


def test_plans_are_found_by_one_rank_for_all(tmp_path: Path) -> None:
    first, second = run(planned, 2, tmp_path)
    assert first == second
    assert {first["a"].sharding_type, first["c"].sharding_type} == {"table_wise"}
    assert first["a"].ranks != first["c"].ranks, "each rank has one"
    assert first["b"] == Sharding("row_wise", (0, 1)), "dynamic ids stay out of it"


def refusals() -> list[str]:
    told: list[str] = []

    def refuse(model: nn.Module, **options: Any) -> None:
        before = dict(model.named_modules())
        with pytest.raises((ValueError, TypeError, OSError, TableError, RankError)) as raised:
            shard(model, store, **({"plan": None} | options))
        told.append(str(raised.value))
        assert dict(model.named_modules()) == before
        assert not store.tables

    with open_sharded(**SMALL) as store:
        model: Any = words()
        model.other["max"] = nn.EmbeddingBag(9, 4, max_norm=1.0)
        model.other["pad"] = nn.Embedding(9, 4, padding_idx=0)
        model.dense = nn.Linear(3, 1, device="meta")
        model.bag.weight.register_hook(lambda grad: grad)
        refuse(model)
        refuse(words(), tables={"dense": "item"})
        refuse(words(), plan=Plan(3, {}))
        refuse(words(), source=__file__)
        refuse(words(), plan="auto", demand=[words()])
        refuse(nn.Sequential(data_parallel(words())))
        refuse(words(seed=dist.get_rank()))
        refuse(words(), tables={"dense": "item"} if dist.get_rank() else None)  # one rank alone
    return told


def test_what_cannot_be_sharded_is_named(tmp_path: Path) -> None:
    said = [
        "'bag': its weight has hooks.*'other.max': max_norm.*'other.pad': padding_idx.*'dense.weight': is on",
        "tables: 'dense' is no nn.Embedding",
        "the plan is for 3 ranks",
        "is a file: import it by tierstore import",
        "demand must be a Trace",
        "DistributedDataParallel: give its module before",
        "weights of ranks 0 and 1 differs",
    ]
    first, second = run(refusals, 2, tmp_path)
    for found, expected in zip(first[:-1], said, strict=True):
        assert re.search(expected, found, re.DOTALL), found
    assert first[:-1] == second[:-1]
    assert "rank 1 cannot take part" in first[-1]
    with pytest.raises(TypeError, match="store must be a ShardedStore"):
        shard(nn.Linear(1, 1), object())  # type: ignore[arg-type]


def tried_again(folder: Path) -> None:
    weights, write_rows = words().bag.weight.detach().clone(), dist_model.write_rows
    with open_sharded(**SMALL) as store:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist_model, "write_rows", write_rows if store.ranks.rank else _fail)
            with pytest.raises((OSError, RankError)):
                shard(words(), store, None, tables=NAMES, optimizer=RULE)
        shard(words(), store, None, tables=NAMES, optimizer=RULE)
        own = store["item"].rows
        assert torch.equal(store["item"].local.read(torch.arange(own.start, own.stop)), weights[own.start : own.stop])
        plan = folder / f"{store.ranks.rank}.json"
        Plan(2, {name: Sharding("table_wise", (1,)) for name in store.tables}).save(plan)
        shard(words(), store, plan, tables=NAMES, optimizer=RULE)
        assert {each.sharding for each in store.tables.values()} == {Sharding("row_wise", (0, 1))}


def _fail(*_: Any) -> None:
    raise OSError("once")


def test_a_call_that_failed_is_tried_again_and_one_that_resumes_leaves_tables_where_they_are(tmp_path: Path) -> None:
    run(tried_again, 2, tmp_path, tmp_path)


def train_wrapped(folder: Path) -> dict[str, str]:
    """What becomes of a model, with a store of each rank's, that torch wraps in each of its ways, and before."""
    warnings.simplefilter("ignore")  # torch's own, of gradients that are not there
    mesh, found = init_device_mesh("cpu", (2,)), {}
    wrappers: dict[str, Callable[[nn.Module], Any]] = {
        "fully_shard": lambda model: fully_shard(model, mesh=mesh),
        "FSDP": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
        "replicate": lambda model: replicate(model, ignored_modules=[model[0]]),
        "DTensor": lambda model: distribute_module(model, mesh),
        "DDP": DistributedDataParallel,
        "checkpoint": lambda model: Checkpointed(DistributedDataParallel(model), is_reentrant=False),
        "reentrant": lambda model: Checkpointed(DistributedDataParallel(model), is_reentrant=True),
        "none": lambda model: model,
    }
    for name, wrap in wrappers.items():
        with tierstore.open(folder / f"{name}-{dist.get_rank()}", ddr="2MiB") as store:
            first, model = (nn.Sequential(nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(4, 1)) for _ in range(2))
            tierstore.convert(model, store)
            attempts = [
                lambda: wrap(model)(torch.tensor([[dist.get_rank()]])).sum().backward(),  # noqa: B023 - called at once
                lambda: tierstore.convert(wrap(first), store, prefix="first."),  # noqa: B023
            ]
            for number, attempt in enumerate(attempts):
                try:
                    attempt()
                    found[f"{name} {number}"] = f"trained {store['0'].state.step}"
                except (RuntimeError, ValueError) as error:
                    found[f"{name} {number}"] = str(error)
    return found


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, *, is_reentrant: bool) -> None:
        super().__init__()
        self.model, self.is_reentrant, self.ones = model, is_reentrant, torch.ones(1, requires_grad=True)

    def forward(self, ids: Tensor) -> Any:
        return checkpoint(lambda ids, _: self.model(ids), ids, self.ones, use_reentrant=self.is_reentrant)


def test_rows_are_not_trained_by_ranks_that_torch_brings_together(tmp_path: Path) -> None:
    for found in run(train_wrapped, 2, tmp_path, tmp_path):
        assert found.pop("none 0") == found.pop("none 1") == "trained 1"
        for name, told in found.items():
            if name.endswith("0"):
                assert "cannot be trained inside" in told or told.startswith("rows of the store"), (name, told)
            elif name.split()[0] in ("fully_shard", "FSDP", "replicate", "DTensor"):
                assert "nothing was converted" in told, (name, told)
