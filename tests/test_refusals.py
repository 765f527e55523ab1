"""Wrong uses: a table of calls, the error of each and a key word of what it says. None changes anything."""

import contextlib
import copy
import pickle
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
import torch

import tierstore
from tierstore import errors, optim
from tierstore.errors import ClosedError, ReadOnlyError, StoreNotFoundError, TableError
from tierstore.offline.compaction import compact_store
from tierstore.offline.salvage import salvage
from tierstore.trace import TableTrace, Trace, write_trace

CONFIG = tierstore.TableConfig(name="items", num_embeddings=100, embedding_dim=4)
ONE, TWO, START = torch.tensor([1]), torch.tensor([1, 2]), torch.tensor([0])
EVERY = torch.arange(100)
Call = Callable[["Scene"], object]


def config(**changes: Any) -> tierstore.TableConfig:
    return tierstore.TableConfig(**{"name": "t", "num_embeddings": 10, "embedding_dim": 4, **changes})


class Scene:
    """What is used wrongly: a store open for writing with versions 2 and 3, a reader of it, others."""

    def __init__(self, folder: Path, held: contextlib.ExitStack) -> None:
        self.folder, self.directory, self.new = folder, folder / "store", folder / "new"
        closed = tierstore.open(folder / "closed", ddr="1MiB")
        self.closed, self.gone = closed, closed.create_table(CONFIG)
        self.lost = tierstore.TieredEmbeddingBag(self.gone)
        self.out = self.lost(ONE[None])
        closed.commit()
        closed.close()
        self.memory = held.enter_context(tierstore.open(cold="memory", ddr="1MiB", threads=1))
        for table in (CONFIG, config(feature_names=("items",))):
            self.memory.create_table(table)
        self.store = held.enter_context(tierstore.open(self.directory, ddr="1MiB", keep=2))
        self.table = self.store.create_table(CONFIG)
        for _ in range(3):
            self.store.commit()
        self.reader = held.enter_context(tierstore.open(self.directory, mode="r", ddr="1MiB"))
        tierstore.quantize(self.directory, folder / "half", dtype="float16")
        tierstore.quantize(self.directory, folder / "int8", dtype="int8")
        self.int8 = held.enter_context(tierstore.open(folder / "int8", ddr="1MiB"))["items"]
        self.bag = tierstore.TieredEmbeddingBag(self.table)
        self.ending = tierstore.TieredEmbeddingBag(self.table, include_last_offset=True)
        self.collection: Any = tierstore.TieredEmbeddingBagCollection(self.store)
        self.model = torch.nn.Linear(1, 1)
        self.rule = torch.optim.SGD(self.model.parameters())
        (folder / "file").touch()
        (folder / "there.npz").touch()
        (folder / "link.npz").symlink_to("nowhere")
        (folder / "notes").mkdir()
        (folder / "notes" / "notes.txt").touch()

    def compact(self, **tables: list[int]) -> object:
        entries = {name: TableTrace(np.array(ids, np.int64), np.array([0, len(ids)])) for name, ids in tables.items()}
        write_trace(Trace(tables=entries, batch_samples=2), self.folder / "trace.npz", force=True)
        return compact_store(self.directory, self.new, trace=self.folder / "trace.npz")

    def state(self) -> object:
        assert self.table.pool.pins.num_pinned == 0
        files = sorted(str(path) for path in self.folder.rglob("*") if path.name != "trace.npz")
        return [*self.store.tables], self.store.versions, self.store.changed_tables, self.store.recorder, files


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with contextlib.ExitStack() as held:
        yield Scene(tmp_path_factory.mktemp("refusals"), held)


def jagged(*names: str, **given: Any) -> tierstore.KeyedJaggedTensor:
    return tierstore.KeyedJaggedTensor(list(names), **({"values": ONE, "lengths": ONE} | given))


def opened(**arguments: Any) -> Call:
    return lambda s: tierstore.open(s.new, **arguments)


def quantized(**arguments: Any) -> Call:
    return lambda s: tierstore.quantize(s.directory, s.new, **arguments)


Errors = type[Exception] | tuple[type[Exception], ...]
WRONG_IDS: Final[list[tuple[Any, Errors, str]]] = [
    ([1, 2], TypeError, r"must be a Tensor, not list; torch\.as_tensor\((ids|input|offsets)\) makes one"),
    (np.array([0]), TypeError, "must be a Tensor, not ndarray; torch.as_tensor"),
    (torch.tensor([0.0]), TypeError, r"be int64 or int32, not .*float32; (ids|offsets)\.long\(\) converts"),
    (torch.ones((1, 1, 1)).long(), ValueError, r"must be 1-D.*, not (of shape )?\(1, 1, 1\); .*shape"),
    (torch.tensor(1), ValueError, r"must be 1-D.*, not (of shape )?\(\); .*shape"),
    (torch.zeros(1, device="meta").long(), ValueError, r"is on meta; .*: pass (ids|offsets)\.cpu\(\), or"),
]
USES_OF_IDS: Final[list[Callable[[Scene, Any], object]]] = [
    lambda s, ids: s.table.read(ids),
    lambda s, ids: s.table.write(ids, torch.zeros(1, 4)),
    lambda s, ids: s.table.pooled(ids, torch.tensor([0, 1])),
    lambda s, ids: s.bag(ids, START),
]
USES_OF_OFFSETS: Final[list[Callable[[Scene, Any], object]]] = [
    lambda s, offsets: s.table.pooled(ONE, offsets),
    lambda s, offsets: s.bag(ONE, offsets),
    lambda s, offsets: s.bag.prepare((ONE, offsets)),
    lambda s, offsets: s.ending(ONE, offsets),
]
CHANGES: Final[list[Call]] = [
    lambda s: s.reader["items"].write(ONE, torch.zeros(1, 4)),
    lambda s: s.reader.commit(),
    lambda s: s.reader.rollback(2),
    lambda s: s.reader.create_table(config()),
]
AFTER_CLOSE: Final[list[Call]] = [
    lambda s: s.out.sum().backward(),
    lambda s: s.gone.read(ONE),
    lambda s: s.gone.write(ONE, torch.zeros(1, 4)),
    lambda s: s.lost(ONE[None]),
    lambda s: s.closed.commit(),
    lambda s: s.closed.stats(),
    lambda s: s.closed.verify(),
    lambda s: s.closed.backup(s.new),
]
TRANSFORMED: Final[list[Call]] = [
    lambda s: torch.func.grad(lambda scale: s.bag(TWO, START, scale).sum())(torch.ones(2)),
    lambda s: torch.func.vmap(lambda row: s.bag(row[None]))(TWO[:, None]),
    lambda s: torch.func.vmap(s.table.read)(TWO[:, None]),
    lambda s: torch.func.vmap(lambda row: s.table.pooled(row, torch.tensor([0, 1])))(TWO[:, None]),
]
NOT_COPIED: Final[list[Call]] = [
    *(lambda s, name=name: pickle.dumps(getattr(s, name)) for name in ("store", "table", "bag", "collection")),
    *(lambda s, name=name: copy.deepcopy(getattr(s, name)) for name in ("store", "table")),
    lambda s: torch.save(torch.nn.Sequential(s.bag), s.folder / "file"),
]
WRONG_FIELDS: Final[list[dict[str, Any]]] = [
    {"name": ""}, {"num_embeddings": 0}, {"num_embeddings": 2**41}, {"num_embeddings": 1.5}, {"embedding_dim": 0},
    {"embedding_dim": True}, {"dtype": "float64"}, {"pooling": "none"}, {"feature_names": "abc"}, {"init": 0.0},
    {"feature_names": ("a", "a")}, {"optimizer": "sgd"}, {"name": "a\ud800"}, {"feature_names": ("b", "\udfff")},
]  # fmt: skip
WRONG_NUMBERS: Final[list[tuple[Any, str, Any]]] = [
    (optim.SGD, "lr", -1.0), (optim.SGD, "lr", "a"), (optim.Adam, "betas", (0.9, 1.0)), (optim.Adam, "betas", "a"),
    (optim.Adagrad, "eps", float("nan")), (tierstore.init.Uniform, "low", 1.0), (tierstore.init.Normal, "std", -1.0),
    (tierstore.init.Normal, "seed", "a"), (tierstore.init.Constant, "value", float("inf")),
]  # fmt: skip

REFUSALS: Final[list[tuple[Call, Errors, str]]] = [
    # ids, offsets, weights and rows
    *(
        (lambda s, use=use, ids=ids: use(s, ids), error, rf"id {ids[0]} is not a row of .*: ids are in \[0, 100\)")
        for ids in (torch.tensor([row]) for row in (-1, 100, 2**40))
        for use in (
            *USES_OF_IDS,
            lambda s, ids: tierstore.TieredEmbedding(s.table)(ids),
            lambda s, ids: s.collection(jagged("items", values=ids)),
        )
        for error in (ValueError, IndexError)
    ),
    *(
        (lambda s, use=use, ids=ids: use(s, ids), error, message)
        for ids, error, message in WRONG_IDS
        for use in [*USES_OF_IDS, *USES_OF_OFFSETS]
    ),
    (lambda s: tierstore.TieredEmbedding(s.table)(torch.ones(1)), TypeError, "be int64 or int32, not .*float32"),
    (lambda s: s.table.write(TWO, torch.zeros(2, 4).double()), TypeError, "rows must be float32, float16 or bfloat16"),
    (lambda s: s.table.write(TWO, torch.zeros(2, 5)), ValueError, r"rows must be \[2, 4\], not \[2, 5\]"),
    (lambda s: s.table.write(TWO, [[0.0] * 4] * 2), TypeError, "not list"),
    (lambda s: s.ending(TWO, torch.tensor([0, 4])), ValueError, "descend and end at the number of ids, 2; .* 1 is 4"),
    (lambda s: s.bag(TWO, torch.tensor([0, 4])), ValueError, "descend and not exceed the number of ids, 2; .* 1 is 4"),
    (lambda s: s.table.pooled(TWO, START, mode="median"), ValueError, "mode='median' is not one of sum, mean, max"),
    (
        lambda s: s.table.pooled(TWO, torch.tensor([0, 2]), mode="mean", per_sample_weights=torch.ones(2)),
        ValueError, 'goes with mode="sum" only',
    ),
    (
        lambda s: s.table.pooled(TWO, torch.tensor([0, 2]), per_sample_weights=torch.ones(3)),
        ValueError, r"must be \[2\]",
    ),
    (
        lambda s: s.table.pooled(TWO, torch.tensor([0, 2]), per_sample_weights=torch.ones(2).double()),
        TypeError, r"per_sample_weights\.float\(\) converts",
    ),
    *((call, RuntimeError, r"not looked up under torch\.func's transforms") for call in TRANSFORMED),
    # batches of features
    (lambda s: s.collection(jagged("item")), ValueError, "feature 'items' is missing from the batch"),
    (
        lambda s: s.collection(tierstore.KeyedJaggedTensor([], ONE[:0], lengths=ONE[:0])),
        ValueError, "feature 'items' is missing from the batch",
    ),
    (
        lambda s: s.collection(jagged("items", lengths=ONE * 2)),
        ValueError, "the number of ids, 1; the one at index 1 is 2 .where lengths were given",
    ),
    (lambda s: jagged("a", "b"), ValueError, "cannot be divided among 2 features; each has one a sample"),
    (lambda s: jagged("a", lengths=ONE.float()), TypeError, r"lengths\.long\(\) converts"),
    (lambda s: jagged("a", lengths=None), ValueError, "one of the two"),
    (lambda s: tierstore.KeyedJaggedTensor(["a"], [1], lengths=ONE), TypeError, "values must be a Tensor, not list"),
    (lambda s: tierstore.KeyedJaggedTensor("items", ONE, lengths=ONE), TypeError, "not the str 'items'"),
    *(
        (lambda s, batch=batch, name=name: getattr(s.collection, name)(batch), TypeError, "takes a KeyedJaggedTensor")
        for batch in (ONE, {"items": ONE}, None, tierstore.JaggedTensor(ONE, lengths=ONE))
        for name in ("forward", "prepare")
    ),
    (lambda s: type(s.collection)(s.store, tables="items"), TypeError, "must be a list of names, not the str 'items'"),
    (lambda s: type(s.collection)([s.table]), TypeError, r"must be an open store, as tierstore\.open gives, not list"),
    (lambda s: type(s.collection)(s.memory), TableError, "feature 'items' belongs to the tables"),
    # modules and checkpoints
    (lambda s: type(s.bag)(s.table, mode="max"), ValueError, r"leave mode out, or .* TableConfig\(pooling='max'\)"),
    (
        lambda s: tierstore.TieredEmbedding(s.table).weight,
        AttributeError, r"emb\(torch.arange\(n\)\).*table.read\(ids\).*table.write",
    ),
    (lambda s: tierstore.TieredEmbedding(s.table).weigth, AttributeError, "has no attribute 'weigth'"),
    (lambda s: type(s.bag)(s.table, max_norm=1.0), TypeError, "no argument max_norm: rows are not renormalized"),
    *((call, TypeError, "open the store again") for call in NOT_COPIED),
    *(
        (lambda s, name=name, given=given: getattr(tierstore.checkpoint, name)(*given(s)), TypeError, message)
        for name in ("save", "save_async", "load")
        for given, message in (
            (lambda s: (s.store, s.model, s.rule), r"optimizers must be a list, as \[optimizer\], not SGD"),
            (lambda s: (s.store, s.model, {"step": 7}), r"optimizers must be a list, not a dict; .* extra="),
            (lambda s: ("path", s.model), r"store must be an open store, .*, not str"),
        )
    ),
    (lambda s: tierstore.checkpoint.save(s.store, s.model, extra={"a": ONE}), TypeError, "tensors go into tensors= of"),
    # tables
    (lambda s: s.store["item"], TableError, "did you mean 'items'"),
    (lambda s: s.store["zzz"], TableError, "there are items"),
    (lambda s: s.memory["d"], TableError, "no table 'd' in :memory:"),
    (lambda s: s.store.create_table(config(name="items")), TableError, "choose another name"),
    (
        lambda s: s.store.create_table(replace(CONFIG, optimizer=optim.SGD(lr=0.5))),
        TableError, r"create it with lr=0\.01, then set table\.learning_rate = 0\.5",
    ),
    (
        lambda s: s.store.create_table(replace(CONFIG, pooling="mean", num_embeddings=50)), TableError,
        r"num_embeddings: 100 there, 50 asked; pooling: 'sum' there, 'mean'.*change it by Store\.change_table",
    ),
    *(
        (lambda s, rate=rate: setattr(s.table, "learning_rate", rate), ValueError, "learning_rate=")
        for rate in (float("nan"), -1.0, float("inf"))
    ),
    (lambda s: s.store.create_table(config(embedding_dim=2**17)), ValueError, "Split the table by columns"),
    (lambda s: config(data_type=1), TypeError, 'no argument data_type: dtype="float16"'),
    (lambda s: config(nothing=1), TypeError, "unexpected keyword argument 'nothing'"),
    (lambda s: config(dtype="int8", optimizer=optim.Adam()), ValueError, "goes without optimizer state.*leave optimi"),
    *(
        (lambda s, fields=fields: config(**fields), (ValueError, TypeError), f"{next(iter(fields))}|Unicode")
        for fields in WRONG_FIELDS
    ),
    *(
        (lambda s, kind=kind, name=name, value=value: kind(**{name: value}), (ValueError, TypeError), f"{name}|=")
        for kind, name, value in WRONG_NUMBERS
    ),
    (lambda s: s.int8.write(ONE, torch.zeros(1, 4)), ReadOnlyError, "int8 rows, which are looked up, not trained"),
    # stores that may not change, or are closed
    *((call, ReadOnlyError, 'open it with mode="w"') for call in CHANGES),
    *((call, ClosedError, "closed") for call in AFTER_CLOSE),
    # open
    (opened(mode="a"), ValueError, "mode='a' is not one of r, w"),
    (opened(policy="mru"), ValueError, "policy='mru'"),
    (opened(ddr="lots"), ValueError, "ddr='lots' is not a size"),
    *([] if torch.cuda.is_available() else [(opened(device="cuda", hbm="1MiB"), ValueError, "sees no CUDA device")]),
    (opened(device="tpu"), ValueError, "device='tpu' is no device"),
    (opened(device="meta"), ValueError, "device='meta': rows live in memory of the CPU or of a CUDA device"),
    (opened(threads=0), ValueError, r"threads=0 must be in \[1, 1024\]"),
    *((opened(keep=keep), ValueError, "keep") for keep in (0, 1001)),
    (opened(version=2), ValueError, r"rollback\(2\)"),
    (opened(dtype="int8"), ValueError, 'goes with mode="r"'),
    (opened(mode="r"), StoreNotFoundError, "no store at"),
    (opened(cold="memory"), ValueError, r'directory=.*cold="memory".*leave it out'),
    (opened(cold="disk"), ValueError, "cold="),
    (lambda s: tierstore.open(), ValueError, r'needs a directory.*cold="memory"'),
    (lambda s: tierstore.open(cold="memory", mode="r"), ValueError, r'mode="r" does not go with cold="memory"'),
    (lambda s: tierstore.open(s.directory, mode="r", version=1), StoreNotFoundError, "1 is not kept; kept: 2, 3"),
    (lambda s: tierstore.open(s.folder / "notes"), StoreNotFoundError, r"'notes\.txt'"),
    (lambda s: tierstore.open(s.folder / "half", mode="r", dtype="float32"), TableError, "cannot be kept as float32"),
    (lambda s: tierstore.open("s3://a/b"), ValueError, "is a URL"),
    (lambda s: tierstore.open(Path("file:///a")), ValueError, "is a URL"),
    # versions, backups, recordings
    *(
        (lambda s, extra=extra: s.store.commit(extra=extra), TypeError, "gives back as it was")
        for extra in ({1: 2}, {"a": (1, 2)}, {"a": {2: 1}})
    ),
    (lambda s: s.store.commit(tensors={"__metadata__": ONE}), TypeError, "tensors cannot be stored"),
    (lambda s: s.store.rollback(1), ValueError, r"version=1 .* is not kept; kept: 2, 3\."),
    (lambda s: s.store.backup(s.directory / "copy"), ValueError, "is inside the store"),
    (lambda s: s.store.backup(s.folder / "half"), FileExistsError, r"is not empty \(it holds manifest.json\)"),
    (lambda s: s.store.backup(s.new / "copy"), FileNotFoundError, "make it first"),
    (lambda s: s.memory.backup(s.new), errors.TierstoreError, r"no files to copy; give it a directory"),
    (lambda s: s.store.record(s.folder / "there.npz"), FileExistsError, "record to another name"),
    (lambda s: s.store.record(s.folder / "link.npz"), FileExistsError, "link.npz exists"),
    (lambda s: s.store.record(s.folder / "x.txt"), ValueError, "npz"),
    (lambda s: s.store.record(s.folder / "x.npz", rate=0), ValueError, "rate"),
    (lambda s: s.store.record(s.folder / "x.npz", max_bytes="1KiB"), ValueError, "64.0 KiB at least"),
    (lambda s: s.store.record(s.folder / "x.npz", max_bytes="8000TiB"), errors.DiskFullError, "are free; nothing was"),
    # copies in another form
    (quantized(dtype="float32"), ValueError, "dtype='float32' is not one of float16, bfloat16, int8, int4"),
    (quantized(dtype="int8", tables=["itm"]), TableError, "no table 'itm'; there are items"),
    (lambda s: tierstore.quantize(s.folder / "int8", s.new, dtype="int4"), ValueError, "is int8 already; name the oth"),
    (lambda s: tierstore.quantize(s.new, s.folder / "x", dtype="int8"), StoreNotFoundError, "no store at"),
    (lambda s: tierstore.quantize(s.directory, s.folder / "half", dtype="int8"), FileExistsError, "is not empty"),
    (lambda s: compact_store(s.directory, s.directory), ValueError, "is the store itself"),
    (lambda s: compact_store(s.directory, s.folder / "half"), FileExistsError, "is not empty"),
    (lambda s: compact_store(s.directory, s.new / "copy"), FileNotFoundError, "new"),
    (lambda s: compact_store(s.new, s.folder / "x"), StoreNotFoundError, "no store at"),
    (lambda s: salvage(s.folder / "closed", s.folder / "file"), FileExistsError, "is not a directory"),
    (lambda s: salvage(s.new, s.folder / "x"), StoreNotFoundError, r"rows\.lmdb"),
    (lambda s: s.compact(nosuch=[5]), ValueError, "the trace has a table 'nosuch' and the store has none of that name"),
    (lambda s: s.compact(items=[1, 100]), ValueError, "has row 100 of table 'items', which has 100 rows"),
    (lambda s: s.compact(items=[]), ValueError, "the trace has no lookup; without --trace"),
]  # fmt: skip


def test_each_wrong_use_has_its_error_and_changes_nothing(scene: Scene) -> None:
    failed, rows = list[str](), scene.table.read(EVERY)
    for number, (call, error, message) in enumerate(REFUSALS):
        before = scene.state()
        try:
            with pytest.raises(error, match=message):
                call(scene)
            assert scene.state() == before
        except (Exception, pytest.fail.Exception) as wrong:
            failed.append(f"row {number}, which says {message!r}: {wrong}")
    assert not failed, "\n".join(failed)
    assert torch.equal(scene.table.read(EVERY), rows)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cuda"}, 'rows need memory on the GPU; give hbm="2GiB"'),
        ({"device": "cuda:99", "hbm": "1MiB"}, "CUDA devices, from 0 on"),
    ],
)
def test_devices_that_are_not_there(store_dir: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tierstore.open(store_dir, **arguments)


WRONG_OFFSETS: Final[list[tuple[list[int], str]]] = [
    ([], "there are none"), ([1, 3], "index 0 is 1"), ([0, 2], "index 1 is 2"), ([0, 2, 1, 3], "index 2 is 1"),
    ([-1, 3], "index 0 is -1"), ([0, 2**62, 3], f"index 1 is {2**62}"),
    ([2**32, 3], f"index 0 is {2**32}"),  # int32, in which device memory has them, would take it for 0
    ([0, 2**32 + 2, 3], f"index 1 is {2**32 + 2}"),
]  # fmt: skip


@pytest.mark.parametrize("hbm", [0, "1MiB"])
def test_offsets_that_do_not_fit(hbm: Any) -> None:
    with tierstore.open(cold="memory", ddr="1MiB", hbm=hbm, device="cpu") as store:
        table = store.create_table(CONFIG)
        for _ in range(2):  # a table that was looked up has a shorter way
            for offsets, wrong in WRONG_OFFSETS:
                message = f"start at 0, never descend and end at the number of ids, 3; .*{wrong}"
                with pytest.raises(ValueError, match=message):
                    table.pooled(torch.tensor([1, 2, 3]), torch.tensor(offsets, dtype=torch.int64))
            table.pooled(torch.tensor([1, 2, 3]), torch.tensor([0, 3]))


def test_a_limit_of_address_space_is_named_and_nothing_is_lost(store_dir: Path) -> None:
    with tierstore.open(store_dir, ddr="1MiB") as store:
        store.commit()
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


@pytest.mark.parametrize("ddr", [0, 1000, "100KiB"])
def test_a_budget_too_small_names_what_is_needed(store_dir: Path, ddr: Any) -> None:
    with tierstore.open(store_dir, ddr=ddr) as store:
        table = store.create_table(CONFIG)
        with pytest.raises(errors.BudgetError, match="give at least") as caught:
            table.read(torch.tensor([1]))
    needed = str(caught.value).split("give at least ")[1]
    with tierstore.open(store_dir, ddr=needed.replace(" ", "")) as store:
        assert store["items"].read(torch.tensor([1])).shape == (1, 4)


def test_numbers_of_numpy_and_torch_are_taken_as_pythons(store_dir: Path) -> None:
    fields: dict[str, Any] = {"num_embeddings": np.int64(9), "embedding_dim": np.uint8(4)}
    fields |= {"init": tierstore.init.Uniform(np.float32(-1), np.float32(1), seed=np.int64(3))}  # type: ignore[arg-type]
    fields |= {"optimizer": optim.Adam(lr=np.float32(0.5), betas=np.array([0.5, 0.75]))}  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"ddr": np.int64(2**20), "keep": np.int32(2), "threads": np.int64(1)}
    with tierstore.open(store_dir, **sizes) as store:
        table = store.create_table(config(**fields))
        made, table.learning_rate = table.config, torch.tensor(0.25)  # type: ignore[assignment]
        assert table.learning_rate == 0.25
        store.commit(extra={"a": [float("nan"), None, {"b": 1.5}]})
    assert "np." not in repr(made)
    with tierstore.open(store_dir, ddr="1MiB") as store:
        assert repr(store["t"].config) == repr(made)


def test_tables_cannot_be_made_while_rows_are_in_use() -> None:
    store = tierstore.open(cold="memory", ddr="1MiB")
    store.create_table(CONFIG)
    out = tierstore.TieredEmbeddingBag(store["items"])(torch.tensor([[1]]))
    new = tierstore.TableConfig(name="new", num_embeddings=1, embedding_dim=1)
    with pytest.raises(errors.TableError, match="an in-flight batch"):
        store.create_table(new)
    out.sum().backward()
    assert store.create_table(new).name == "new"
    store.close()


def test_what_reads_pools_and_may_be_copied(scene: Scene, tmp_path: Path) -> None:
    assert not type(scene.bag)(scene.reader["items"])(ONE[None]).requires_grad
    torch.save(scene.bag.state_dict(), tmp_path / "file")
    assert pickle.loads(pickle.dumps(CONFIG)) == copy.deepcopy(CONFIG) == CONFIG
    assert copy.copy(scene.bag)(ONE[None]).equal(scene.bag(ONE[None]))
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        table, offsets = store.create_table(config(pooling="mean")), torch.tensor([0, 2])
        mean = table.read(TWO).mean(0, keepdim=True)
        for bag in (type(scene.bag)(table), type(scene.bag)(table, mode="mean")):
            assert torch.equal(bag(TWO, offsets[:1]), mean)
        assert torch.equal(table.pooled(TWO, offsets), mean)
        assert torch.equal(table.pooled(TWO, offsets, mode="sum"), mean * 2)  # trains nothing, so nothing is at odds
