"""Feature hashing against the formula in Python's own integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ids import of_strings
from tierstore.ids.texts import MOST, modulo
from tierstore.train import row_ids
from tierstore.train.build import open_data
from tierstore.train.config import DataSection, EmbeddingSection, RunConfig
from tierstore.train.readers import Categories, FeatureHasher
from tierstore.train.readers.categories import OutsideTableError

from .rows import IDS, category_of

pytestmark = pytest.mark.kernel
MASK = 2**64 - 1


def splitmix64(seed):
    z = seed & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def categories_of(rows):
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    offsets = [np.cumsum([start, *map(len, column)]) for start, column in enumerate(columns)]
    return Categories.of_columns(
        [np.array([x for bag in column for x in bag], np.int64) for column in columns], offsets, len(rows)
    )


def rows_of(categories):
    return st.lists(st.lists(st.lists(categories, max_size=3), min_size=3, max_size=3), max_size=8)


@given(st.integers(1, 2**63 - 1), st.integers(0, MASK), st.integers(-2, 2))
def test_the_rest_of_a_division(divisor, number, near):
    """Of any number, and of those about a multiple of the divisor, where a quotient may be one off."""
    for each in (number, min(max(number // divisor * divisor + near, 0), MASK), MASK):
        assert modulo(np.uint64(each), np.uint64(divisor), MOST // np.uint64(divisor)) == each % divisor


@given(rows_of(st.integers(0, 2**63 - 1)), st.lists(st.integers(1, 2**40), min_size=3, max_size=3))
def test_ids_follow_the_documented_formula(rows, sizes):
    ids = FeatureHasher(sizes)(categories_of(rows))
    bags = [row[column] for column in range(3) for row in rows]
    steps = [((column + 1) * 0x9E3779B97F4A7C15, size) for column, size in enumerate(sizes) for _ in rows]
    assert ids.values.tolist() == [
        splitmix64(each + step) % size for bag, (step, size) in zip(bags, steps, strict=True) for each in bag
    ]
    assert ids.offsets.tolist() == np.cumsum([0, *map(len, bags)]).tolist()


@given(rows_of(st.integers(0, 12)), st.lists(st.integers(1, 13), min_size=3, max_size=3))
def test_row_numbers_stay_and_the_first_beyond_its_table_is_named(rows, sizes):
    every = [(column, place, each) for column in range(3) for place, row in enumerate(rows) for each in row[column]]
    outside = [(column, place, each) for column, place, each in every if each >= sizes[column]]
    hasher = FeatureHasher(sizes, mode="mod")
    if not outside:
        assert hasher(categories_of(rows)).values.tolist() == [each for *_, each in every]
        return
    column, place, each = outside[0]
    with pytest.raises(OutsideTableError, match=f"category {each} has no row in a table of {sizes[column]} rows") as e:
        hasher(categories_of(rows))
    assert (e.value.row, e.value.column) == (place, column)


def test_rows_of_categories_are_those_that_readers_train(tmp_path):
    texts = ["17", "ab", "02134", "", "9" * 18]
    (tmp_path / "a.csv").write_text("y,u,v\n" + "".join(f"0,{text},{text}x\n" for text in texts))

    def run_of(hashing, rows, ids="fixed"):
        columns = {"label_column": "y", "dense_columns": (), "sparse_columns": ("u", "v"), "hash_seed": IDS.seed}
        data = DataSection(path=str(tmp_path / "a.csv"), hashing=hashing, **columns)
        return RunConfig(data=data, embedding=EmbeddingSection(num_embeddings=rows, ids=ids))

    mix, mod, none = run_of("mix", 1000), run_of("mod", 2**40), run_of("none", 2**40, "dynamic")
    (batch,) = open_data(mix)[0].batches(FeatureHasher(mix.table_sizes), batch_size=9)
    trained = {name: each.values().tolist() for name, each in batch.sparse.to_dict().items()}
    assert row_ids(mix, "u", [text for text in texts if text]).tolist() == trained["u"]
    assert row_ids(mix, "v", [f"{text}x" for text in texts]).tolist() == trained["v"]
    assert row_ids(mix, "u", [17]).tolist() == trained["u"][:1]
    assert row_ids(mod, "u", torch.tensor([17, 5])).tolist() == [17, 5]
    assert row_ids(none, "u", ["ab", "17", -1]).tolist() == [category_of("ab", rule=IDS), 17, -1]
    given = [text for text in texts if text]
    assert of_strings(given, num_embeddings=1000, seed=IDS.seed).tolist() == trained["u"]
    utf8 = [f"{text}x".encode() for text in texts]
    assert of_strings(iter(utf8), num_embeddings=1000, column=1, seed=IDS.seed).tolist() == trained["v"]
    assert of_strings(np.array(["ab", "-17"]), seed=IDS.seed).tolist() == [category_of("ab", rule=IDS), -17]
    assert of_strings([], num_embeddings=7).tolist() == of_strings([]).tolist() == []
    for config, column, wrong, reason in (
        (mix, "u", ["a", ""], "stands for a missing category"),
        (mix, "u", ["a", -1], "stands for a missing category"),
        (mix, "w", [1], "column='w': "),
        (mod, "u", ["ab"], "has no row in a table"),
        (none, "u", [""], "stands for a missing category"),
    ):
        with pytest.raises(ValueError, match=reason):
            row_ids(config, column, wrong)


def test_what_has_no_id_is_refused():
    for strings, options, message in (
        ("red", {}, "strings is one text, 'red'; give a list"),
        (["red", 7], {}, r"strings\[1\] is of int, not str or bytes; integers are ids already"),
        (["red", ""], {}, r"strings\[1\] is empty, a missing category: leave it out"),
        (["red"], {"column": 1}, "column=1 goes with num_embeddings"),
        (["red"], {"num_embeddings": 0}, r"num_embeddings=0 must be in \[1, "),
        (["red"], {"seed": -1}, r"seed=-1 must be in \[0, "),
    ):
        with pytest.raises(TypeError if message.endswith(("list", "already")) else ValueError, match=message):
            of_strings(strings, **options)
