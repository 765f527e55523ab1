"""``tierstore.convert`` and the way back: models of many kinds train to the losses that torch gives them."""

import copy
import functools
import importlib
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler, swa_utils

import tierstore
from tierstore import optim
from tierstore.errors import TableError

ROWS: Final = 50
DIM: Final = 8
FIELDS: Final = 3
LENGTH: Final = 6
BATCH: Final = 12


def mlp(*widths: int) -> nn.Sequential:
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """Bags of several ids, all pairs of dot products."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {f"f{n}": nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True) for n in range(FIELDS)}
        )
        self.bottom, self.top = mlp(2, 16, DIM), mlp(DIM + FIELDS * (FIELDS + 1) // 2, 16, 1)

    def forward(self, ids: Tensor, offsets: Tensor, dense: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = torch.stack([bottom, *(bag((ids + n) % ROWS, offsets) for n, bag in enumerate(self.bags.values()))], 1)
        first, second = torch.tril_indices(FIELDS + 1, FIELDS + 1, offset=-1)
        return self.top(torch.cat([bottom, (rows @ rows.mT)[:, first, second]], dim=1)).squeeze(1)


class TwoTowers(nn.Module):
    """A history pooled by mean on one side, an item on the other; both of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM)
        self.history = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.history.weight = self.item.weight
        self.left, self.right = mlp(DIM, 16, DIM), mlp(DIM, 16, DIM)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        return nn.functional.cosine_similarity(self.left(self.history(history)), self.right(self.item(items)))


class Recurrent(nn.Module):
    """GRU4Rec over a padded sequence, scoring all items with the tied table, and sampling those asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.place = nn.Embedding(LENGTH, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        state = self.gru(self.item(history) + self.place(torch.arange(LENGTH)))[1][0]
        scores = (state @ self.item(torch.arange(ROWS)).T).log_softmax(1)
        return scores.gather(1, items[:, None]).squeeze(1)


class MaxPooling(nn.Module):
    """Session features pooled by their maximum, beside weighted sums."""

    def __init__(self) -> None:
        super().__init__()
        self.most = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.weighted = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.weight, self.head = nn.Linear(1, 1), mlp(2 * DIM, 16, 1)

    def forward(self, history: Tensor, items: Tensor) -> Tensor:
        weights = self.weight((history % 7).float()[..., None]).squeeze(2)
        pooled = torch.cat([self.most(history), self.weighted(history, per_sample_weights=weights)], dim=1)
        return self.head(pooled).squeeze(1) + items / ROWS


class SharedModule(nn.Module):
    """One embedding module under two names, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(ROWS, DIM))
        self.decoder = nn.ModuleList([self.encoder[0], mlp(DIM, 16, 1)])
        self.frozen = nn.Embedding(ROWS, DIM).requires_grad_(False)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        mixed = self.encoder(users) + self.decoder[0](items) * self.frozen(users)
        score: Tensor = self.decoder[1](mixed).squeeze(1)
        return score


def bags(random: torch.Generator) -> tuple[Tensor, ...]:
    offsets = torch.randint(3, (BATCH + 1,), generator=random).cumsum(0)
    offsets = offsets - offsets[0]
    return torch.randint(ROWS, (int(offsets[-1]),), generator=random), offsets, torch.rand(BATCH, 2, generator=random)


def pairs(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(ROWS, (BATCH,), generator=random), torch.randint(ROWS, (BATCH,), generator=random)


def histories(random: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(ROWS, (BATCH, LENGTH), generator=random), torch.randint(ROWS, (BATCH,), generator=random)


MODELS: Final[dict[type[nn.Module], Callable[[torch.Generator], tuple[Any, ...]]]] = {
    Dlrm: bags,
    TwoTowers: histories,
    Recurrent: histories,
    MaxPooling: histories,
    SharedModule: pairs,
}
"""What each model's batches are made by."""

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.01),
}


class Loop:
    def __init__(self, model: nn.Module, rule: str) -> None:
        self.model = model
        tables = [each for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        own = {id(each.weight) for each in tables}
        trained = [each for each in model.parameters() if each.requires_grad]
        self.sparse = RULES[rule]([each for each in trained if id(each) in own])
        dense = [each for each in trained if id(each) not in own]
        self.dense = torch.optim.SGD(dense, lr=0.05) if dense else None

    def step(self, batch: tuple[Any, ...], target: Tensor) -> float:
        loss = (self.model(*batch) - target).square().mean()
        for optimizer in filter(None, (self.sparse, self.dense)):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in filter(None, (self.sparse, self.dense)):
            optimizer.step()
        return loss.item()


@pytest.mark.parametrize(("kind", "rule"), [*zip(MODELS, [*RULES] * 3, strict=False)])
def test_a_converted_model_has_torchs_losses(kind: type[nn.Module], rule: str) -> None:
    """Half trained by torch, then by both; and the way back has the weights that torch has."""
    random = torch.Generator().manual_seed(1)
    batches = [(MODELS[kind](random), torch.rand(BATCH, generator=random)) for _ in range(8)]
    torch.manual_seed(0)
    theirs = Loop(kind(), rule)
    for batch, target in batches[:3]:
        theirs.step(batch, target)
    ours = copy.deepcopy(theirs)
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        assert tierstore.convert(ours.model, store, optimizer=ours.sparse) is ours.model
        assert not any(isinstance(each, nn.Embedding | nn.EmbeddingBag) for each in ours.model.modules())
        assert not ours.sparse.state
        losses = [(ours.step(*each), theirs.step(*each)) for each in batches[3:]]
        torch.testing.assert_close(*zip(*losses, strict=True), rtol=1e-5, atol=1e-6)
        plain = tierstore.plain_model(ours.model)
        assert [name for name, _ in plain.named_modules()] == [name for name, _ in theirs.model.named_modules()]
        torch.testing.assert_close(plain.state_dict(), theirs.model.state_dict(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain(*batches[0][0]), ours.model(*batches[0][0]), rtol=1e-6, atol=1e-6)


def test_adam_state_and_settings_come_along() -> None:
    bag, ids = nn.EmbeddingBag(9, 4, sparse=True), torch.tensor([[1, 2, 2]])
    theirs = torch.optim.SparseAdam(bag.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-12)
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        model = nn.ModuleDict({"bag": copy.deepcopy(bag)})
        for number in range(6):
            if number == 3:
                own = torch.optim.SparseAdam(model.parameters(), lr=0.1)
                model.load_state_dict({"bag." + name: each for name, each in bag.state_dict().items()})
                own.load_state_dict(theirs.state_dict())
                tierstore.convert(model, store, optimizer=own)
                assert store["bag"].config.optimizer == optim.Adam(lr=0.1, betas=(0.8, 0.9), eps=1e-12)
                assert not own.state
            if number >= 3:
                model["bag"](ids).square().sum().backward()
            theirs.zero_grad()
            bag(ids).square().sum().backward()
            theirs.step()
        torch.testing.assert_close(store["bag"].read(torch.arange(9)), bag.weight.detach(), rtol=1e-5, atol=1e-6)


def test_optimizers_of_torch_that_are_kept_and_those_that_are_not() -> None:
    def rule(make: Callable[[Any], torch.optim.Optimizer]) -> optim.Optimizer:
        with tierstore.open(cold="memory", ddr="4MiB") as store:
            model = nn.ModuleList([nn.Embedding(3, 2)])
            tierstore.convert(model, store, optimizer=make(model.parameters()))
            return store["0"].config.optimizer

    assert rule(lambda own: torch.optim.SGD(own, 0.5, weight_decay=0.1)) == optim.SGD(lr=0.5, weight_decay=0.1)
    assert rule(lambda own: torch.optim.Adam(own, 0.5)) == optim.Adam(lr=0.5)
    assert rule(lambda own: torch.optim.AdamW(own, 0.5)) == optim.Adam(lr=0.5, weight_decay=0.01, decoupled=True)
    for make, told in (
        (lambda own: torch.optim.SGD(own, 0.5, momentum=0.9), "'0': momentum=0.9"),
        (lambda own: torch.optim.Adagrad(own, 0.5, lr_decay=0.1), "'0': lr_decay=0.1"),
        (lambda own: torch.optim.RMSprop(own), "'0': RMSprop has no counterpart"),
        (lambda _own: torch.optim.SGD(nn.Linear(1, 1).parameters()), "'0': the optimizer does not train its weight"),
    ):
        with pytest.raises(ValueError, match=told):
            rule(make)


def test_a_model_on_the_meta_device_is_never_made_whole() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.EmbeddingBag(10**9, 64, mode="sum"), nn.Linear(64, 1))
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        tierstore.convert(model, store, min_rows=10**6, init=tierstore.init.Normal(std=0.5, seed=3))
        model.to_empty(device="cpu")
        model[1].reset_parameters()
        row = store["0"].read(torch.tensor([999_999_999]))
        assert model[0](torch.tensor([[999_999_999]])).tolist() == row.tolist()
        assert 0.3 < row.std() < 0.7


def test_what_is_chosen_and_what_stays() -> None:
    rules = {"large": optim.SGD(lr=0.5), "bag": optim.Adam()}
    for chosen, tables in (
        ({"min_rows": 50, "optimizer": rules}, rules),
        ({"names": ["small"], "optimizer": optim.Adagrad()}, {"small": optim.Adagrad()}),
        ({"names": {"small": "x", "bag": "y"}, "prefix": "my."}, {"my.x": optim.SGD(), "my.y": optim.SGD()}),
    ):
        shapes = {"small": nn.Embedding(9, 2), "large": nn.Embedding(90, 2), "bag": nn.EmbeddingBag(99, 2)}
        with tierstore.open(cold="memory", ddr="4MiB") as store:
            made = tierstore.convert(nn.ModuleDict(shapes), store, **chosen)  # type: ignore[arg-type]
            assert {name: each.config.optimizer for name, each in store.tables.items()} == tables
            plain = [name for name, each in made.named_children() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
            assert set(plain) == shapes.keys() - set(chosen.get("names", tables))  # type: ignore[call-overload]
    root = nn.EmbeddingBag(9, 2, mode="max").eval()
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        alone = tierstore.convert(root, store)
        assert isinstance(alone, tierstore.TieredEmbeddingBag)
        assert (alone.mode, alone.training, list(store.tables)) == ("max", False, ["embedding"])
        assert torch.equal(alone(torch.tensor([[1, 2]])), root(torch.tensor([[1, 2]])))
        with pytest.raises(ValueError, match=r"'1': names= gives its table the name 'x', which another table has"):
            tierstore.convert(nn.Sequential(*(nn.Embedding(9, 2) for _ in "ab")), store, names={"0": "x", "1": "x"})
        shared = nn.ModuleDict({"one": nn.Embedding(9, 2), "two": nn.Embedding(9, 2)})
        shared["two"].weight = shared["one"].weight
        with pytest.raises(ValueError, match=r"'two' shares its weight, .* two names, 'x' and 'y'"):
            tierstore.convert(shared, store, names={"one": "x", "two": "y"})
        with pytest.raises(TypeError, match="'one' has a table's name 7, which is no str"):
            tierstore.convert(shared, store, names={"one": 7})  # type: ignore[dict-item]
        assert [*store] == ["embedding"]


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


HUNG: dict[str, Callable[[Any], Any]] = {
    "its weight has hooks (_backward_hooks)": lambda item: item.weight.register_hook(lambda grad: grad),
    "hooks (_post_accumulate": lambda item: item.weight.register_post_accumulate_grad_hook(lambda _: None),
    "it has hooks (_forward_hooks)": lambda item: item.register_forward_hook(lambda *_: None),
    "it has hooks (_state_dict_hooks)": lambda item: item._register_state_dict_hook(lambda *_: None),
    "forward was set on it": lambda item: setattr(item, "forward", lambda ids: ids),
    "it has other parameters, buffers": lambda item: item.register_module("norm", nn.LayerNorm(2)),
    "is a ParametrizedEmbedding": lambda item: parametrizations.spectral_norm(item),
    "not a dense nn.Parameter": lambda item: setattr(item, "weight", type("Own", (nn.Parameter,), {})(item.weight)),
}
"""What may be hung on a module or its weight, and could not be kept, by what is said of it."""


def refused_models() -> dict[str, nn.Module]:
    tied, viewed = (nn.ModuleDict({"item": nn.Embedding(9, 2), "head": nn.Linear(2, 9, bias=False)}) for _ in range(2))
    tied["head"].weight = tied["item"].weight
    viewed["head"].weight.data = viewed["item"].weight.data
    modes = nn.ModuleDict({"one": nn.EmbeddingBag(9, 2, mode="sum"), "two": nn.EmbeddingBag(9, 2, mode="mean")})
    modes["two"].weight = modes["one"].weight
    hung = {told: nn.ModuleDict({"item": nn.Embedding(9, 2)}) for told in HUNG}
    for told, model in hung.items():
        HUNG[told](model["item"])
    return hung | {
        "'item': its weight is bad.head.weight": tied,
        "'item': its weight is bad.head.weight of the model": viewed,
        "'one': bags that share its weight pool by mean and sum": modes,
        "'0': max_norm": nn.Sequential(nn.Embedding(9, 2, max_norm=1.0)),
        "'0': scale_grad_by_freq": nn.Sequential(nn.Embedding(9, 2, scale_grad_by_freq=True)),
        "'0': its weight is torch.float16": nn.Sequential(nn.Embedding(9, 2).half()),
        "'0': is a Scaled": nn.Sequential(Scaled(9, 2)),
    }


def test_what_cannot_be_kept_is_refused_by_name_before_anything_changes() -> None:
    for told, model in refused_models().items():
        whole = nn.ModuleDict({"good": nn.Embedding(9, 2), "bad": model})
        before, said = list(whole.named_modules(remove_duplicate=False)), re.escape(told.replace("'", "'bad.", 1))
        with tierstore.open(cold="memory", ddr="4MiB") as store:
            with pytest.raises(ValueError, match=r"nothing was converted.*\n.*" + said):
                tierstore.convert(whole, store)
            assert not store.tables
            assert list(whole.named_modules(remove_duplicate=False)) == before
            tierstore.convert(whole, store, names=["good"])
            assert list(store.tables) == ["good"]


def test_rows_of_an_earlier_run_are_used_and_never_overwritten(tmp_path: Any) -> None:
    ids = torch.arange(50)
    with tierstore.open(tmp_path / "s", ddr="4MiB") as store:
        tierstore.convert(SharedModule(), store, optimizer=optim.SGD(lr=0.5))
    with tierstore.open(tmp_path / "s", ddr="4MiB") as store:  # nothing was committed: the rows come again
        tierstore.convert(SharedModule(), store, optimizer=optim.SGD(lr=0.5))(ids, ids).sum().backward()
        rows = store["encoder.0"].read(ids)
        with pytest.raises(TableError, match=r"rows of table 'encoder.0' from before.*copy=False"):
            tierstore.convert(SharedModule(), store, optimizer=optim.SGD(lr=0.5))
        store.commit()
    for mode in ("w", "r"):
        with tierstore.open(tmp_path / "s", ddr="4MiB", mode=mode) as store:  # type: ignore[arg-type]
            with pytest.raises(TableError, match="copy=False"):
                tierstore.convert(SharedModule(), store, optimizer=optim.SGD(lr=0.5))
            with pytest.raises(TableError, match="exists and differs in num_embeddings"):
                tierstore.convert(nn.ModuleDict({"frozen": nn.Embedding(4, 8)}), store, copy=False)
            again = tierstore.convert(SharedModule(), store, copy=False)
            assert torch.equal(again.encoder[0](ids), rows)
            assert again.encoder[0] is again.decoder[0]


def test_the_way_back_is_traced_and_does_not_change_the_model() -> None:
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        model, batch = tierstore.convert(SharedModule(), store), (torch.tensor([1, 2]), torch.tensor([3, 3]))
        before = model(*batch)
        plain = tierstore.plain_model(model)
        assert torch.equal(torch.fx.symbolic_trace(plain)(*batch), before)
        plain(*batch).sum().backward()
        with torch.no_grad():
            for each in plain.parameters():
                each.zero_()
        assert torch.equal(model(*batch), before)
        both = nn.ModuleDict({"bags": tierstore.TieredEmbeddingBagCollection(store)})
        with pytest.raises(ValueError, match="'bags' is a TieredEmbeddingBagCollection"):
            tierstore.plain_model(both)
    config = tierstore.TableConfig(name="any", num_embeddings=9, embedding_dim=4, ids=tierstore.DynamicIds())
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        rows = nn.ModuleDict({"rows": tierstore.TieredEmbedding(store.create_table(config))})
        with pytest.raises(TableError, match=r"'any' has dynamic ids.*keep 'rows' as it is, or export"):
            tierstore.plain_model(rows)


def test_what_is_carried_over() -> None:
    """References, attributes and optimizers' groups go on with the very module, and with its weight."""
    model = nn.ModuleDict({"item": nn.EmbeddingBag(9, 2, mode="sum"), "head": nn.Linear(2, 1)})
    item, weight, ids = model["item"], model["item"].weight, torch.arange(9)[None]
    held: list[Any] = [[item], {"item": item}, functools.partial(item), lambda given: item(given)]
    item.vocabulary, weight.decays = {"a": 1}, False
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    names = list(dict(model.named_parameters()))
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        tierstore.convert(model, store, optimizer=optimizer)
        assert held[0][0] is held[1]["item"] is model["item"]
        for count, use in enumerate((held[0][0], held[1]["item"], *held[2:]), start=1):
            use(ids).sum().backward()
            assert store["item"].state.step == count
        assert (item.vocabulary, item.rows.decays, item.rows is weight) == ({"a": 1}, False, True)
        groups = optimizer.param_groups
        assert [len(each["params"]) for each in groups] == [len(names)]
        assert groups[0]["param_names"] == names
        optimizer.load_state_dict(optimizer.state_dict())
        plain = pickle.loads(pickle.dumps(tierstore.plain_model(model)))
        assert torch.equal(plain["item"](ids), model["item"](ids))
        assert plain["item"].vocabulary == {"a": 1}
        with pytest.raises(AttributeError, match=r"has no weight.*table.write"):
            item.weight = plain["item"].weight
        with pytest.warns(RuntimeWarning, match=r"'item.weight' was not loaded.*table.write"):
            model.load_state_dict(plain.state_dict(), strict=False)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "before": lambda own: lr_scheduler.LambdaLR(own, lambda step: min(1.0, step / 5)),
    "after": lambda own: lr_scheduler.OneCycleLR(own, 0.5, total_steps=30, cycle_momentum=False),
    "before a state is loaded": lambda own: lr_scheduler.LinearLR(own, 0.01, total_iters=5),
    "in backward": lambda own: lr_scheduler.StepLR(own, 2),
}
"""By when each is made."""


@pytest.mark.parametrize("made", SCHEDULES)
def test_rates_are_the_torch_optimizers_at_each_update(made: str) -> None:
    ids = torch.arange(9)[None]
    with warnings.catch_warnings(action="ignore"):  # torch's own, of what it deprecates
        in_backward = importlib.import_module("torch.distributed.optim")

    def rows(*, is_converted: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.ModuleDict({"item": nn.EmbeddingBag(9, 4, mode="sum")})
        weight = model["item"].weight
        if made == "in backward":
            in_backward._apply_optimizer_in_backward(torch.optim.Adam, [weight], {"lr": 0.1})
        is_ours = is_converted and made == "in backward"
        optimizer = weight._in_backward_optimizers[0] if made == "in backward" else torch.optim.Adam([weight], lr=0.1)
        scheduler = None if made == "after" else SCHEDULES[made](optimizer)
        with tierstore.open(cold="memory", ddr="4MiB") as store:
            if is_converted:
                tierstore.convert(model, store, optimizer=None if is_ours else optimizer)
            scheduler = scheduler or SCHEDULES[made](optimizer)
            for step in range(8):
                if step == 4 and made == "before a state is loaded":
                    optimizer.load_state_dict(optimizer.state_dict())
                optimizer.zero_grad()
                (model["item"](ids) - 1).square().mean().backward()
                optimizer.step()
                scheduler.step()
            return store["item"].read(ids[0]) if is_converted else weight.detach()

    torch.testing.assert_close(rows(is_converted=True), rows(is_converted=False), rtol=1e-4, atol=1e-4)


def test_what_does_not_follow_is_said() -> None:
    model = nn.ModuleDict({"item": nn.Embedding(9, 2)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=30)  # which cycles betas, too
    with tierstore.open(cold="memory", ddr="4MiB") as store:
        tierstore.convert(model, store, optimizer=optimizer)
        optimizer.step()
        scheduler.step()
        with pytest.warns(RuntimeWarning, match=r"but keep \{'betas'.*cycle_momentum=False"):
            assert store["item"].learning_rate == optimizer.param_groups[0]["lr"]
        with pytest.warns(RuntimeWarning) as warned:
            store.optimizer(optimizer)
        assert "whose schedule reaches it no more" in "".join(str(each.message) for each in warned)


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    lambda model: torch.compile(model, backend="eager"),  # type: ignore[list-item, return-value]
    nn.DataParallel,
    swa_utils.AveragedModel,
    lambda model: nn.Sequential(*map(checkpoint_wrapper, model)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_add_nothing_to_names(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    model = wrapper(nn.Sequential(nn.ModuleDict({"module": nn.EmbeddingBag(9, 2)}), nn.Linear(2, 1)))
    given = [name for name, each in model.named_modules() if isinstance(each, nn.EmbeddingBag)]
    for names in (["0.module"], given):
        with tierstore.open(cold="memory", ddr="4MiB") as store:
            tierstore.convert(copy.deepcopy(model), store, names=names, optimizer={"0.module": optim.Adagrad()})
            assert list(store.tables) == ["0.module"]


def bag_model() -> nn.ModuleDict:
    return nn.ModuleDict({"item": nn.EmbeddingBag(9, 2, mode="sum")})


def test_a_second_model_trains_rows_of_its_own_and_another_run_may_add_some(tmp_path: Path) -> None:
    ids = torch.arange(9)[None]
    with tierstore.open(tmp_path / "s", ddr="4MiB") as store:
        model: Any = tierstore.convert(bag_model(), store)
        for is_copied in (True, False):
            with pytest.raises(TableError, match=r"prefix="):
                tierstore.convert(bag_model(), store, copy=is_copied)
        before = store["item"].read(ids[0])
        second: Any = tierstore.convert(bag_model(), store, prefix="second.")
        second["item"](ids).sum().backward()
        assert torch.equal(store["item"].read(ids[0]), before)
        assert [table.state.step for table in store.tables.values()] == [0, 1]
        looks: Any = tierstore.convert(bag_model().requires_grad_(False), store, copy=False)
        assert torch.equal(looks["item"](ids), model["item"](ids))
        store.commit()
    for is_meta in (False, True):  # which has no rows to write over others
        with tierstore.open(tmp_path / "s", ddr="4MiB") as store:  # another run of a model that has one more
            with torch.device("meta" if is_meta else "cpu"):
                model = bag_model()
            model["new"] = nn.Embedding(5, 2)
            new = model["new"].weight.detach()
            tierstore.convert(model, store, copy=is_meta)
            assert torch.equal(store["item"].read(ids[0]), before)
            assert torch.equal(store["new"].read(torch.arange(5)), new)
