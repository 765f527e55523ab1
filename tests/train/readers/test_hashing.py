"""Feature hashing against the formula in Python's own integers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.train import load, row_ids
from tierstore.train.build import open_data
from tierstore.train.readers import Categories, FeatureHasher
from tierstore.train.readers.categories import MOST, OutsideTableError, modulo

from .rows import IDS, category_of

pytestmark = pytest.mark.kernel
MASK = 2**64 - 1


def splitmix64(seed):
    z = seed & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def expected_ids(categories, sizes, mode):
    values, offsets = [], [0]
    for column, size in enumerate(sizes):
        for row in categories:
            for category in row[column]:
                mixed = splitmix64(category + (column + 1) * 0x9E3779B97F4A7C15) % size
                values.append(mixed if mode == "mix" else category)
            offsets.append(len(values))
    return values, offsets


def categories_of(rows):
    """Of rows that have a bag for each of three columns."""
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    lengths = np.array([[len(bag) for bag in column] for column in columns], np.int64).reshape(3, -1)
    return Categories.of_columns(
        [np.array([x for bag in column for x in bag], np.int64) for column in columns], lengths, len(rows)
    )


def rows_of(categories):
    return st.lists(st.lists(st.lists(categories, max_size=3), min_size=3, max_size=3), max_size=8)


@given(rows_of(st.integers(0, 2**63 - 1)), st.lists(st.integers(1, 2**40), min_size=3, max_size=3))
def test_ids_follow_the_documented_formula(rows, sizes):
    ids = FeatureHasher(sizes)(categories_of(rows))
    values, offsets = expected_ids(rows, sizes, "mix")
    assert ids.values.tolist() == values
    assert ids.offsets.tolist() == offsets


@given(st.integers(1, 2**63 - 1), st.integers(0, MASK), st.integers(-2, 2))
def test_the_rest_of_a_division(divisor, number, near):
    """Of any number, and of those about a multiple of the divisor, where a quotient may be one off."""
    for each in (number, min(max(number // divisor * divisor + near, 0), MASK), MASK):
        assert modulo(np.uint64(each), np.uint64(divisor), MOST // np.uint64(divisor)) == each % divisor


@given(rows_of(st.integers(0, 12)), st.lists(st.integers(1, 13), min_size=3, max_size=3))
def test_row_numbers_stay_and_the_first_beyond_its_table_is_named(rows, sizes):
    outside = [
        (column, number, category)
        for column, size in enumerate(sizes)
        for number, row in enumerate(rows)
        for category in row[column]
        if category >= size
    ]
    hasher = FeatureHasher(sizes, mode="mod")
    if not outside:
        assert hasher(categories_of(rows)).values.tolist() == expected_ids(rows, sizes, "mod")[0]
        return
    column, row, category = outside[0]
    with pytest.raises(
        OutsideTableError, match=f"category {category} has no row in a table of {sizes[column]} rows"
    ) as e:
        hasher(categories_of(rows))
    assert (e.value.row, e.value.column) == (row, column)


def test_rows_of_categories_are_those_that_readers_train(tmp_path):
    """Texts, and integers, of each column, against what a CSV file of the same gives."""
    texts = ["17", "ab", "02134", "", "9" * 18]
    (tmp_path / "a.csv").write_text("y,u,v\n" + "".join(f"0,{text},{text}x\n" for text in texts))
    for hashing in ("mix", "mod", "none"):
        (tmp_path / "run.toml").write_text(
            f"[data]\npath = '{tmp_path / 'a.csv'}'\nlabel_column = 'y'\ndense_columns = []\nhashing = '{hashing}'\n"
            f"hash_seed = {IDS.seed}\n"
            f"sparse_columns = ['u', 'v']\n[embedding]\nnum_embeddings = {1000 if hashing == 'mix' else 2**40}\n"
            f"ids = '{'dynamic' if hashing == 'none' else 'fixed'}'\n"
        )
        config = load(tmp_path / "run.toml")
        if hashing == "mod":
            assert row_ids(config, "u", torch.tensor([17, 5])).tolist() == [17, 5]
            with pytest.raises(ValueError, match="has no row in a table"):
                row_ids(config, "u", ["ab"])
            continue
        if hashing == "none":
            assert row_ids(config, "u", ["ab", "17", -1]).tolist() == [category_of("ab", rule=IDS), 17, -1]
            with pytest.raises(ValueError, match="stands for a missing category"):
                row_ids(config, "u", [""])
            continue
        (batch,) = open_data(config)[0].batches(FeatureHasher(config.table_sizes), batch_size=9)
        trained = batch.sparse.to_dict()
        assert row_ids(config, "u", [text for text in texts if text]).tolist() == trained["u"].values().tolist()
        assert row_ids(config, "v", [f"{text}x" for text in texts]).tolist() == trained["v"].values().tolist()
        assert row_ids(config, "u", [17]).tolist() == trained["u"].values().tolist()[:1]
        for wrong in ("", -1):
            with pytest.raises(ValueError, match="stands for a missing category"):
                row_ids(config, "u", ["a", wrong])
        with pytest.raises(ValueError, match="column='w': "):
            row_ids(config, "w", [1])
