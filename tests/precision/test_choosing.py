"""Runs made small by what it costs: what is served is what was measured, and a killed search ends as a whole one."""

import itertools
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tierstore
from tests.serve.clients import Client
from tests.serve.loops import wait_for
from tests.serve.models.stores import asked
from tests.serve.models.test_ranking import query
from tests.serve.whole import serving
from tests.train.readers.rows import matrix
from tests.train.runs import TEST_ROWS, TRAIN_ROWS, config_of
from tierstore.cli import entry as cli
from tierstore.precision import Choice, HeldOut, Part, Unit, quantize_run, search, size_of
from tierstore.serve.models import Models
from tierstore.serve.models.dense import LOW
from tierstore.train import train
from tierstore.train.build import open_data
from tierstore.train.config import RunConfig

LOSS = 0.002
SMALL: dict[str, Any] = {"ddr": "8MiB"}
CHANGES = {"embedding__dim": 16, "model__top_mlp": [48, 8], "optimizer__sparse_lr": 0.5}


@pytest.fixture(scope="module", autouse=True)
def on_any_processor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for each in LOW.values():
            patch.setattr(each, "is_fast", staticmethod(lambda: True))
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    made = config_of(tmp_path_factory.mktemp("run"), "run", **CHANGES)
    train(made)
    return made


@pytest.fixture(scope="module")
def small(config: RunConfig) -> Path:
    """The run made small; its folder."""
    folder = Path(f"{config.store.path}-small")
    quantize_run(config.store.path, folder, loss=LOSS)
    return folder


@pytest.fixture(scope="module")
def small8(config: RunConfig) -> Path:
    """The run made small where float32 is faster than bfloat16; its folder."""
    folder = Path(f"{config.store.path}-small8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOW["bfloat16"], "is_fast", staticmethod(lambda: False))
        quantize_run(config.store.path, folder, loss=LOSS)
    return folder


@pytest.fixture(params=["bfloat16", "int8"])
def of_type(request: pytest.FixtureRequest, small: Path, small8: Path) -> tuple[str, Path]:
    """What a large layer became, and the folder."""
    return request.param, {"bfloat16": small, "int8": small8}[request.param]


def told(folder: Path) -> Any:
    return json.loads((folder / "quantize.json").read_text())


def test_what_is_served_is_what_was_measured(config, of_type):
    """To the bit, by the other way: rows converted in a store, not as they are read; layers stored in fewer bits."""
    layer, folder = of_type
    report = told(folder)
    choice = report["choice"]
    assert len(set(choice.values())) >= 3, "or this tests little"
    assert choice["layer top.0"] == layer
    reader, _ = open_data(config)
    raw = next(iter(reader.read_chunks(TRAIN_ROWS, TRAIN_ROWS + TEST_ROWS, TEST_ROWS)))
    held = HeldOut(Path(config.store.path), "", TEST_ROWS)
    categories = matrix(raw.categories)
    with tierstore.open(folder, mode="r", **SMALL) as store:
        model: Any = Models(store).by_name["ranking"]
        for part, first in (("search", 0), ("check", 1)):
            own = slice(first, None, 2)
            (found,) = asked(model, query(raw.dense[own].copy(), categories[own]))
            measured = torch.sigmoid(held.logits(choice, part)).numpy()  # type: ignore[arg-type]
            assert found["probabilities"].tobytes() == measured.tobytes()
            labels, given = (torch.from_numpy(each).double() for each in (raw.labels[own], found["probabilities"]))
            loss = torch.nn.functional.binary_cross_entropy(given, labels).item()
            assert report["added"][part] <= LOSS
            assert loss == pytest.approx(report["first"][part] * (1 + report["added"][part]), rel=1e-6)
        tensors = store.tensors()
        sizes: dict[str, int] = dict.fromkeys(("rows", "other"), 0)
        for unit in report["units"]:
            _, _, name = unit["name"].partition(" of ")
            dtype = choice.get(unit["name"], "float32")
            sizes["rows" if name else "other"] += unit["size_bytes"][dtype]
            assert not name or store[name].layout.dtype == dtype
        counts = {table: sum(map(len, store.written_rows(table))) for table in store.tables.values()}
        assert sizes["rows"] == sum(count * table.layout.row_bytes for table, count in counts.items())
        assert sizes["other"] == sum(each.nbytes for each in tensors.values())
    stored = {"bfloat16": {"weight"}, "int8": {"weight.levels", "weight.scales"}}[layer] | {"bias"}
    assert {name for name in tensors if "top.0." in name} == {f"model.top.0.{each}" for each in stored}
    assert all(name.startswith("model.") for name in tensors)


def test_the_server_follows_the_choice_and_a_version_with_another(config, of_type, tmp_path):
    copied = tmp_path / "served"
    shutil.copytree(of_type[1], copied)
    dense, ids = np.ones((2, 13), np.float32), np.arange(52)
    lengths = np.ones((26, 2), np.int32)
    with tierstore.open(config.store.path, mode="r", **SMALL) as run:
        weights = {name: each for name, each in run.tensors().items() if name.startswith("model.")}
    with serving(copied) as server, Client(server.url) as client:
        first = client.rank(dense, ids, lengths)
        with tierstore.open(copied, **SMALL) as store:
            version = store.commit(extra=store.extra, tensors=weights)
        wait_for(lambda: server.engine.version == version)
        in_float32 = client.rank(dense, ids, lengths)
    assert not np.array_equal(first, in_float32)
    assert first == pytest.approx(in_float32, rel=0.1)


@pytest.mark.parametrize("change", ["missing", "wide"])
def test_a_commit_with_a_broken_layer_is_refused(small8, tmp_path, change):
    shutil.copytree(small8, tmp_path / "broken")
    with tierstore.open(tmp_path / "broken", **SMALL) as store:
        tensors, name = store.tensors(), "model.top.0.weight"
        scales, levels = (tensors.pop(f"{name}.{each}") for each in ("scales", "levels"))
        broken = {} if change == "missing" else {f"{name}.scales": scales}
        levels = levels if change == "missing" else levels.repeat(1, 2)
        store.commit(extra=store.extra, tensors=tensors | broken | {f"{name}.levels": levels})
    refused = pytest.raises(tierstore.errors.DamagedError, match=r"model.top.0.weight")
    with tierstore.open(tmp_path / "broken", mode="r", **SMALL) as store, refused:
        Models(store)


class Stop(BaseException):
    """As a kill is."""


def killed(directory: str | Path, target: Path, *, after: int | None) -> None:
    """A search that is killed after so many points, or, without a number, in the copy."""
    measure, left = HeldOut.measure, iter(range(9999 if after is None else after))

    def measured(self: HeldOut, choice: Any, part: Any) -> float:
        if next(left, None) is None:
            raise Stop
        return measure(self, choice, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldOut, "measure", measured)
        if after is None:
            patch.setattr("tierstore.precision.quantize", Mock(side_effect=Stop))
        with pytest.raises(Stop):
            quantize_run(directory, target, loss=LOSS)
    assert not target.exists()


@pytest.mark.parametrize("after", [40, None])
def test_a_killed_search_goes_on_to_the_same(config, small, tmp_path, after):
    target, points = tmp_path / "new", tmp_path / "new.points"
    killed(config.store.path, target, after=after)
    known = [json.loads(line)[0] for line in points.read_text().splitlines()[1:]]
    with points.open("ab") as file:
        file.write(b'["a line that the kill cut')
    made = quantize_run(config.store.path, target, loss=LOSS)
    assert len(known) == len(set(known)) == (after or len(known))
    assert (made.measured == 0) == (after is None), "no point is measured twice"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new"]
    for name in ("quantize.json", "quantize.html"):
        assert (target / name).read_bytes() == (small / name).read_bytes()
    with tierstore.open(target, mode="r", **SMALL) as one, tierstore.open(small, mode="r", **SMALL) as other:
        for name, table in one.tables.items():
            every = torch.arange(table.config.num_embeddings)
            assert torch.equal(table.read(every), other[name].read(every))
        assert all(torch.equal(each, other.tensors()[name]) for name, each in one.tensors().items())


def test_a_search_with_other_arguments_is_refused_by_name(config, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(config.store.path, run)
    given: dict[str, Any] = {"loss": LOSS}
    killed(run, tmp_path / "new", after=3)
    for name, changed in {"loss": {"loss": 0.1}, "data": {"data": config.data.path, "max_rows": TEST_ROWS}}.items():
        with pytest.raises(ValueError, match=rf"new.points is of a search with another {name}"):
            quantize_run(run, tmp_path / "new", **(given | changed))
    with tierstore.open(run, **SMALL) as store:
        store["C1"].write(torch.arange(100), torch.ones(100, 16))
        store.commit(extra=store.extra, tensors=store.tensors())
    with pytest.raises(ValueError, match="search with another run"):
        quantize_run(run, tmp_path / "new", **given)
    assert not (tmp_path / "new").exists()


def test_the_command_reports_and_wrong_arguments_change_nothing(config, small, tmp_path, capsys):
    new, run = tmp_path / "new", config.store.path
    assert cli.main(["quantize", run, str(new), "--loss", "0.5", "--data", config.data.path, "--rows", "64"]) == 0
    out = capsys.readouterr().out
    assert "rows of C26" in out
    assert "32 rows searched on" in out
    page = (new / "quantize.html").read_text()
    assert "Log loss added over bytes saved" in page
    assert "<polyline" in page
    assert page.count("<tr>") == len(told(new)["steps"]) + 1
    other = str(tmp_path / "x")
    for wrong, message in {
        (run, str(new), "--loss", "0.5"): "is there already",
        (run, other, "--loss", "nan"): "loss=nan",
        (run, other, "--loss", "0.1", "--rows", "0"): "max_rows=0",
        (run, other): "either --dtype",
        (run, other, "--loss", "0.1", "--table", "C1"): "--table goes with --dtype",
        (run, other, "--dtype", "int8", "--rows", "9"): "--rows goes with --loss",
        (str(small), other, "--loss", "0.1"): "is in fewer bits already",
        (run, str(Path(run) / "x"), "--loss", "0.1"): "is inside the store",
    }.items():
        assert cli.main(["quantize", *wrong]) != 0
        assert message in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new"]


UNITS = [Unit(name, {"float32": 64 * rows, "float16": 32 * rows, "int8": 24 * rows, "int4": 16 * rows})
         for name, rows in (("a", 10), ("b", 400), ("c", 3000))]  # fmt: skip
UNITS += [Unit("layer", {"float32": 4000, "int8": 1000}), Unit("rest", {"float32": 77})]
FIRST = 0.5


class Losses:
    """Each lowering adds a loss, more for fewer bits; pairs of lowered units add to that."""

    def __init__(self, seed: int, *, on_check: float = 1.0) -> None:
        draw = random.Random(seed)
        self.own: dict[tuple[str, str], float] = {}
        for unit in UNITS:
            added = 0.0
            for dtype in list(unit.size_bytes)[1:]:
                added += draw.uniform(0, 0.002)
                self.own[unit.name, dtype] = added
        self.pairs = {frozenset(pair): draw.uniform(0, 0.001) for pair in itertools.combinations("abc", 2)}
        self.on_check = on_check

    def added(self, choice: Choice) -> float:
        pairs = sum(added for pair, added in self.pairs.items() if pair <= choice.keys())
        return sum(self.own[each] for each in choice.items()) + pairs

    def __call__(self, choice: Choice, part: Part) -> float:
        return FIRST * (1 + self.added(choice) * (self.on_check if part == "check" else 1))


def every_choice() -> list[dict[str, str]]:
    types = [list(unit.size_bytes) for unit in UNITS]
    return [
        {unit.name: dtype for unit, dtype in zip(UNITS, each, strict=True) if dtype != "float32"}
        for each in itertools.product(*types)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0.0, 0.0005, 0.002, 1.0])
def test_the_bound_holds_together_and_nothing_more_fits(seed, bound):
    losses = Losses(seed)
    found = search(UNITS, bound, losses)
    assert losses.added(found.choice) <= bound
    assert found.added["search"] == pytest.approx(losses.added(found.choice), abs=1e-12)
    for unit in UNITS:  # and with one more step the loss is above the bound
        now = unit.size_bytes[found.choice.get(unit.name, "float32")]
        for dtype in [each for each, size in unit.size_bytes.items() if size < now]:
            assert losses.added({**found.choice, unit.name: dtype}) > bound
    fitting = [size_of(UNITS, each) for each in every_choice() if losses.added(each) <= bound]
    least, most = min(fitting), size_of(UNITS, {})
    assert size_of(UNITS, found.choice) - least <= 0.25 * (most - least), "greedy is not this far off the best"
    assert found.choice == {each.unit: each.dtype for each in found.steps if each.became == "kept"}


def test_a_loss_that_falls_by_luck_counts_as_one_that_rises():
    losses = Losses(1)
    losses.own = {each: -added for each, added in losses.own.items()}
    losses.pairs = {}
    found = search(UNITS, 0.001, losses)
    assert found.choice
    assert -0.001 <= found.added["search"] < 0


def test_steps_are_undone_until_the_other_rows_agree():
    losses = Losses(3, on_check=2.0)
    found = search(UNITS, 0.004, losses)
    assert 2 * losses.added(found.choice) <= 0.004
    assert found.added["check"] == pytest.approx(2 * losses.added(found.choice), abs=1e-12)
    before: dict[str, str] = {}
    for step in found.steps:
        before |= {step.unit: step.dtype} if step.became != "refused" else {}
    assert losses.added(before) <= 0.004 < 2 * losses.added(before), "the search alone went too far"
    ends: list[Any] = [each.became for each in found.steps if each.became != "refused"]
    assert ends == sorted(ends), "those undone are the last ones"
    undone = next(each for each in found.steps if each.became == "undone")
    assert 2 * losses.added({**found.choice, undone.unit: undone.dtype}) > 0.004, "no more than needed"


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_is_no_number_breaks_every_bound(seed):
    """On either part, of any choice; of the run itself there is no bound to keep."""
    losses, draw = Losses(seed), random.Random(seed)
    broken = {(unit.name, dtype) for unit in UNITS for dtype in unit.size_bytes if draw.random() < 0.3}
    part = draw.choice(["search", "check"])

    def measure(choice: Choice, own: Part) -> float:
        return math.nan if own == part and broken & {*choice.items()} else losses(choice, own)

    assert not broken & {*search(UNITS, 1.0, measure).choice.items()}
    for first in (math.nan, math.inf, 0.0):
        with pytest.raises(ValueError, match="not positive numbers"):
            search(UNITS, 1.0, lambda choice, own, first=first: first if own == part else 1.0)
