"""Inference stores: made of trained ones, row for row as torch packs them, looked up with its bits. What rows hold, and
what differs between versions and stores, against plain numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import tierstore
from tests.quantized import OPERATORS, packed
from tierstore import errors, optim
from tierstore.cli import main
from tierstore.exchange import export_store, import_files
from tierstore.exchange.rows import read_rows
from tierstore.ids import LFU, DynamicIds
from tierstore.offline.rows import diff, rows_of

ROWS = 3000
DIM = 20
WRITTEN = torch.arange(0, ROWS, 3)
TARGETS = ["int8", "int4", "float16", "bfloat16"]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SMALL = {"ddr": "480KiB", "threads": 1}
every_dtype = pytest.mark.parametrize("dtype", ["int8", "int4"])
ALL = torch.arange(ROWS)


def table_config(name: str, **fields: Any) -> tierstore.TableConfig:
    fields = {"num_embeddings": ROWS, "embedding_dim": DIM, "optimizer": optim.RowWiseAdagrad(lr=0.1)} | fields
    return tierstore.TableConfig(name=name, init=tierstore.init.Normal(std=0.5, seed=7), **fields)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "store"
    with tierstore.open(directory, keep=2, **SMALL) as store:
        for seed, name in enumerate(("item", "user")):
            generator = torch.Generator().manual_seed(seed)
            store.create_table(table_config(name)).write(WRITTEN, torch.randn(len(WRITTEN), DIM, generator=generator))
        store.commit(extra={"step": 1})
        store["item"].write(WRITTEN[:5], torch.ones(5, DIM))
        store.commit(extra={"step": 2}, tensors={"dense": torch.arange(3.0)})
    return directory


def rows(directory: Path, name: str = "item", **settings: Any) -> Tensor:
    with tierstore.open(directory, mode="r", **(SMALL | settings)) as store:
        return store[name].read(ALL)


def stored(directory: Path, name: str = "item") -> Tensor:
    with tierstore.open(directory, mode="r", **SMALL) as store:
        return torch.from_numpy(read_rows(store[name], 0, ROWS).weights)


def converted(before: Tensor, dtype: str) -> Tensor:
    return before.to(HALVES[dtype]) if dtype in HALVES else OPERATORS[dtype][1](packed(before, dtype))


@pytest.mark.parametrize("dtype", TARGETS)
def test_every_row_is_converted_as_torch_converts_it(source, tmp_path, dtype):
    shown: list[tuple[int, int]] = []
    report = tierstore.quantize(source, tmp_path / "new", dtype=dtype, progress=lambda *pair: shown.append(pair))
    assert [each[1:] for each in report.tables] == [("float32", dtype, len(WRITTEN))] * 2
    assert report.version == 2
    assert report.bytes_after < report.bytes_before
    assert shown[-1][0] == shown[-1][1] > 0
    for name in ("item", "user"):
        before = rows(source, name)
        assert torch.equal(rows(tmp_path / "new", name), converted(before, dtype))
        assert dtype in HALVES or torch.equal(stored(tmp_path / "new", name), packed(before, dtype))
    with tierstore.open(tmp_path / "new", mode="r", **SMALL) as store:
        assert (store.version, store.extra, store["user"].layout.state_dim) == (2, {"step": 2}, 0)
        assert torch.equal(store.tensors()["dense"], torch.arange(3.0))
        store["item"].read(ALL)
        assert (store.stats().ssd.hits, store.stats().ssd.misses) == (len(WRITTEN), ROWS - len(WRITTEN))
        assert store.verify().rows == 2 * len(WRITTEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert tierstore.quantize(source, tmp_path / "old", dtype=dtype, version=1).version == 1
    with tierstore.open(tmp_path / "old", mode="r", **SMALL) as store:
        assert (store.version, store.extra) == (1, {"step": 1})
        assert torch.equal(store["item"].read(ALL), converted(rows(source, version=1), dtype))


@every_dtype
def test_first_values_depend_on_seed_and_row_only(source, tmp_path, dtype):
    with tierstore.open(tmp_path / "fresh", **SMALL) as store:
        fresh = store.create_table(table_config("item", dtype=dtype, optimizer=optim.SGD()))
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
        shuffled = fresh.read(order)
    tierstore.quantize(source, tmp_path / "new", dtype=dtype)
    untouched = ALL % 3 > 0
    found = rows(tmp_path / "new", ddr="64MiB", threads=2)
    assert torch.equal(found[untouched], shuffled[order.argsort()][untouched])
    assert not torch.equal(found[~untouched], shuffled[order.argsort()][~untouched])


def bags(seed: int, count: int = 2000) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, offsets with the last one, per-sample weights)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (count,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator)
    return ids, offsets, torch.randn(len(ids), generator=generator)


@every_dtype
@pytest.mark.parametrize(
    "settings", [SMALL | {"policy": "lfu"}, {"ddr": "64MiB", "threads": 3}], ids=["small", "large"]
)
def test_pooled_lookups_have_torchs_bits_whatever_the_tiers(source, tmp_path, dtype, settings):
    tierstore.quantize(source, tmp_path / "new", dtype=dtype)
    weights = packed(rows(source), dtype)
    plain, lookup = OPERATORS[dtype][1:]
    ids, offsets, scale = bags(0)
    with tierstore.open(tmp_path / "new", mode="r", **settings) as store:
        pooled = store["item"].pooled
        expected = lookup(weights, ids, offsets, False, 0, False, None, include_last_offset=True)
        assert torch.equal(pooled(ids, offsets), expected)
        weighted = lookup(weights, ids, offsets, False, 0, False, scale, include_last_offset=True)
        assert torch.equal(pooled(ids, offsets, per_sample_weights=scale), weighted)
        assert torch.equal(pooled(ids, offsets, mode="mean"), expected / offsets.diff().clamp(min=1)[:, None])
        bag = torch.nn.functional.embedding_bag
        largest = bag(ids, plain(weights), offsets, mode="max", include_last_offset=True)
        assert torch.equal(pooled(ids, offsets, mode="max"), largest)
        assert bool(store.stats().ddr.split_batches) == (settings["ddr"] == "480KiB")


def test_modules_prefetching_and_gradients_of_weights(source, tmp_path):
    dtype = "int8"
    tierstore.quantize(source, tmp_path / "new", dtype="int8", tables=["item"])
    weights, plain = packed(rows(source), dtype), rows(source, "user")
    (ids, offsets, scale), bag = bags(0, 50), torch.nn.functional.embedding_bag
    one, other = scale.clone().requires_grad_(), scale.clone().requires_grad_()
    with tierstore.open(tmp_path / "new", mode="r", **SMALL) as store:
        assert (store["item"].config.dtype, store["user"].config.dtype) == (dtype, "float32")
        collection = tierstore.TieredEmbeddingBagCollection(store)
        batch = tierstore.KeyedJaggedTensor(["item", "user"], ids.repeat(2), lengths=offsets.diff().repeat(2))
        for each in tierstore.prefetch([batch] * 3, collection, depth=2):
            out = collection(each)
            assert torch.equal(out["item"], OPERATORS[dtype][2](weights, ids, offsets, include_last_offset=True))
            sums = bag(ids, plain, offsets, mode="sum", include_last_offset=True)
            assert torch.allclose(out["user"], sums, atol=1e-5)
        module = tierstore.TieredEmbeddingBag(store["item"], mode="sum", include_last_offset=True)
        module(ids, offsets, one).square().sum().backward()
    plain = OPERATORS[dtype][1](weights)
    expected = bag(ids, plain, offsets, mode="sum", per_sample_weights=other, include_last_offset=True)
    expected.square().sum().backward()
    assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-3), "of a store opened for reading"


def test_training_and_device_memory_are_refused_before_any_table_changes(source, tmp_path):
    tierstore.quantize(source, tmp_path / "new", dtype="int4", tables=["user"])
    refusal = "'user' has int4 rows, which are not supported with hbm; open"
    for mode in ("r", "w"):
        with pytest.raises(errors.TableError, match=refusal):
            tierstore.open(tmp_path / "new", mode=mode, hbm="1MiB", **SMALL)
    with tierstore.open(tmp_path / "other", hbm="1MiB", **SMALL) as store:
        with pytest.raises(errors.TableError, match=refusal):
            store.create_table(table_config("user", dtype="int4", optimizer=optim.SGD()))
        assert not store.tables
    with tierstore.open(tmp_path / "new", **SMALL) as store:
        before = store["item"].read(ALL)
        features = tierstore.KeyedJaggedTensor(["item", "user"], ALL[:6], lengths=torch.ones(6, dtype=torch.int64))
        out = tierstore.TieredEmbeddingBagCollection(store)(features).values()
        with pytest.raises(errors.ReadOnlyError, match="'user' has int4 rows, which are looked up, not trained"):
            out.sum().backward()
        assert torch.equal(store["item"].read(ALL), before)
        assert store["item"].state.step == 0


@pytest.mark.parametrize("half", HALVES)
def test_rows_of_16_bits_are_packed_from_their_own_values(tmp_path, half):
    with tierstore.open(tmp_path / "half", **SMALL) as store:
        table = store.create_table(table_config("item", dtype=half))
        table.write(WRITTEN, torch.randn(len(WRITTEN), DIM).to(HALVES[half]))
        before = table.read(WRITTEN).float()
        store.commit()
    tierstore.quantize(tmp_path / "half", tmp_path / "new", dtype="int8")
    assert torch.equal(stored(tmp_path / "new")[WRITTEN], packed(before, "int8"))
    tierstore.quantize(tmp_path / "half", tmp_path / "same", dtype=half)
    assert torch.equal(rows(tmp_path / "same"), rows(tmp_path / "half"))


@pytest.mark.parametrize(
    ("dtype", "value"), [("int8", np.nan), ("int4", 70000.0), ("float16", -70000.0), ("bfloat16", np.inf)]
)
def test_a_row_that_does_not_fit_is_named_and_nothing_is_left(tmp_path, dtype, value):
    with tierstore.open(tmp_path / "store", **SMALL) as store:
        table = store.create_table(table_config("item"))
        table.write(ALL, torch.ones(ROWS, DIM))
        table.write(torch.tensor([1234]), torch.full((1, DIM), value))
        store.commit()
    with pytest.raises(ValueError, match=f"row 1234 of table 'item' holds NaN, infinity or .* too large for {dtype}"):
        tierstore.quantize(tmp_path / "store", tmp_path / "new", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@every_dtype
def test_an_export_is_what_torchs_operators_take(source, tmp_path, dtype):
    tierstore.quantize(source, tmp_path / "new", dtype=dtype)
    key = "embedding_bags.item.weight"
    export_store(tmp_path / "new", tmp_path / "new.safetensors")
    assert torch.equal(load_file(tmp_path / "new.safetensors")[key], packed(rows(source), dtype))
    with pytest.raises(ValueError, match="import what they were made from, and quantize that"):
        import_files(tmp_path / "copy", [tmp_path / "new.safetensors"])
    export_store(source, tmp_path / "plain.safetensors")
    with pytest.raises(errors.TableError, match=f"table 'item', whose rows are {dtype}: import it as float32 into"):
        import_files(tmp_path / "new", [tmp_path / "plain.safetensors"])


MANY = 70_000  # more than are read at a time


@pytest.fixture
def versions(tmp_path):
    """By version of the store in ``tmp_path / "shop"``: of "item" all rows, of "user" rows by id, rows ever written."""
    draw, users, found = np.random.default_rng(3), {}, {}
    with tierstore.open(tmp_path / "shop", ddr="8MiB", keep=5) as store:
        for name, ids in (("item", None), ("user", DynamicIds(eviction=LFU())), ("gone", None)):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=MANY, embedding_dim=4, ids=ids))
        items = store["item"].first_values(torch.arange(MANY)).numpy()
        for version in (1, 2, 3):
            ids = draw.choice(MANY, 69_000 if version == 1 else 50, replace=False)
            items[ids], items[ids[:3]], items[ids[3 : version + 1], 1] = draw.normal(size=(len(ids), 4)), 0, np.nan
            store["item"].write(torch.from_numpy(ids), torch.from_numpy(items[ids]))
            own = torch.arange(version, 3 * version) * 2**40 - 5
            store["user"].admit(own.repeat_interleave(torch.arange(len(own)) + 1))
            store["user"].write(own, torch.full((len(own), 4), float(version)))
            store["user"].evict(own[:1])
            users = users | dict.fromkeys(own.tolist()[1:], version)
            users.pop(int(own[0]), None)
            kind = torch.int64 if version == 1 else torch.float32
            dense = {"n": torch.tensor(version), "nan": torch.tensor(np.nan), "type": torch.ones(1, dtype=kind)}
            store.commit(tensors={**dense, f"w{version}": torch.ones(1)})
            found[version] = items.copy(), users, torch.cat([*store["item"].written()]).numpy()
    return found


def test_rows_are_counted_and_measured_as_numpy_does(versions, tmp_path, capsys):
    items, users, written = versions[3]
    norms = np.linalg.norm(items[written].astype(np.float64), axis=1)
    found, bad = rows_of(str(tmp_path / "shop")), written[np.isnan(norms)].tolist()
    quantiles = found["item"].pop("norms")
    assert [*quantiles.values()] == pytest.approx(np.nanquantile(norms, (0, 0.5, 0.9, 0.99, 1)), rel=1e-12)
    counts = {"rows": MANY, "never_trained": MANY - len(written), "zero": np.count_nonzero(norms == 0)}
    assert found["item"].pop("most_used").startswith("not counted: ")
    assert found["item"] == counts | {"not_finite": 1, "not_finite_ids": bad}
    assert (found["gone"]["norms"], found["user"]["never_trained"]) == ({}, MANY - len(users))
    assert found["user"]["most_used"][0] == (5 * 2**40 - 5, 7)
    assert main(["inspect", "--rows", "--json", str(tmp_path / "shop@1")]) == 0
    assert json.loads(capsys.readouterr().out)["item"]["never_trained"] == 1000


@pytest.mark.parametrize("is_copy", [False, True])
def test_differences_are_those_of_numpy(versions, tmp_path, capsys, is_copy):
    """Within a store by what was written since; from a copy that has gone on by itself, by all rows."""
    shop, before = str(tmp_path / "shop"), str(tmp_path / "shop@1")
    if is_copy:
        with tierstore.open(shop, mode="r", ddr="8MiB") as store:
            store.backup(before := str(tmp_path / "copy"))
        with tierstore.open(before, ddr="8MiB", keep=5) as store:
            store.rollback(1)
            store.create_table(tierstore.TableConfig(name="other", num_embeddings=3, embedding_dim=2))
            store.commit(tensors=store.tensors())
        with tierstore.open(shop, ddr="8MiB", keep=5) as store:
            store.drop_table("gone")
            store.change_table("item", name="items", feature_names=["item"], num_embeddings=MANY + 7)
    (items, users, _), (others, own, _), found = versions[1], versions[3], diff(before, shop)
    by, both = np.linalg.norm(others.astype(np.float64) - items, axis=1), users.keys() & own.keys()
    item, user = found["tables"].pop("items" if is_copy else "item"), found["tables"].pop("user")
    assert item["changed"] == np.count_nonzero((items.view(np.int32) != others.view(np.int32)).any(axis=1))
    largest = np.argsort(-np.nan_to_num(by, nan=np.inf), kind="stable")[:10].tolist()
    assert item["largest_changes"] == [(each, pytest.approx(by[each]) if by[each] > 0 else "nan") for each in largest]
    grown = {"name": ["item", "items"], "num_embeddings": [MANY, MANY + 7]} if is_copy else {}
    changed = {"added": len(own) - len(both), "removed": len(users) - len(both)}
    changed["changed"] = sum(users[each] != own[each] for each in both)
    assert (item["config"], user | changed) == (grown, user)
    names = [found[f"{what}_{how}"] for what in ("tables", "tensors") for how in ("added", "dropped")]
    assert names == [[], ["gone", "other"] if is_copy else [], ["w3"], ["w1"]]
    assert (found["tables"], found["tensors_changed"]) == ({}, ["n", "type"])
    assert main(["diff", shop, f"{shop}@3"]) == 0
    assert capsys.readouterr().out == f"before: {shop}@3\nafter: {shop}@3\n"
    with tierstore.open(tmp_path / "fixed", ddr="8MiB") as store:
        config = tierstore.TableConfig(name="user", num_embeddings=9, embedding_dim=4)
        store.create_table(config).write(torch.arange(3), torch.ones(3, 4))
        store.commit()
    user = diff(shop, str(tmp_path / "fixed"))["tables"]["user"]
    assert (user["added"], user["removed"]) == (3, len(own))
