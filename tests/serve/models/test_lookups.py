"""Tables as models against the reads of the store, and programs of torch.export against calling them by hand."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import compress, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tierstore
from tests.serve.models.stores import (
    DIMS,
    POOLINGS,
    ROWS,
    Counted,
    OfDict,
    asked,
    make_store,
    require_refused,
    save,
    save_two_tables,
    tensor,
)
from tierstore.serve.config import ServeConfig
from tierstore.serve.messages import InferTensor, objects
from tierstore.serve.models import Models, load_program
from tierstore.serve.models import jagged as jagged_ids
from tierstore.serve.models.exported import Exported
from tierstore.settings.sections import to_dict
from tierstore.train.config import DataSection, EmbeddingSection, RunConfig

NAMES = tuple(ROWS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tierstore.Store]:
    directory = tmp_path_factory.mktemp("lookups") / "store"
    make_store(directory)
    with tierstore.open(directory, mode="r", ddr="4MiB", threads=1) as opened:
        yield opened


@st.composite
def bags(draw: Any, name: str, low: int = 0, high: int | None = None) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    high = ROWS[name] - 1 if high is None else high
    total = sum(lengths)
    ids = draw(st.lists(st.integers(low, high), min_size=total, max_size=total))
    weights = None
    if POOLINGS[name] == "sum" and draw(st.booleans()):
        weights = draw(st.lists(st.floats(-4, 4, width=32), min_size=total, max_size=total))
    return {"ids": ids, "lengths": lengths, "weights": weights, "kind": draw(st.sampled_from(["INT64", "INT32"]))}


def inputs_of(query: dict[str, Any], ids: str = "ids", shape: Any = None) -> dict[str, Any]:
    inputs = {ids: tensor(query["kind"], query["ids"]), "lengths": tensor("INT32", query["lengths"], shape)}
    return inputs if query["weights"] is None else inputs | {"weights": tensor("FP32", query["weights"])}


def only_rows(query: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """What is left of a query without the ids that are no rows."""
    good = [0 <= each < num_rows for each in query["ids"]]
    ends = np.cumsum([0, *query["lengths"]])
    kept = {name: [*compress(query[name], good)] if query[name] else query[name] for name in ("ids", "weights")}
    return query | kept | {"lengths": [sum(good[begin:end]) for begin, end in pairwise(ends)]}


@pytest.mark.parametrize("name", NAMES)
def test_rows_and_bags_are_those_of_the_table_alone_or_in_a_batch(store, name):
    """Ids that are no rows count as zeros, and are counted."""
    counted, told = Counted(), 0
    models: Any = Models(store, dropped=counted).by_name
    pooled, rows = models[f"pooled.{name}"], models[f"rows.{name}"]
    every = store[name].read(torch.arange(ROWS[name])).float().numpy()

    @settings(max_examples=25)
    @given(st.lists(bags(name, -3, ROWS[name] + 3) | bags(name), min_size=1, max_size=4))
    def check(queries: list[dict[str, Any]]) -> None:
        nonlocal told
        together = asked(pooled, *map(inputs_of, queries))
        read = asked(rows, *({"ids": tensor("INT64", query["ids"])} for query in queries))
        for given_, found, read_ in zip(queries, together, read, strict=True):
            (alone,) = asked(pooled, inputs_of(given_))
            assert found["embeddings"].tobytes() == alone["embeddings"].tobytes()
            query = only_rows(given_, ROWS[name])
            told += len(given_["ids"]) - len(query["ids"])
            ids = torch.tensor(query["ids"], dtype=torch.int64)
            offsets = torch.tensor([0, *np.cumsum(query["lengths"])])
            weights = None if query["weights"] is None else torch.tensor(query["weights"])
            direct = store[name].pooled(ids, offsets, mode=POOLINGS[name], per_sample_weights=weights)
            assert found["embeddings"].tobytes() == direct.numpy().tobytes()
            want = [every[each] if 0 <= each < ROWS[name] else np.zeros(DIMS[name]) for each in given_["ids"]]
            assert read_["rows"].tobytes() == np.array(want, np.float32).reshape(-1, DIMS[name]).tobytes()
        assert (counted.get(f"pooled.{name}", 0), counted.get(f"rows.{name}", 0)) == (2 * told, told)

    check()
    assert told


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tierstore.Store]:
    """Tables of one width, so that there is a model "rows"."""
    directory = tmp_path_factory.mktemp("narrow") / "store"
    make_store(directory, ["sums", "peaks"])
    with tierstore.open(directory, mode="r", ddr="4MiB", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("quick", [0, math.inf], ids=["as small as may be", "growing"])
@pytest.mark.parametrize("name", ["pooled.sums", "rows.sums", "pooled", "rows"])
def test_a_query_in_parts_gives_the_bits_of_one_at_once(narrow, name, quick, monkeypatch):
    model: Any = Models(narrow).by_name[name]
    num_features = 4 if "." not in name else 1
    generator = np.random.default_rng(len(name))
    monkeypatch.setattr(jagged_ids, "PART_IDS", 8)
    monkeypatch.setattr(jagged_ids, "_QUICK_SECONDS", quick)
    for _ in range(20):
        lengths = generator.integers(0, 3, (num_features, generator.integers(1, 20)))
        ids = tensor("INT64", generator.integers(0, 20, lengths.sum()))
        inputs = {"values" if num_features > 1 else "ids": ids}
        if name != "rows.sums":
            inputs["lengths"] = tensor("INT32", lengths if num_features > 1 else lengths[0])
        query, pause = model.parse(inputs), Mock()
        (whole,) = model.run([query])
        (parts,) = model.run([query], pause)
        for output, want in whole.items():
            assert parts[output].data.tobytes() == want.data.tobytes()
        least = 0 if quick else ids.data.size // 16 - 1
        assert least <= pause.call_count <= (2 * num_features if quick else math.inf)


def test_ids_of_a_request_are_counted_and_those_of_a_sample_bounded(narrow):
    """So that nobody holds the server for longer than many small requests would."""
    for name, ids, num_features in (("pooled.sums", "ids", 1), ("pooled", "values", 4)):
        model: Any = Models(narrow).by_name[name]

        def inputs(num_ids: int, num_samples: int, ids: str = ids, features: int = num_features) -> dict[str, Any]:
            lengths = np.zeros((features, num_samples), np.int32)
            lengths[0] = num_ids // num_samples
            shape = (features, num_samples)[features == 1 :]
            return {ids: tensor("INT64", [1] * num_ids), "lengths": tensor("INT32", lengths, shape)}

        assert model.parse(inputs(640, 10)).num_samples == 10
        assert model.parse(inputs(64_000, 10)).num_samples == 1000 // num_features
        assert model.parse(inputs(8192, 1)).num_ids == 8192
        require_refused(model, inputs(8193, 1), "'lengths' gives sample 0 8193 ids; a sample has at most 8192")
        ends = {"offsets": tensor("INT64", [0] + num_features * [8193])}
        require_refused(model, {ids: tensor("INT64", [1] * 8193)} | ends, "'offsets' gives sample 0 8193 ids")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a table "wide" of 64 numbers a row, and one of 1,000."""
    directory = tmp_path_factory.mktemp("wide") / "store"
    with tierstore.open(directory, ddr="8MiB") as store:
        config = tierstore.TableConfig(name="wide", num_embeddings=8000, embedding_dim=64, feature_names=("a", "b"))
        store.create_table(config).write(torch.arange(8000), torch.randn(8000, 64))
        store.create_table(tierstore.TableConfig(name="wider", num_embeddings=5, embedding_dim=1000))
        store.commit()
    return directory


@pytest.mark.parametrize(("ddr", "model"), [("8MiB", "rows.wide"), ("600KiB", "pooled.wide")])
def test_what_is_answered_at_once(wide, ddr, model):
    """Few ids, all of whose rows are in memory: a table of more rows than that, too, once they were asked for."""
    with tierstore.open(wide, mode="r", ddr=ddr, threads=1) as store:
        models: Any = Models(store).by_name
        asks, run = models[model].answer_at_once, models[model].run

        def query(ids: list[int]) -> Any:
            lengths = {} if model == "rows.wide" else {"lengths": tensor("INT32", [1] * len(ids))}
            return models[model].parse({"ids": tensor("INT64", ids)} | lengths)

        assert asks(query([7, 3])) is None
        want = run([query([7, 3])])[0]
        for ids in ([7, 3], [3, 7, 3]):
            found = asks(query(ids))
            assert found.keys() == want.keys()
            for name, each in found.items():
                assert each.data.tobytes() == want[name].data[[0 if row == 7 else 1 for row in ids]].tobytes()
        assert asks(query([7, 3, 4000])) is None
        run([query([7] * 1025)])
        assert asks(query([7] * 1024)) is not None
        assert asks(query([7] * 1025)) is None, "256 KiB are taken for quick"
        both = models["pooled"].parse(
            {"values": tensor("INT64", [7, 3]), "lengths": tensor("INT32", [1, 1, 0], (3, 1))}
        )
        assert models["pooled"].answer_at_once(both) is None
        # A sample for 16 rows, or for 16 KiB of wider ones: a request for those of a training batch fits.
        many = tensor("INT64", np.zeros(65_536))
        assert models["rows.wide"].parse({"ids": many}).num_samples == ServeConfig(store="x").max_batch_samples
        assert models["rows.wider"].parse({"ids": many}).num_samples == 65_536 // 4


def test_all_features_side_by_side(store, narrow):
    """And their rows, where tables are of one width."""
    assert "rows" not in Models(store).by_name
    chance = np.random.default_rng(1)
    for opened, name in ((store, "pooled"), (narrow, "pooled"), (narrow, "rows")):
        model: Any = Models(opened).by_name[name]
        features = model.metadata.parameters["features"].split(",")
        assert sorted(features) == sorted(each for name in opened.tables for each in (name, f"{name}.again"))
        owners = [opened[feature.removesuffix(".again")] for feature in features]
        width = sum(each.config.embedding_dim for each in owners) if name == "pooled" else DIMS["sums"]
        assert model.metadata.outputs[0].shape == (-1, width)
        for _ in range(10):
            lengths = chance.integers(0, 4, (len(features), chance.integers(1, 5)))
            parts = [torch.from_numpy(chance.integers(0, 20, each.sum())) for each in lengths]
            query = {"values": tensor("INT64", torch.cat(parts).numpy()), "lengths": tensor("INT32", lengths)}
            ((_, found),) = asked(model, query)[0].items()
            if name == "rows":
                want = torch.cat([owner.read(ids) for owner, ids in zip(owners, parts, strict=True)])
            else:
                offsets = [torch.tensor([0, *np.cumsum(each)]) for each in lengths]
                each_of = zip(owners, parts, offsets, strict=True)
                want = torch.cat([owner.pooled(ids, at, mode=owner.config.pooling) for owner, ids, at in each_of], 1)
            assert found.tobytes() == want.numpy().tobytes()


IDS = {"ids": tensor("INT64", [1, 2, 3])}
GOOD = IDS | {"lengths": tensor("INT32", [2, 1])}
WRONG = {
    "is missing: INT32": {"ids": GOOD["ids"]},
    "there is no input 'id'; did you mean 'ids'": GOOD | {"id": GOOD["ids"]},
    "'ids' is FP32; the model takes INT64 or INT32": GOOD | {"ids": tensor("FP32", [1, 2, 3])},
    "'ids' has shape [1, 3]; the model takes [-1]": GOOD | {"ids": tensor("INT64", [[1, 2, 3]])},
    "'lengths' has the length -1 at position 1": GOOD | {"lengths": tensor("INT32", [4, -1])},
    "'lengths' adds up to 4; 'ids' has 3": GOOD | {"lengths": tensor("INT32", [2, 2])},
    "'lengths' has the length 9223372036854775807": GOOD | {"lengths": tensor("INT64", [2**63 - 1, 2**63 - 1])},
    "'lengths' is empty": {"ids": tensor("INT64", []), "lengths": tensor("INT32", [])},
    "'weights' has 2 elements; 'ids' has 3": GOOD | {"weights": tensor("FP32", [1, 2])},
    "'offsets' must be INT64 or INT32 [1 * B + 1], from 0 to 3": IDS | {"offsets": tensor("INT64", [0, 2])},
    "'offsets' must be INT64 or INT32 [1 * B + 1], from 0": IDS | {"offsets": tensor("INT64", [0, 4, 3])},
    "'offsets' is FP32; the model takes INT64": IDS | {"offsets": tensor("FP32", [[0, 2]])},
    "give offsets or lengths, not both": GOOD | {"offsets": tensor("INT64", [0, 2, 3])},
    "'offsets' must be INT64 or INT32 [1 * B + 1], from 0 to 3,": IDS | {"offsets": tensor("INT64", [[0], [2]])},
    "[1 * B + 1], from 0 to 3, the": IDS | {"offsets": tensor("INT64", [0, -(2**63), 2**63 - 1, 3])},
    "'offsets' is BYTES; the model takes INT64": IDS | {"offsets": InferTensor("BYTES", objects([b"0", b"3"]))},
    "'weights' is nan at [1]": GOOD | {"weights": tensor("FP32", [1, float("nan"), 2])},
}


def test_wrong_inputs_are_named(store):
    for message, inputs in WRONG.items():
        require_refused(Models(store).by_name["pooled.sums"], inputs, message)
    uneven = {"values": GOOD["ids"], "offsets": tensor("INT64", [0, 1, 2, 3])}
    require_refused(Models(store).by_name["pooled"], uneven, "'offsets' must be INT64 or INT32 [8 * B + 1], from 0")


@pytest.mark.parametrize("name", ["pooled.sums", "pooled", "rows"])
def test_offsets_with_the_end_and_without_stand_for_lengths(narrow, name):
    model: Any = Models(narrow).by_name[name]
    lengths = np.array([[2, 0, 1], [0, 0, 0], [1, 1, 0], [3, 0, 0]])[: 1 if name == "pooled.sums" else 4]
    ends = np.cumsum([0, *lengths.reshape(-1)])
    ids = {model.metadata.inputs[0].name: tensor("INT64", np.arange(ends[-1]))}
    whole = lengths[0] if name == "pooled.sums" else lengths
    forms = ("lengths", whole), ("offsets", ends), ("offsets", ends[:-1].reshape(lengths.shape))
    found = [asked(model, ids | {key: tensor("INT64", each)})[0] for key, each in forms]
    assert len({each.tobytes() for outputs in found for each in outputs.values()}) == 1


FEATURES = ("sums", "peaks")
Arrays = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported")
    save_two_tables(made / "mine.pt2")
    return made


def served(store: tierstore.Store, path: Path, dropped: Counted | None = None) -> Any:
    return Models(store, dropped=dropped, program=load_program(path, max_samples=4096)).by_name[path.stem]


def query(seed: int, samples: int) -> tuple[dict[str, InferTensor], list[list[list[int]]]]:
    """A request, and its ids by feature and sample."""
    chance = np.random.default_rng(seed)
    bags = [[chance.integers(0, 20, chance.integers(0, 4)).tolist() for _ in range(samples)] for _ in FEATURES]
    inputs = {
        "Dense": tensor("FP32", chance.normal(size=(samples, 3))),
        "position": tensor("INT64", chance.integers(0, 9, samples)),
        "values": tensor("INT64", [each for feature in bags for bag in feature for each in bag]),
        "lengths": tensor("INT32", [[len(bag) for bag in feature] for feature in bags]),
    }
    return inputs, bags


def by_hand(store: tierstore.Store, path: Path, inputs: Mapping[str, InferTensor], bags: Any) -> Arrays:
    sums, peaks = bags
    ids = torch.tensor([each for bag in sums for each in bag], dtype=torch.int64)
    offsets = torch.tensor(np.cumsum([0, *map(len, sums)]))
    padded = torch.zeros(len(peaks), 3, 4)
    for sample, bag in enumerate(peaks):
        for place, each in enumerate(bag):
            padded[sample, place] = store["peaks"].read(torch.tensor([each]))[0]
    dense, position = (torch.from_numpy(inputs[name].data.copy()) for name in ("Dense", "position"))
    module = torch.export.load(path).module()
    with torch.no_grad():
        found = module(dense, store["sums"].pooled(ids, offsets), padded, position=position)
    return {name: each.numpy() for name, each in found.items()}


@pytest.mark.parametrize("samples", [1, 33])
def test_outputs_are_those_of_the_program_called_by_hand(folder, store, samples):
    model = served(store, folder / "mine.pt2")
    inputs, bags = query(samples, samples)
    (found,) = model.run([model.parse(inputs)])
    want = by_hand(store, folder / "mine.pt2", inputs, bags)
    assert {name: each.datatype for name, each in found.items()} == {"score": "FP32", "next": "INT64"}
    assert all(found[name].data.tobytes() == want[name].tobytes() for name in want)
    other, other_bags = query(samples + 1, 3)
    for outputs, of, own in zip(
        model.run([model.parse(inputs), model.parse(other)]), (inputs, other), (bags, other_bags), strict=True
    ):
        want = by_hand(store, folder / "mine.pt2", of, own)
        assert outputs["next"].data.tolist() == want["next"].tolist()
        np.testing.assert_allclose(outputs["score"].data, want["score"], rtol=1e-5)


def test_names_of_a_dict_may_be_anything_and_other_features_of_their_tables_are_not_asked_for(folder, store, tmp_path):
    path = save(OfDict(), tmp_path / "two.pt2", {"sums.again": torch.zeros(2, 4), "half": torch.zeros(2, 8)})
    model = served(store, path)
    assert model.metadata.parameters == {"features": "sums.again,half"}
    lengths = tensor("INT32", [[1, 0], [0, 2]])
    (found,) = model.run([model.parse({"values": tensor("INT64", [3, 5, 24]), "lengths": lengths})])
    want = torch.zeros(2, 12)
    want[0, :4] = store["sums"].read(torch.tensor([3]))[0]
    want[1, 4:] = store["half"].pooled(torch.tensor([5, 24]), torch.tensor([0, 2]))[0]
    assert found["output"].data.tobytes() == (want * 2).numpy().tobytes()


def test_texts_become_ids_where_the_program_says_how(store, tmp_path):
    arguments = {"sums.again": torch.zeros(2, 4), "half": torch.zeros(2, 8)}
    keywords = {"sums.again": {"column": 1}, "half": {"seed": 7}}
    model = served(store, save(OfDict(), tmp_path / "two.pt2", arguments, texts=json.dumps(keywords)))
    assert model.metadata.parameters == {"features": "sums.again,half", "may_be_bytes": "values"}
    texts = [b"red", b"17", "\u00e9".encode(), b"red", b"x" * 40]
    sums = tierstore.ids.of_strings(texts[:3], num_embeddings=ROWS["sums"], column=1)
    half = tierstore.ids.of_strings(texts[3:], num_embeddings=ROWS["half"], seed=7)
    lengths = {"lengths": tensor("INT32", [[1, 2], [0, 2]])}
    values, ids = InferTensor("BYTES", objects(texts)), tensor("INT64", torch.cat([sums, half]).numpy())
    (found,), (want,) = (model.run([model.parse({"values": each} | lengths)]) for each in (values, ids))
    assert found["output"].data.tobytes() == want["output"].data.tobytes()
    holed = InferTensor("BYTES", objects([b"red", b"17", b"a", b"b", b""]))
    require_refused(model, {"values": holed} | lengths, "of feature 'half' from position 3 on: strings[1] is empty")
    plain = served(store, save(OfDict(), tmp_path / "plain.pt2", arguments))
    require_refused(plain, {"values": values} | lengths, "'values' is BYTES; the model takes INT64 or INT32")
    for wrong, message in {
        "{}": "extra file of_strings is '{}'; it must be JSON: for each feature",
        "[1]": """is '[1]'; it must be JSON: for each feature arguments of tierstore.ids.of_strings, as {"item": """,
        '{"half": {}}': "names ['half']; its features are ['sums.again', 'half']",
        '{"half": {"seeds": 1}, "sums.again": {}}': "feature 'half': of_strings() got an unexpected keyword",
        '{"half": {"seed": -1}, "sums.again": {}}': "feature 'half': seed=-1 must be in",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            served(store, save(OfDict(), tmp_path / "wrong.pt2", arguments, texts=wrong))


@pytest.mark.parametrize(
    ("changes", "texts", "message"),
    [
        ({}, {"half": {}, "other": {"seed": 7}}, None),
        ({}, {"half": {"column": 1, "seed": 3}, "other": {}}, None),
        (
            {},
            {"half": {"column": 0}, "other": {}},
            "feature 'half': {'column': 0} is not what the run trained by, {'se",
        ),
        ({}, {"half": {"seeds": 3}, "other": {}}, "feature 'half': of_strings() got an unexpected keyword"),
        ({"hashing": "mod"}, {"half": {}, "other": {}}, "feature 'half': the run has data.hashing = \"mod\""),
    ],
)
def test_texts_of_a_trained_store_are_those_of_its_run(tmp_path, changes, texts, message):
    data = DataSection(sparse_columns=("sums", "half"), hash_seed=3, **changes)
    with tierstore.open(tmp_path / "store", ddr="4MiB") as store:
        for name in ("half", "other"):
            store.create_table(tierstore.TableConfig(name=name, num_embeddings=40, embedding_dim=4))
        store["half"].write(torch.arange(40), torch.randn(40, 4))
        run = {"config": to_dict(RunConfig(data=data, embedding=EmbeddingSection(num_embeddings=40)))}
        store.commit(extra={"tierstore.train": run})
        arguments = {"half": torch.zeros(2, 4), "other": torch.zeros(2, 4)}
        program = load_program(save(OfDict(), tmp_path / "x.pt2", arguments, texts=json.dumps(texts)), max_samples=4096)
        if message is not None:
            with pytest.raises(ValueError, match=re.escape(message)):
                Exported(store, program, None)
            return
        values = {
            "values": InferTensor("BYTES", objects([b"red", b"17"])),
            "lengths": tensor("INT32", [[1, 1], [0, 0]]),
        }
        found = Exported(store, program, None).parse(values).values
    assert found.tolist() == tierstore.ids.of_strings(["red", "17"], num_embeddings=40, column=1, seed=3).tolist()


WRONG_REQUESTS: dict[str, dict[str, InferTensor]] = {
    "'Dense' has 1 samples; 'lengths' has 2": {"Dense": tensor("FP32", np.zeros((1, 3)))},
    "'Dense' has 2 samples; 'offsets' has 1": {"values": tensor("INT64", []), "offsets": tensor("INT64", [0, 0, 0])},
    "'position' is FP32; the model takes INT64": {"position": tensor("FP32", [0, 0])},
    "'lengths' has 4 at sample 1 of feature 'peaks'; the model takes up to 3 ids": {
        "values": tensor("INT64", [1, 2, 3, 4]), "lengths": tensor("INT32", [[0, 0], [0, 4]])
    },
    "'values' has 40 at position 0 of feature 'sums': ids are in [0, 40)": {
        "values": tensor("INT64", [40]), "lengths": tensor("INT32", [[1, 0], [0, 0]])
    },
}  # fmt: skip


def test_wrong_requests_are_told(folder, store):
    model = served(store, folder / "mine.pt2")
    for message, inputs in WRONG_REQUESTS.items():
        given = {name: each for name, each in query(3, 2)[0].items() if name != "lengths" or "offsets" not in inputs}
        require_refused(model, given | inputs, message)


class Same(torch.nn.Module):
    def forward(self, sums: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        return sums + 1, dense


class Constant(torch.nn.Module):
    def forward(self, sums: Tensor) -> Tensor:
        return sums.sum()


class Values(torch.nn.Module):
    def forward(self, sums: Tensor, values: Tensor) -> Tensor:
        return sums + values


def zeros(*dims: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(2, dim) for dim in dims)


WRONG_PROGRAMS: dict[str, tuple[torch.nn.Module, tuple[Any, ...], Any]] = {
    "input 'sums' is float32 [2, 4]; its first dimension must be the dynamic batch": (Same(), zeros(4, 3), "static"),
    "it takes batches of 0 to 64 samples, and the server makes those of 1 to 4096": (
        Same(), zeros(4, 3), torch.export.Dim("batch", max=64)
    ),
    "input 'sums' is FP32 [-1, 5]; rows of table 'sums' have 4 numbers": (Same(), zeros(5, 3), None),
    "'pooled' is the name of another model": (Same(), zeros(4, 3), None),
    "output 'output' is float32 []; its first dimension": (Constant(), zeros(4), None),
    "input 'values' is FP32 [-1, 1]; requests carry ids by the name": (Values(), zeros(4, 1), None),
}  # fmt: skip


@pytest.mark.parametrize("message", [*WRONG_PROGRAMS, "there is no file", "is no program that torch"])
def test_programs_that_do_not_fit_are_told(store, tmp_path, message):
    path = tmp_path / ("pooled.pt2" if "another model" in message else "x.pt2")
    if message in WRONG_PROGRAMS:
        module, inputs, batch = WRONG_PROGRAMS[message]
        save(module, path, *inputs, batch=batch)
    elif message == "is no program that torch":
        path.write_bytes(b"PK no program")
    with pytest.raises(ValueError) as caught:
        served(store, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
