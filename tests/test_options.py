"""Any configuration of tables, opened with any options, trains to the bits of the same tables in memory; and every
option that there is, is drawn here."""

import dataclasses
import inspect
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import tierstore
from tests.drawn import OPTIONS, drawn
from tierstore import ids, init, optim
from tierstore.errors import IdError
from tierstore.kernels.jit import JIT_ENABLED

NUMBERS = st.lists(st.integers(0, 99), min_size=1, max_size=40)


class OptionsMachine(RuleBasedStateMachine):
    """Each call is made on two stores, with the same result or error."""

    @initialize(config=drawn(tierstore.TableConfig), data=st.data())
    def begin(self, config: tierstore.TableConfig, data: Any) -> None:
        self.config, self.minute, self.kept = config, 1, list[tuple[int, int]]()
        self.directory = Path(tempfile.mkdtemp())
        self.twin = tierstore.open(cold="memory", ddr="8MiB", threads=1, keep=100)
        self.open(data)
        self.show()

    def open(self, data: Any, **chosen: Any) -> None:
        options = {name: data.draw(values) for name, values in OPTIONS[tierstore.open].items()} | chosen
        if self.config.rounding == "stochastic":
            options["hbm"] = 0
        self.can_reopen = options["cold"] == "lmdb"
        for name in ("version", "dtype"):
            del options[name]
        self.store = tierstore.open(self.directory if self.can_reopen else None, **options | {"mode": "w"})

    def show(self) -> None:
        for store in (self.store, self.twin):
            store.create_table(self.config)
            store.set_time(60 * self.minute)
        self.modules = [tierstore.TieredEmbeddingBagCollection(store) for store in (self.store, self.twin)]

    def both(self, call: Callable[[tierstore.Table], Any]) -> None:
        self.compare([lambda store=store: call(store[self.config.name]) for store in (self.store, self.twin)])

    def compare(self, calls: list[Callable[[], Any]]) -> None:
        found = []
        for call in calls:
            try:
                found.append(call())
            except IdError as error:
                assert self.config.ids is None or self.config.ids.unseen == "error"
                found.append(str(error))
        assert torch.equal(*found) if isinstance(found[0], torch.Tensor) else found[0] == found[1]

    def ids(self, numbers: list[int]) -> torch.Tensor:
        rows = self.config.num_embeddings
        values = [each * 2**56 - 2**62 if self.config.ids else each % rows for each in numbers]
        return torch.tensor(values, dtype=torch.long)

    @rule(numbers=NUMBERS, seed=st.integers(0, 2**16), per_bag=st.integers(1, 7))
    def train(self, numbers: list[int], seed: int, per_bag: int) -> None:
        names = self.config.feature_names
        starts = torch.cat([torch.arange(0, len(numbers), per_bag), torch.tensor([len(numbers)])])
        bags = len(starts) - 1
        if bags % len(names):
            starts = torch.cat([starts, starts[-1:]])
        batch = tierstore.KeyedJaggedTensor(list(names), self.ids(numbers), lengths=starts.diff())

        def step(module: Any) -> torch.Tensor:
            out = module(batch).values()
            out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)))
            return out.detach()

        self.compare([lambda module=module: step(module) for module in self.modules])

    train_again = train

    @rule(numbers=NUMBERS, seed=st.integers(0, 2**16))
    def write(self, numbers: list[int], seed: int) -> None:
        rows = torch.randn(len(numbers), self.config.embedding_dim, generator=torch.Generator().manual_seed(seed))
        given = self.ids(numbers)
        if self.config.ids is not None:
            known = torch.cat([*self.twin[self.config.name].written()])
            given, rows = given[torch.isin(given, known)], rows[torch.isin(given, known)]
        self.both(lambda table: table.write(given, rows))

    @rule(numbers=NUMBERS)
    def read(self, numbers: list[int]) -> None:
        for name in ("read", "read_state", "first_values"):
            self.both(lambda table, name=name: getattr(table, name)(self.ids(numbers)))  # type: ignore[misc]

    @precondition(lambda self: self.config.ids is not None)
    @rule(numbers=NUMBERS, minutes=st.integers(0, 9))
    def change_ids(self, numbers: list[int], minutes: int) -> None:
        self.minute += minutes
        for store in (self.store, self.twin):
            store.set_time(60 * self.minute)
        self.both(lambda table: table.evict(self.ids(numbers[:5])))
        self.both(lambda table: table.admit(self.ids(numbers[5:])))
        self.both(lambda table: table.id_stats()[:2])

    @rule()
    def commit(self) -> None:
        self.kept.append((self.store.commit(), self.twin.commit()))
        self.kept = self.kept[-self.store.keep :]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def roll_back(self, data: Any) -> None:
        place = data.draw(st.integers(0, len(self.kept) - 1))
        for store, version in zip((self.store, self.twin), self.kept[place], strict=True):
            store.rollback(version)
        self.kept = self.kept[: place + 1]

    @precondition(lambda self: self.kept and self.can_reopen)
    @rule(data=st.data())
    def reopen(self, data: Any) -> None:
        self.store.close()
        self.open(data, cold="lmdb", keep=self.store.keep)
        self.twin.rollback(self.kept[-1][1])
        self.show()

    @precondition(lambda self: self.kept and self.can_reopen)
    @rule(data=st.data(), numbers=NUMBERS)
    def look_back(self, data: Any, numbers: list[int]) -> None:
        names = ("version", "ddr", "policy", "threads", "dtype")
        options = {name: data.draw(OPTIONS[tierstore.open][name]) for name in names}
        if self.config.dtype != "float32":
            options["dtype"] = None
        if options["version"] is not None:
            options["version"] = self.kept[options["version"] % len(self.kept)][0]
        newest = options["version"] in (None, self.kept[-1][0])
        with tierstore.open(self.directory, mode="r", **options) as store:
            assert store.version == (self.kept[-1][0] if newest else options["version"])
            if newest and options["dtype"] != "float16" and not self.store.changed_tables:
                own = [lambda each=each: each[self.config.name].read(self.ids(numbers)) for each in (store, self.twin)]
                self.compare(own)
            store.verify()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.read(list(range(60)))
            self.store.close()
            self.twin.close()
            shutil.rmtree(self.directory)


TestOptions = OptionsMachine.TestCase
TestOptions.settings = TestOptions.settings.__class__(
    max_examples=10 if JIT_ENABLED else 2, stateful_step_count=25, deadline=None
)


def public_configurations() -> set[Any]:
    names = [(module, name) for module in (ids, init, optim) for name in module.__all__]
    found = {getattr(*each) for each in names} | {tierstore.TableConfig}
    bases = {ids.Admission, ids.Eviction, init.Initializer, optim.Optimizer}
    return {each for each in found if dataclasses.is_dataclass(each)} - bases


def test_every_option_is_drawn_by_a_program() -> None:
    """A new class, field or argument fails here until a program draws it."""
    own = [field for field in dataclasses.fields(ids.DynamicIds) if not field.compare]
    assert [field.name for field in own] == ["owners", "owned"], "set by tierstore.dist, whose tests draw them"
    expected = {
        each: {field.name for field in dataclasses.fields(each) if field.compare} for each in public_configurations()
    }
    expected[tierstore.open] = inspect.signature(tierstore.open).parameters.keys() - {"directory", "create"}
    assert {each: set(options) for each, options in OPTIONS.items()} == expected
