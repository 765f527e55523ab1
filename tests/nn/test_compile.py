"""Models with tables under ``torch.compile``: the same bits of rows, a graph before each module and one behind."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import tierstore

ROWS, DIM = 300, 20


class Model(nn.Module):
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
        model = compiled(Model(store))
        for _ in range(8):
            ids, x = torch.randint(0, ROWS, (8, 4), generator=random), torch.randn(8, DIM, generator=random)
            jagged = tierstore.KeyedJaggedTensor(["t"], ids.flatten(), offsets=torch.arange(0, 33, 4))
            model(ids, jagged, x).backward()
        return store["t"].read(torch.arange(ROWS))


def test_training_gives_the_same_bits_without_a_warning() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")  # torch hides some of its own where they are shown, not where they are raised
        rows = trained(lambda model: torch.compile(model, backend=counter))
    assert torch.equal(rows, trained(lambda model: model))
    assert counter.frame_count == 4, "graphs: one before, between and behind three modules"
    torchs_own = re.compile("torch.jit|Python 3.13.0|Skipping serialization of")
    assert [str(each.message) for each in warned if not torchs_own.search(str(each.message))] == []


IDS = torch.tensor([1, 2, 3])


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
def test_a_whole_model_and_a_lookup_of_a_table_are_refused(way: str) -> None:
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
            expected = model(IDS[:, None])
            for has_grad in (False, True):
                with torch.set_grad_enabled(has_grad), pytest.raises(Exception, match="export the dense part"):
                    (WAYS | OF_FUNCTIONS)[way](model, IDS[:, None])
            assert torch.equal(model(IDS[:, None]), expected)  # nothing is left behind that would refuse this


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
def test_what_does_not_reach_rows_is_told_once_and_only_where_rows_are_trained_in_backward(told: str) -> None:
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
