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


class Case:
    def __init__(self, store: tierstore.Store, weight_decay: float = 0.0) -> None:
        store.create_table(tierstore.TableConfig(name="t", num_embeddings=9, embedding_dim=4))
        self.model = nn.Sequential(tierstore.TieredEmbeddingBag(store["t"]), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=weight_decay)
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self) -> None:
        self.model(PAIR).sum().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped(self, clip: Any = torch.nn.utils.clip_grad_norm_) -> None:
        self.backward()
        clip(self.model.parameters(), 1.0)

    def scaled(self) -> None:
        self.scaler.scale(self.model(PAIR).sum()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.update()

    def accumulated(self) -> None:
        for _ in range(2):
            self.backward()
            self.step()


HABITS: dict[str, Callable[[Case], None]] = {
    "clipping does not reach them": Case.clipped,
    "clipping does not reach .*clip_grad_norm_": lambda case: case.clipped(torch.nn.utils.clip_grad_value_),
    "a GradScaler does not reach them": Case.scaled,
    "several passes before a step are several updates": Case.accumulated,
    "weight_decay=0.5 of SGD does not reach them": Case.step,
}


@pytest.mark.parametrize("told", HABITS)
def test_what_does_not_reach_rows_is_told_once(told: str) -> None:
    with tierstore.open(cold="memory", ddr="4MiB") as store, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        case = Case(store, 0.5 if "decay" in told else 0.0)
        for _ in range(3):
            HABITS[told](case)
            case.optimizer.zero_grad()
        messages = [str(each.message) for each in caught]
        assert len(messages) == 1, messages
        assert re.search(told + r".*store.optimizer\(\)", messages[0])


def test_habits_that_rows_have_no_part_in_are_not_told() -> None:
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        case = Case(store)
        for _ in range(3):
            case.step()
            torch.nn.utils.clip_grad_norm_(case.model[1].parameters(), 1.0)
        case.backward()
        case.step()  # once is no habit
        case.step()
        case.model[0].requires_grad_(False)
        for _ in range(3):
            case.accumulated()
            case.clipped()
        case.model[0].requires_grad_(True)
        rows = store.optimizer()
        for _ in range(3):
            case.accumulated()
            rows.clip_grad_norm_(case.model.parameters(), 1.0)
            rows.step()
            rows.zero_grad()
