"""Every wrong use gets its own clear error, and nothing is lost by it."""

import copy
import inspect
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tierstore
from tierstore import errors, optim

WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
CONFIG = tierstore.TableConfig(name="items", num_embeddings=100, embedding_dim=4)


@pytest.fixture
def store(store_dir: Path) -> Any:
    with tierstore.open(store_dir, ddr="1MiB") as opened:
        opened.create_table(CONFIG)
        yield opened


@pytest.mark.parametrize("row", [-1, 100, 2**40, -(2**40)])
def test_ids_out_of_range(store: tierstore.Store, row: int) -> None:
    ids, table = torch.tensor([3, row]), store["items"]
    for use in (
        lambda: table.read(ids),
        lambda: table.write(ids, torch.zeros(2, 4)),
        lambda: table.pooled(ids, torch.tensor([0, 2])),
        lambda: tierstore.TieredEmbeddingBag(table)(ids, torch.tensor([0])),
    ):
        with pytest.raises(ValueError, match=rf"id {row} is not a row of table 'items': ids are in \[0, 100\)"):
            use()
    assert table.pool.pins.num_pinned == 0


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 2], TypeError, r"must be a Tensor, not list; torch\.as_tensor\((ids|input|offsets)\) makes one"),
        (np.array([0]), TypeError, "must be a Tensor, not ndarray; torch.as_tensor"),
        (torch.tensor([0.0]), TypeError, r"be int64 or int32, not .*float32; (ids|offsets)\.long\(\) converts"),
        (torch.ones((1, 1, 1), dtype=torch.int64), ValueError, r"must be 1-D.*, not (of shape )?\(1, 1, 1\); .*shape"),
        (torch.tensor(1), ValueError, r"must be 1-D.*, not (of shape )?\(\); .*shape"),
        (torch.zeros(1, device="meta").long(), ValueError, r"is on meta; .*: pass (ids|offsets)\.cpu\(\), or"),
    ],
)
def test_ids_and_offsets_of_another_kind(
    store: tierstore.Store, ids: Any, error: type[Exception], message: str
) -> None:
    table, one, start = store["items"], torch.ones(1, dtype=torch.int64), torch.tensor([0])
    bag, ending = (tierstore.TieredEmbeddingBag(table, include_last_offset=last) for last in (False, True))
    uses = [
        lambda: table.read(ids),
        lambda: table.write(ids, torch.zeros(1, 4)),
        lambda: table.pooled(ids, start),
        lambda: table.pooled(one, ids),
        lambda: bag(ids, start),
        lambda: bag(one, ids),
        lambda: bag.prepare((one, ids)),
        lambda: ending(one, ids),
    ]
    if not isinstance(ids, torch.Tensor) or ids.dtype.is_floating_point:  # of any shape, as torch.nn.Embedding's
        uses.append(lambda: tierstore.TieredEmbedding(table)(ids))
    for use in uses:
        with pytest.raises(error, match=message):
            use()
    assert table.pool.pins.num_pinned == 0


def test_rows_of_another_kind_write_nothing(store: tierstore.Store) -> None:
    ids = torch.tensor([1, 2])
    before = store["items"].read(ids)
    for rows, message in (
        (torch.zeros(2, 4).double(), "rows must be float32, float16 or bfloat16"),
        (torch.zeros(2, 5), r"rows must be \[2, 4\], not \[2, 5\]"),
        (torch.zeros(3, 4), r"rows must be \[2, 4\], not \[3, 4\]"),
        ([[0.0] * 4] * 2, "not list"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            store["items"].write(ids, rows)  # type: ignore[arg-type]
    assert torch.equal(store["items"].read(ids), before)


@pytest.mark.parametrize("hbm", [0, "1MiB"])
@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ([], "there are none"),
        ([1, 3], "index 0 is 1"),
        ([0, 2], "index 1 is 2"),
        ([0, 2, 1, 3], "index 2 is 1"),
        ([0, 4], "index 1 is 4"),
        ([-1, 3], "index 0 is -1"),
        ([0, 2**62, 3], f"index 1 is {2**62}"),
        ([2**32, 3], f"index 0 is {2**32}"),  # int32, in which device memory has them, would take it for 0
        ([0, 2**32 + 2, 3], f"index 1 is {2**32 + 2}"),
    ],
)
def test_offsets_that_do_not_fit(hbm: Any, offsets: list[int], wrong: str) -> None:
    given = torch.tensor(offsets, dtype=torch.int64)
    with tierstore.open(cold="memory", ddr="1MiB", hbm=hbm, device="cpu") as store:
        table = store.create_table(CONFIG)
        for _ in range(2):  # a table that was looked up has a shorter way
            message = f"start at 0, never descend and end at the number of ids, 3; .*{wrong}"
            with pytest.raises(ValueError, match=message):
                table.pooled(torch.tensor([1, 2, 3]), given)
            table.pooled(torch.tensor([1, 2, 3]), torch.tensor([0, 3]))


def test_offsets_and_weights_of_modules_that_do_not_fit(store: tierstore.Store) -> None:
    table, ids, offsets = store["items"], torch.tensor([1, 2]), torch.tensor([0, 2])
    for last, ends in ((True, "end at"), (False, "not exceed")):
        bag = tierstore.TieredEmbeddingBag(table, include_last_offset=last)
        with pytest.raises(ValueError, match=f"never descend and {ends} the number of ids, 2; .* 1 is 4"):
            bag(ids, torch.tensor([0, 4]))
    for error, message, given in (
        (ValueError, 'goes with mode="sum" only', {"mode": "mean", "per_sample_weights": torch.ones(2)}),
        (ValueError, r"must be \[2\]", {"per_sample_weights": torch.ones(3)}),
        (TypeError, r"per_sample_weights\.float\(\) converts", {"per_sample_weights": torch.ones(2).double()}),
        (ValueError, "mode='median' is not one of sum, mean, max", {"mode": "median"}),
    ):
        with pytest.raises(error, match=message):
            table.pooled(ids, offsets, **given)  # type: ignore[arg-type]
    scale: Any = [[1.0, 1.0]]
    with pytest.raises(TypeError, match="per_sample_weights must be a Tensor, not list"):
        tierstore.TieredEmbeddingBag(table)(ids[None], None, scale)


def test_a_read_only_store_cannot_be_changed(store: tierstore.Store, store_dir: Path) -> None:
    store["items"].write(torch.tensor([5]), torch.ones(1, 4))
    store.commit()
    store.close()
    with tierstore.open(store_dir, mode="r", ddr="1MiB") as readonly:
        table = readonly["items"]
        assert torch.equal(table.read(torch.tensor([5])), torch.ones(1, 4))
        for change in (
            lambda: table.write(torch.tensor([5]), torch.zeros(1, 4)),
            lambda: readonly.commit(),
            lambda: readonly.create_table(tierstore.TableConfig(name="x", num_embeddings=1, embedding_dim=1)),
        ):
            with pytest.raises(errors.ReadOnlyError, match='open it with mode="w"'):
                change()
        out = tierstore.TieredEmbeddingBag(table)(torch.tensor([[5]]))
        assert not out.requires_grad


def test_a_limit_of_address_space_is_named_and_nothing_is_lost(store: tierstore.Store, store_dir: Path) -> None:
    store.commit()
    store.close()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**28, before[1]))
    try:
        for folder in (store_dir, store_dir.parent / "new"):
            with pytest.raises(errors.TierstoreError, match=r"`ulimit -v` allows .* run `ulimit -v unlimited`"):
                tierstore.open(folder, ddr="1MiB", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    for folder, version in ((store_dir, 1), (store_dir.parent / "new", 0)):
        with tierstore.open(folder, ddr="1MiB") as again:
            assert again.version == version


def test_use_after_close(store: tierstore.Store) -> None:
    table = store["items"]
    bag = tierstore.TieredEmbeddingBag(table)
    out = bag(torch.tensor([[1]]))
    store.close()
    store.close()
    for use in (
        out.sum().backward,
        lambda: table.read(torch.tensor([1])),
        lambda: table.write(torch.tensor([1]), torch.zeros(1, 4)),
        lambda: bag(torch.tensor([[1]])),
        store.commit,
        store.stats,
        store.verify,
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            use()


@pytest.mark.parametrize("ddr", [0, 1000, "100KiB"])
def test_a_budget_too_small_names_what_is_needed(store_dir: Path, ddr: Any) -> None:
    with tierstore.open(store_dir, ddr=ddr) as store:
        table = store.create_table(CONFIG)
        with pytest.raises(errors.BudgetError, match="give at least") as caught:
            table.read(torch.tensor([1]))
    needed = str(caught.value).split("give at least ")[1]
    with tierstore.open(store_dir, ddr=needed.replace(" ", "")) as store:
        assert store["items"].read(torch.tensor([1])).shape == (1, 4)


def test_unknown_tables_and_tables_made_twice(store: tierstore.Store) -> None:
    with pytest.raises(errors.TableError, match="did you mean 'items'"):
        store["item"]
    with pytest.raises(errors.TableError, match="there are items"):
        store["zzz"]
    assert store.create_table(CONFIG) is store["items"]
    with pytest.raises(errors.TableError, match="choose another name"):
        store.create_table(tierstore.TableConfig(name="items", num_embeddings=100, embedding_dim=8))
    with pytest.raises(ValueError, match="Split the table by columns"):
        store.create_table(tierstore.TableConfig(name="wide", num_embeddings=10, embedding_dim=2**17))
    assert list(store.tables) == ["items"]


def test_arguments_of_other_libraries_are_told_what_there_is_instead(store: tierstore.Store) -> None:
    table = store["items"]
    for kind in (tierstore.TieredEmbeddingBag, tierstore.TieredEmbedding):
        with pytest.raises(TypeError, match=f"{kind.__name__} has no argument max_norm: rows are not renormalized"):
            kind(table, max_norm=1.0)
    with pytest.raises(TypeError, match='no argument data_type: dtype="float16"'):
        tierstore.TableConfig(name="a", num_embeddings=1, embedding_dim=1, data_type=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        tierstore.TableConfig(name="a", num_embeddings=1, embedding_dim=1, nothing=1)  # type: ignore[call-arg]
    assert "num_embeddings" in inspect.signature(tierstore.TableConfig).parameters


def test_checkpoints_say_what_they_take(store: tierstore.Store, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    rule = torch.optim.SGD(model.parameters())
    save: Any = tierstore.checkpoint.save
    for call in (save, tierstore.checkpoint.save_async, tierstore.checkpoint.load):
        with pytest.raises(TypeError, match=r"optimizers must be a list, as \[optimizer\], not SGD"):
            call(store, model, rule)
        with pytest.raises(TypeError, match=r"optimizers must be a list, not a dict; .* extra="):
            call(store, model, {"step": 7})
        with pytest.raises(TypeError, match=r"store must be an open store, .*, not str"):
            call("path", model)
    with pytest.raises(TypeError, match=r"tensors go into tensors= of Store\.commit"):
        save(store, model, extra={"a": torch.ones(1)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "a"}, "mode='a' is not one of r, w"),
        ({"policy": "mru"}, "policy='mru'"),
        ({"ddr": "lots"}, "ddr='lots' is not a size"),
        ({"ddr": -1}, "a size is not negative"),
        ({"hbm": "lots"}, "hbm='lots' is not a size"),
        ({"device": "tpu"}, "device='tpu' is no device"),
        ({"device": None}, "device=None is no device"),
        ({"device": "meta"}, "device='meta': rows live in memory of the CPU or of a CUDA device"),
        pytest.param({"device": "cuda", "hbm": "1MiB"}, "sees no CUDA device here; give device=", marks=WITHOUT_CUDA),
        pytest.param({"device": "cuda"}, 'rows need memory on the GPU; give hbm="2GiB"', marks=pytest.mark.gpu),
        pytest.param({"device": "cuda:99", "hbm": "1MiB"}, "CUDA devices, from 0 on", marks=pytest.mark.gpu),
        ({"threads": 0}, r"threads=0 must be in \[1, 1024\]"),
    ],
)
def test_wrong_arguments_to_open(store_dir: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tierstore.open(store_dir, **arguments)
    assert not store_dir.exists()


WRONG_FIELDS: list[dict[str, Any]] = [
    {"name": ""}, {"num_embeddings": 0}, {"num_embeddings": 2**41}, {"num_embeddings": 1.5}, {"embedding_dim": 0},
    {"embedding_dim": True}, {"dtype": "float64"}, {"pooling": "none"}, {"feature_names": "abc"}, {"init": 0.0},
    {"feature_names": ("a", "a")}, {"optimizer": "sgd"}, {"name": "a\ud800"}, {"feature_names": ("b", "\udfff")},
]  # fmt: skip
WRONG_NUMBERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": -1.0}), (optim.Adam, {"betas": (0.9, 1.0)}), (optim.Adagrad, {"eps": float("nan")}),
    (tierstore.init.Uniform, {"low": 1.0, "high": 0.0}), (tierstore.init.Normal, {"std": -1.0}),
    (tierstore.init.Constant, {"value": float("inf")}), (optim.SGD, {"lr": "a"}), (optim.Adam, {"betas": "a"}),
    (tierstore.init.Normal, {"seed": "a"}),
]  # fmt: skip


def test_wrong_configs_name_the_field() -> None:
    right: dict[str, Any] = {"name": "t", "num_embeddings": 10, "embedding_dim": 4}
    for fields in WRONG_FIELDS:
        with pytest.raises((ValueError, TypeError), match=f"{next(iter(fields))}|Unicode"):
            tierstore.TableConfig(**(right | fields))
    for kind, numbers in WRONG_NUMBERS:
        with pytest.raises((ValueError, TypeError), match=f"{kind.__name__}.*{next(iter(numbers))}|="):
            kind(**numbers)


def test_numbers_of_numpy_are_taken_as_pythons(store_dir: Path) -> None:
    fields: dict[str, Any] = {"num_embeddings": np.int64(9), "embedding_dim": np.uint8(4)}
    fields |= {"init": tierstore.init.Uniform(np.float32(-1), np.float32(1), seed=np.int64(3))}  # type: ignore[arg-type]
    fields |= {"optimizer": optim.Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.75]))}  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"ddr": np.int64(2**20), "keep": np.int32(2), "threads": np.int64(1)}
    with tierstore.open(store_dir, **sizes) as store:
        config = store.create_table(tierstore.TableConfig(name="t", **fields)).config
    assert repr(config) == repr(tierstore.TableConfig.from_dict(config.to_dict()))
    assert "np." not in repr(config)
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert store["t"].config == config


def test_features_and_batches_that_do_not_fit(store: tierstore.Store) -> None:
    collection = tierstore.TieredEmbeddingBagCollection(store)
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="feature 'items' is missing from the batch"):
        collection(tierstore.KeyedJaggedTensor(["item"], one, lengths=one))
    with pytest.raises(ValueError, match=r"missing from the batch, which has .*; give it, or leave its table out of"):
        collection(tierstore.KeyedJaggedTensor(["a"], one, lengths=one))
    with pytest.raises(ValueError, match=r"the number of ids, 1; the one at index 1 is 2 .where lengths were given"):
        collection(tierstore.KeyedJaggedTensor(["items"], one, lengths=one * 2))
    with pytest.raises(ValueError, match="cannot be divided among 2 features; each has one a sample"):
        tierstore.KeyedJaggedTensor(["a", "b"], one, lengths=one)
    for lengths, message in ((one.float(), r"lengths\.long\(\) converts"), (one[0], "lengths must be 1-D")):
        with pytest.raises((TypeError, ValueError), match=message):
            tierstore.KeyedJaggedTensor(["items"], one, lengths=lengths)
    with pytest.raises(ValueError, match="one of the two"):
        tierstore.KeyedJaggedTensor(["a"], one)
    store.create_table(tierstore.TableConfig(name="b", num_embeddings=1, embedding_dim=1, feature_names=("items",)))
    with pytest.raises(errors.TableError, match="feature 'items' belongs to the tables"):
        tierstore.TieredEmbeddingBagCollection(store)


def test_what_is_no_batch_and_no_list_of_tables(store: tierstore.Store) -> None:
    collection: Any = tierstore.TieredEmbeddingBagCollection(store)
    jagged: Any = tierstore.KeyedJaggedTensor
    one = torch.ones(1, dtype=torch.int64)
    for batch in (one, {"items": one}, None, tierstore.JaggedTensor(one, lengths=one)):
        for use in (collection, collection.prepare):
            with pytest.raises(TypeError, match=rf"takes a KeyedJaggedTensor, not {type(batch).__name__}; make one"):
                use(batch)
    for name, given in {"values": ([1],), "weights": (one, [1.0]), "lengths": (one, None, [1])}.items():
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, not list"):
            jagged(["items"], *given, **({} if name == "lengths" else {"lengths": one}))
    with pytest.raises(TypeError, match="tables must be a list of names, not the str 'items'"):
        tierstore.TieredEmbeddingBagCollection(store, tables="items")
    with pytest.raises(TypeError, match="keys must be a list of names, not the str 'items'"):
        jagged("items", one, lengths=one)
    with pytest.raises(TypeError, match=r"store must be an open store, as tierstore\.open gives, not list"):
        tierstore.TieredEmbeddingBagCollection([store["items"]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tables names 'items' 2 times"):
        tierstore.TieredEmbeddingBagCollection(store, tables=["items", "items"])


def test_stores_tables_and_modules_are_not_pickled_or_copied(store: tierstore.Store, tmp_path: Path) -> None:
    table = store["items"]
    collection, bag = tierstore.TieredEmbeddingBagCollection(store), tierstore.TieredEmbeddingBag(table)
    for each in (store, table, bag, collection, torch.nn.Sequential(bag)):
        copies = (copy.deepcopy,) if each in (store, table) else ()  # a module's copy is one over the same tables
        for use in (pickle.dumps, *copies, lambda each: torch.save(each, tmp_path / "file")):
            with pytest.raises(TypeError, match="open the store again"):
                use(each)
    torch.save(bag.state_dict(), tmp_path / "file")
    assert pickle.loads(pickle.dumps(table.config)) == copy.deepcopy(table.config) == table.config
    assert copy.copy(bag)(torch.tensor([[1]])).equal(bag(torch.tensor([[1]])))


def test_lookups_under_transforms_of_torch_are_refused(store: tierstore.Store) -> None:
    table = store["items"]
    bag, collection = tierstore.TieredEmbeddingBag(table), tierstore.TieredEmbeddingBagCollection(store)
    ids, offsets, scale = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.ones(2)
    features = tierstore.KeyedJaggedTensor(["items"], ids, scale, offsets=offsets)
    for transform, use, given in (
        (torch.func.grad, lambda scale: bag(ids, offsets[:1], scale).sum(), scale),
        (torch.func.grad, lambda scale: (collection(features).values() * scale).sum(), scale[:1]),
        (torch.func.vmap, lambda row: bag(row[None]), ids[:, None]),
        (torch.func.vmap, table.read, ids[:, None]),
        (torch.func.vmap, lambda row: table.pooled(row, torch.tensor([0, 1])), ids[:, None]),
    ):
        with pytest.raises(RuntimeError, match=r"not looked up under torch\.func's transforms"):
            transform(use)(given)
    assert table.pool.pins.num_pinned == 0
    pooled = bag(ids, offsets[:1]).detach()
    assert torch.func.grad(lambda x: (x * x).sum())(pooled).equal(2 * pooled)


def test_a_table_is_trained_as_it_is_served(store: tierstore.Store) -> None:
    table = store.create_table(tierstore.TableConfig(name="means", num_embeddings=9, embedding_dim=2, pooling="mean"))
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    mean = table.read(ids).mean(0, keepdim=True)
    for bag in (tierstore.TieredEmbeddingBag(table), tierstore.TieredEmbeddingBag(table, mode="mean")):
        assert torch.equal(bag(ids, offsets[:1]), mean)
    assert torch.equal(table.pooled(ids, offsets), mean)
    assert torch.equal(table.pooled(ids, offsets, mode="sum"), mean * 2)  # trains nothing, so nothing is at odds
    for mode in ("sum", "max"):
        with pytest.raises(ValueError, match=rf"leave mode out, or .* TableConfig\(pooling='{mode}'\)"):
            tierstore.TieredEmbeddingBag(table, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode='median' is not one of sum, mean, max"):
        tierstore.TieredEmbeddingBag(table, mode="median")  # type: ignore[arg-type]


def test_tables_cannot_be_made_while_rows_are_in_use(store: tierstore.Store) -> None:
    out = tierstore.TieredEmbeddingBag(store["items"])(torch.tensor([[1]]))
    new = tierstore.TableConfig(name="new", num_embeddings=1, embedding_dim=1)
    with pytest.raises(errors.TableError, match="an in-flight batch"):
        store.create_table(new)
    out.sum().backward()
    assert store.create_table(new).name == "new"
