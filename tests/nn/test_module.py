"""Modules over tables as torch's own are handled: frozen, moved, converted, saved, compiled; and un-pooled lookups."""

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import tierstore
from tierstore import KeyedJaggedTensor

ROWS, DIM = 300, 20
TIERS: list[dict[str, Any]] = [
    {"ddr": "1MiB"}, {"ddr": "460KiB"}, {"ddr": "2MiB", "hbm": "300KiB", "device": "cpu"}
]  # fmt: skip
IDS = torch.randint(0, ROWS, (6, 3, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=TIERS, ids=["in place", "evicting", "hbm"])
def store(request: pytest.FixtureRequest) -> Iterator[tierstore.Store]:
    with tierstore.open(cold="memory", **request.param) as opened:
        sgd = tierstore.optim.SGD(lr=0.5)
        opened.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=sgd))
        yield opened


def rows_of(store: tierstore.Store) -> Tensor:
    return store["t"].read(torch.arange(ROWS))


@pytest.mark.parametrize(("padding_idx", "is_written"), [(None, False), (7, False), (7, True), (-1, True)])
def test_rows_are_looked_up_and_trained_as_by_nn_embedding(store, padding_idx, is_written):
    if padding_idx is not None and is_written:
        store["t"].write(torch.tensor([padding_idx % ROWS]), torch.randn(1, DIM))
    ours = tierstore.TieredEmbedding(store["t"], padding_idx=padding_idx)
    theirs = nn.Embedding(ROWS, DIM, padding_idx=padding_idx, _weight=rows_of(store))
    if padding_idx is not None and not is_written:
        theirs.weight.data[padding_idx] = 0
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    ids = [IDS, IDS.flatten()[:5], IDS[0, 0, 0], IDS[:0]]
    ids = ids if padding_idx is None else [torch.where(each % 3 == 0, padding_idx % ROWS, each) for each in ids]
    for each in ids:
        torch.testing.assert_close(ours(each), theirs(each))
        ahead = next(iter(tierstore.prefetch(iter([each]), ours, depth=1, features=lambda ids: ids)))
        with torch.no_grad():
            torch.testing.assert_close(ours(ahead), theirs(each))
        for module in (ours, theirs):
            module(each).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(rows_of(store), theirs.weight.detach(), msg="padding is served as it is trained")
    assert (ours.num_embeddings, ours.embedding_dim, ours.padding_idx) == (ROWS, DIM, theirs.padding_idx)


def test_a_padding_row_is_written_by_what_trains():
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM))
        module, zeros = tierstore.TieredEmbedding(store["t"], padding_idx=7), torch.zeros(1, DIM)
        with torch.no_grad():
            assert torch.equal(module(torch.tensor([7])), zeros)
        assert store.changed_tables == ()
        version = store.commit()
        for _ in range(2):
            module(torch.tensor([7])).sum().backward()
            assert torch.equal(store["t"].read(torch.tensor([7])), zeros)
            store.rollback(version)
            assert store["t"].read(torch.tensor([7])).any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [0, -3])
def test_bags_leave_padding_out_as_torchs_do(padding_idx, mode):
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        sgd = tierstore.optim.SGD(lr=0.5)
        store.create_table(
            tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=sgd, pooling=mode)
        )
        pad = padding_idx % ROWS
        ours = tierstore.TieredEmbeddingBag(store["t"], padding_idx=padding_idx)
        theirs = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=pad, _weight=rows_of(store))
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
        padded = torch.where(IDS[0] % 3 == 0, pad, IDS[0])
        padded[0] = pad
        padded[2, 1] = pad
        calls: list[tuple[Tensor, ...]] = [(padded,), (padded.flatten(), torch.tensor([0, 3, 3, 7]))]
        for arguments in calls:
            weights = []
            for module in (ours, theirs):
                given: dict[str, Tensor] = {}
                if mode == "sum":
                    given["per_sample_weights"] = torch.linspace(0, 1, arguments[0].numel()).view_as(arguments[0])
                    weights.append(given["per_sample_weights"].requires_grad_())
                out = module(*arguments, **given)
                if module is ours:
                    found = out
                out.square().sum().backward()
            torch.testing.assert_close(found, out)
            torch.testing.assert_close(*[each.grad for each in weights] or (0, 0))
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(rows_of(store), theirs.weight.detach())
        with pytest.raises(ValueError, match="offsets"):
            ours(padded.flatten(), torch.tensor([0, -3, 7]))


def test_results_may_be_changed_and_hooked_as_torchs(store):
    for module in (tierstore.TieredEmbedding(store["t"]), tierstore.TieredEmbeddingBag(store["t"])):
        out, seen = module(IDS[0]), list[Tensor]()
        out.register_hook(seen.append)
        out.mul_(2)
        out.sum().backward()
        assert len(seen) == 1
        with torch.no_grad():
            kept = module(IDS[0])
        kept += nn.Parameter(torch.ones(DIM))
        assert kept.requires_grad
        module(IDS[0]).detach_()


def test_collections_look_up_each_id(store):
    """Two tables, one of two features, lists of any length: against nn.Embedding, with its optimizer."""
    sgd = tierstore.optim.SGD(lr=0.5)
    store.create_table(
        tierstore.TableConfig(name="u", num_embeddings=ROWS, embedding_dim=8, feature_names=["a", "b"], optimizer=sgd)
    )
    every = torch.arange(ROWS)
    module, first = tierstore.TieredEmbeddingCollection(store), {name: store[name].read(every) for name in "tu"}
    theirs = {name: nn.Embedding(ROWS, rows.shape[1], _weight=rows.clone()) for name, rows in first.items()}
    lengths = torch.tensor([[2, 0, 3], [1, 1, 0], [0, 0, 0], [4, 2, 1]])
    ids = IDS.flatten()[: int(lengths.sum())]
    batch = tierstore.KeyedJaggedTensor(["b", "t", "other", "a"], ids, lengths=lengths.flatten())
    for features in (batch, *tierstore.prefetch(iter([batch] * 2), module)):
        found = module(features)
        assert list(found) == ["t", "a", "b"]
        expected = {name: theirs["t" if name == "t" else "u"](batch[name].values()) for name in found}
        for name, rows in expected.items():
            torch.testing.assert_close(found[name].values(), rows)
            assert torch.equal(found[name].lengths(), batch[name].lengths())
        for of in (expected, {name: each.values() for name, each in found.items()}):
            sum((place + 1.0) * of[name].square().sum() for place, name in enumerate("tab")).backward()  # type: ignore[union-attr]
        for embedding in theirs.values():
            embedding.weight.data -= 0.5 * embedding.weight.grad  # type: ignore[operator]
            embedding.weight.grad = None
    for name, embedding in theirs.items():
        torch.testing.assert_close(store[name].read(every), embedding.weight.detach())
    plain, weighted = (
        tierstore.KeyedJaggedTensor(["t", "a", "b", "c"], ids, weights, lengths.flatten())
        for weights in (None, torch.rand(len(ids)))
    )
    assert torch.equal(module(weighted)["a"].values(), module(plain)["a"].values())


class Case(NamedTuple):
    store: tierstore.Store
    module: nn.Module
    model: nn.Sequential
    """The module, and a dense layer."""
    features: Any


class Values(nn.Module):
    def forward(self, pooled: tierstore.KeyedTensor) -> Tensor:
        return pooled.values()


@pytest.fixture(params=["rows", "bag", "collection"])
def case(request: pytest.FixtureRequest, store: tierstore.Store) -> Case:
    module: nn.Module = {
        "rows": lambda: tierstore.TieredEmbedding(store["t"]),
        "bag": lambda: tierstore.TieredEmbeddingBag(store["t"]),
        "collection": lambda: nn.Sequential(tierstore.TieredEmbeddingBagCollection(store), Values()),
    }[request.param]()
    features: Any = IDS[0]
    if request.param == "collection":
        features = tierstore.KeyedJaggedTensor(["t"], IDS[0].flatten(), lengths=torch.full((3,), 4))
    return Case(store, module, nn.Sequential(module, nn.Linear(DIM, 1)), features)


@pytest.mark.parametrize("by", ["module", "model", "parameters"])
def test_a_frozen_module_trains_no_row(case, by):
    before = rows_of(case.store)
    for each in {"module": [case.module], "model": [case.model], "parameters": case.module.parameters()}[by]:
        each.requires_grad_(False)
    case.model[1].requires_grad_(True)
    case.model(case.features).sum().backward()
    assert torch.equal(rows_of(case.store), before)
    assert not case.module(case.features).requires_grad
    case.module.requires_grad_(True)
    case.model(case.features).sum().backward()
    assert not torch.equal(rows_of(case.store), before)


def test_what_converts_weights_does_so_or_raises(case):
    model, before = case.model, case.module(case.features)
    for same in (model.float(), model.cpu(), model.to("cpu"), model.train(), model.share_memory()):
        assert torch.equal(same[0](case.features), before)
    for change in (model.half, model.double, lambda: model.to(torch.bfloat16)):
        with pytest.raises(TypeError, match=r"gives float32, not torch.*TableConfig\(dtype="):
            change()
    with pytest.raises(ValueError, match=r"looked up on cpu.*tierstore.open\(..., device='meta'\)"):
        model.to("meta")


def test_rows_are_not_in_the_state_dict(case):
    assert list(case.model.state_dict()) == ["1.weight", "1.bias"]
    assert case.model.load_state_dict(case.model.state_dict()).missing_keys == []
    with pytest.raises(RuntimeError, match="Unexpected"):
        case.module.load_state_dict({"rows": torch.empty(0), "other": torch.empty(1)})
    with pytest.raises(TypeError, match=r"cannot be pickled.*checkpoint.save.*copy.deepcopy"):
        torch.save(case.model, io.BytesIO())


def test_a_copy_shares_the_tables_and_an_average_has_dense_weights_of_its_own(case):
    model, given = case.model, case.features
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    weights, before = [model[1].weight.detach().clone()], model[0](given).detach().clone()
    for _ in range(2):
        model[0](given).sum().backward()
        model[1].weight.data += 1
        average.update_parameters(model)
        weights.append(model[1].weight.detach().clone())
    assert torch.equal(average.module[0](given), model[0](given))
    assert not torch.equal(model[0](given), before)
    torch.testing.assert_close(average.module[1].weight.detach(), (weights[1] + weights[2]) / 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_and_rows_of_half_types_are_taken(store, dtype):
    table, bag = store["t"], tierstore.TieredEmbeddingBag(store["t"])
    ids, offsets = torch.tensor([1, 2, 1]), torch.tensor([0, 2])
    scale = torch.tensor([0.3, 0.7, 0.5], dtype=dtype).requires_grad_()
    with torch.no_grad():
        assert torch.equal(bag(ids, offsets, scale), bag(ids, offsets, scale.float()))
    rows = table.read(ids)
    bag.requires_grad_(False)
    bag(ids, offsets, scale).sum().backward()
    torch.testing.assert_close(scale.grad, rows.sum(1).to(dtype))
    new = torch.rand(3, DIM).to(dtype)
    table.write(torch.tensor([4, 5, 6]), new)
    assert torch.equal(table.read(torch.tensor([4, 5, 6])), new.float())


def test_modules_work_under_another_default_dtype(store):
    torch.set_default_dtype(torch.float64)
    try:
        for module in (tierstore.TieredEmbedding(store["t"], padding_idx=0), tierstore.TieredEmbeddingBag(store["t"])):
            for ahead in tierstore.prefetch([IDS[0], IDS[1]], module.to("cpu").float(), depth=1):
                out = module(ahead)
                assert out.dtype == torch.float32
                out.sum().backward()
        bag, optimizer = tierstore.TieredEmbeddingBag(store["t"]), store.optimizer()
        weights = torch.ones(IDS[0].shape, dtype=torch.float32, requires_grad=True)
        bag(IDS[0], per_sample_weights=weights).sum().backward()
        assert weights.grad.dtype == optimizer.clip_grad_norm_(max_norm=1.0).dtype == torch.float32
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_come_in_ahead_for_all_modules_of_a_model(store, depth):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.bag = tierstore.TieredEmbedding(store["t"]), tierstore.TieredEmbeddingBag(store["t"])

        def prepare(self) -> None: ...  # a method of the user's

        def forward(self, ids: Tensor) -> Tensor:
            return torch.cat([self.row(ids).sum(1), self.bag(ids)], dim=1)

    model = Model()
    plain = [model(ids) for ids in IDS]
    for given, features in (
        (model, lambda ids: ids),
        ([model.row, model.bag], lambda ids: [ids, (ids,)]),
        (model, lambda ids: {"bag": (ids,), "row": ids}),
        ([model.bag], lambda ids: (ids,)),
    ):
        with contextlib.closing(tierstore.prefetch(iter(IDS), given, depth=depth, features=features)) as batches:
            for ids, expected in zip(batches, plain, strict=True):
                assert torch.equal(model(ids), expected)
    with pytest.raises(TypeError, match="Linear has no module over tables"):
        tierstore.prefetch(iter(IDS), nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"a list of 0, but there are 2 modules: \['row', 'bag'\]"):
        list(tierstore.prefetch(iter(IDS), model, features=lambda _: []))
    with pytest.raises(ValueError, match=r"\['row'\], but"):
        list(tierstore.prefetch(iter(IDS), model, features=lambda _: {"row": 0}))


def test_objects_made_anew_are_noticed(store):
    module = tierstore.TieredEmbedding(store["t"])

    def train() -> None:
        for ids in tierstore.prefetch(iter(IDS), module, features=lambda ids: ids.clone()):
            module(ids)

    with pytest.warns(RuntimeWarning, match=r"forward was not given.*the very object") as warned:
        train()
    assert len(warned) == 1
    for number, ids in enumerate(tierstore.prefetch(iter(IDS), module, features=lambda ids: ids)):
        module(IDS[number].clone())  # beside it
        if number % 2:
            module(ids)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_call_without_gradients_and_offsets_gives_the_bits_of_one_with(mode):
    """One compiled call does it; ids may lie apart, be narrow, or none. One row of a table of maxima has its bits."""
    with tierstore.open(cold="memory", ddr="8MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="a", num_embeddings=50, embedding_dim=8, pooling=mode))
        table.write(torch.arange(50), torch.randn(50, 8))
        bag, plain = tierstore.TieredEmbeddingBag(table), torch.nn.EmbeddingBag(50, 8, mode=mode)
        plain.weight.data.copy_(table.read(torch.arange(50)))
        ids = torch.randint(50, (7, 3))
        for given in (ids, ids.int(), ids.t(), ids[:1, :1], ids[:0], ids[:, :0]):
            with torch.no_grad():
                found, expected = bag(given), plain(given) if given.numel() else torch.zeros(len(given), 8)
            assert torch.equal(found, bag(given).detach())
            torch.testing.assert_close(found, expected)
        with torch.no_grad(), pytest.raises(TypeError, match="must be a Tensor"):
            bag([[1]])
        values, rows = torch.tensor([[-0.0, 0.0, torch.nan, -torch.inf] * 2]), tierstore.TieredEmbedding(table)
        table.write(torch.tensor([3]), values)
        for is_trained in (True, False) if mode == "max" else ():
            with torch.set_grad_enabled(is_trained):
                assert torch.equal(rows(torch.tensor([3])).detach().view(torch.int32), values.view(torch.int32))


class Compiled(nn.Module):
    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.row, self.bag = tierstore.TieredEmbedding(store["t"]), tierstore.TieredEmbeddingBag(store["t"])
        self.features = tierstore.TieredEmbeddingBagCollection(store)

    def forward(self, ids: Tensor, jagged: tierstore.KeyedJaggedTensor, x: Tensor) -> Tensor:
        scaled = x * 2
        rows, bags = self.row(ids) * scaled[:, None], self.bag(ids) * scaled
        loss: Tensor = rows.sum() + bags.sum() + (self.features(jagged).values() * scaled).sum()
        return loss


def trained(compiled: Any) -> Tensor:
    random = torch.Generator().manual_seed(1)
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        rule = tierstore.optim.RowWiseAdagrad(lr=0.1)
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, optimizer=rule))
        model = compiled(Compiled(store))
        for _ in range(8):
            ids, x = torch.randint(0, ROWS, (8, 4), generator=random), torch.randn(8, DIM, generator=random)
            jagged = tierstore.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(0, 33, 4))
            model(ids, jagged, x).backward()
        return store["t"].read(torch.arange(ROWS))


def test_training_gives_the_same_bits_without_a_warning():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")  # torch hides some of its own where they are shown, not where they are raised
        rows = trained(lambda model: torch.compile(model, backend=counter))
    assert torch.equal(rows, trained(lambda model: model))
    assert counter.frame_count == 4, "graphs: one before, between and behind three modules"
    torchs_own = re.compile("torch.jit|Python 3.13.0|Skipping serialization of")
    assert [str(each.message) for each in warned if not torchs_own.search(str(each.message))] == []


THREE = torch.tensor([1, 2, 3])


class _OfCollection(nn.Module):
    def __init__(self, store: tierstore.Store) -> None:
        super().__init__()
        self.collection = tierstore.TieredEmbeddingBagCollection(store)

    def forward(self, ids: Tensor) -> Any:
        return self.collection(tierstore.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(4))).values()


WAYS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jit.script": lambda model, _: torch.jit.script(model),
    "symbolic_trace": lambda model, _: torch.fx.symbolic_trace(model),
    "export": lambda model, ids: torch.export.export(model, (ids,), strict=False),
    "export, strict": lambda model, ids: torch.export.export(model, (ids,), strict=True),
    "fullgraph": lambda model, ids: torch.compile(model, fullgraph=True, backend="eager")(ids),  # type: ignore[no-untyped-call]
}
OF_FUNCTIONS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jit.trace": lambda model, ids: torch.jit.trace(model, (ids,), check_trace=False),  # type: ignore[no-untyped-call]
    "make_fx": lambda model, ids: make_fx(model)(ids),
    "make_fx, fake": lambda model, ids: make_fx(model, tracing_mode="fake")(ids),
    "make_fx, before dispatch": lambda model, ids: make_fx(model, pre_dispatch=True)(ids),
}


@pytest.mark.parametrize("way", [*WAYS, *OF_FUNCTIONS])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Using len to get tensor shape:torch.jit.TracerWarning")  # of a batch made inside
def test_a_whole_model_and_a_lookup_of_a_table_are_refused(way):
    torch._dynamo.reset()
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        table = store.create_table(tierstore.TableConfig(name="t", num_embeddings=100, embedding_dim=4))
        table.write(torch.arange(100), torch.rand(100, 4))  # all rows are in memory
        models: list[Any] = [nn.Sequential(tierstore.TieredEmbedding(table), nn.Linear(4, 1))]
        models += [tierstore.TieredEmbeddingBag(table), _OfCollection(store)]
        if way in OF_FUNCTIONS:
            models.append(lambda ids: table.read(ids.flatten()))
            models.append(lambda ids: table.pooled(ids.flatten(), torch.arange(4)))
            models.append(lambda ids: table.pooled(ids.flatten(), torch.arange(4), mode="max"))
        for model in models:
            expected = model(THREE[:, None])
            for has_grad in (False, True):
                with torch.set_grad_enabled(has_grad), pytest.raises(Exception, match="export the dense part"):
                    (WAYS | OF_FUNCTIONS)[way](model, THREE[:, None])
            assert torch.equal(model(THREE[:, None]), expected)  # nothing is left behind that would refuse this


PAIR = torch.tensor([[1, 2]])


def accumulated(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        model(PAIR).sum().backward()
        model(PAIR).sum().backward()
        optimizer.step()


def scaled(model: Any, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(PAIR).sum()).backward()
    scaler.unscale_(optimizer)


def clipped(model: Any, clip: Any = torch.nn.utils.clip_grad_norm_) -> None:
    model(PAIR).sum().backward()
    clip(model.parameters(), 1.0)


HABITS: dict[str, Callable[[Any, Any], None]] = {
    "clipping does not reach them": lambda model, _: clipped(model),
    "clipping does not reach .*clip_grad_norm_": lambda model, _: clipped(model, torch.nn.utils.clip_grad_value_),
    "a GradScaler does not reach them": scaled,
    "several passes before a step are several updates": accumulated,
    "weight_decay=0.5 of SGD does not reach them": lambda _, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("told", HABITS)
def test_what_does_not_reach_rows_is_told_once_and_only_where_rows_are_trained_in_backward(told):
    with tierstore.open(cold="memory", ddr="4MiB") as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
        for is_frozen, is_deferred, num_told in ((True, False, 0), (False, False, 1), (False, True, 1)):
            bag = tierstore.TieredEmbeddingBag(store["t"]).requires_grad_(not is_frozen)
            model, rows = nn.Sequential(bag, nn.Linear(4, 1)), store.optimizer() if is_deferred else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5 if "decay" in told else 0.0)
            for _ in range(3):
                HABITS[told](model, optimizer)
                optimizer.zero_grad()
                if rows is not None:
                    rows.zero_grad()
            messages = [str(each.message) for each in caught]
            assert len(messages) == num_told, messages
            assert all(re.search(told + r".*store.optimizer\(\)", each) for each in messages)


LISTS = {"a": [[1, 2], [], [3]], "b": [[], [4], [5, 6]], "c": [[7], [8], []]}
LENGTHS = torch.tensor([len(each) for lists in LISTS.values() for each in lists])
VALUES = torch.arange(1, 9)
WEIGHTS = VALUES / 2


def lists_of(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [each.tolist() for each in jagged.to_dense()] for key, jagged in batch.to_dict().items()}


@pytest.mark.parametrize("given", ["lengths", "offsets", "offsets without the end"])
def test_each_feature_has_its_lists_whole_and_split(given: str) -> None:
    batch = KeyedJaggedTensor.from_lengths_sync(list(LISTS), VALUES, LENGTHS, WEIGHTS)
    if given != "lengths":
        offsets = batch.offsets()[: None if given == "offsets" else -1]
        batch = KeyedJaggedTensor(list(LISTS), VALUES, WEIGHTS, offsets=offsets, stride=3)
    assert lists_of(batch) == LISTS
    assert batch["b"].weights().tolist() == [2.0, 2.5, 3.0]
    assert (batch.offset_per_key(), batch.length_per_key()) == ([0, 3, 6, 8], [3, 3, 2])
    assert (batch.stride(), batch.lengths().tolist()) == (3, LENGTHS.tolist())
    assert batch["a"].to_padded_dense(1, 9.0).tolist() == [[1], [9], [3]]
    for segments in ([1, 2], [0, 3, 0], [1, 1, 1]):
        parts = batch.split(segments)
        assert [len(part.keys()) for part in parts] == segments
        assert {key: lists for part in parts for key, lists in lists_of(part).items()} == LISTS
    with pytest.raises(ValueError, match=r"segments=\[1, 1\] are 2 features, not 3"):
        batch.split([1, 1])
    plain = KeyedJaggedTensor(["d"], VALUES, lengths=torch.tensor([8]))
    with pytest.raises(ValueError, match="no weights"):
        plain.weights()
    with pytest.raises(ValueError, match="8 bags cannot be divided among 3 features"):
        KeyedJaggedTensor(list(LISTS), VALUES, lengths=LENGTHS[:8])
    with pytest.raises(ValueError, match=r"\+ 1\], with the end, or with stride=B also \[F \* B\]"):
        KeyedJaggedTensor(list(LISTS), VALUES, offsets=batch.offsets()[:-1])
    assert KeyedJaggedTensor(["a", "b"], VALUES[:0], lengths=LENGTHS[:0]).offset_per_key() == [0, 0, 0]


@pytest.mark.parametrize("kind", [tierstore.TieredEmbeddingBagCollection, tierstore.TieredEmbeddingCollection])
def test_features_with_different_numbers_of_samples_are_refused(kind: Any) -> None:
    """As TorchRec's batches may have them."""
    batch: Any = KeyedJaggedTensor(["a"], VALUES, lengths=torch.tensor([8]))
    batch.variable_stride_per_key = lambda: True
    with tierstore.open(cold="memory", ddr="1MiB") as store:
        store.create_table(tierstore.TableConfig(name="a", num_embeddings=9, embedding_dim=4))
        with pytest.raises(ValueError, match="different numbers of samples: give those with as many"):
            kind(store)(batch)
        with pytest.raises(ValueError, match=r"They are taken with the end, \[bags \+ 1\]$"):
            kind(store)(KeyedJaggedTensor(["a"], VALUES, offsets=torch.tensor([0, 9])))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lists_are_cut_to_their_last_values_with_weights_and_gradients(count: int) -> None:
    batch = KeyedJaggedTensor(list(LISTS), VALUES, WEIGHTS, lengths=LENGTHS)
    kept = batch.last(count)
    assert lists_of(kept) == {key: [each[-count:] for each in lists] for key, lists in LISTS.items()}
    assert kept.weights().tolist() == (kept.values() / 2).tolist()
    assert (kept.keys(), kept.stride(), kept.lengths().tolist()) == (batch.keys(), 3, LENGTHS.clamp(max=count).tolist())
    rows = torch.arange(16.0).view(8, 2).requires_grad_()
    tierstore.JaggedTensor(rows, lengths=LENGTHS).last(count).values().sum().backward()
    assert rows.grad[:, 0].tolist() == [float(each in kept.values().tolist()) for each in VALUES.tolist()]
    with pytest.raises(ValueError, match="count=0 must be in"):
        batch.last(0)
    all_kept = KeyedJaggedTensor(list(LISTS), VALUES, lengths=LENGTHS.int()).last(2**31)
    assert (lists_of(all_kept), all_kept.lengths().dtype) == (LISTS, torch.int32)
    both = tierstore.JaggedTensor(VALUES, lengths=torch.tensor([1, 1]), offsets=torch.tensor([0, 5, 8]))
    assert (both.lengths().tolist(), both.last(count).lengths().tolist()) == ([5, 3], [count, count])
