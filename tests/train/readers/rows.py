"""Rows for the readers' tests: drawn at random, written as text, and read back by a slow and plain parser."""

import math
import re

import numpy as np
import xxhash
from hypothesis import strategies as st

from tierstore.ids.texts import FROM_ZERO
from tierstore.train.readers import Categories, CategoryRule, FeatureHasher, Schema, open_reader

DENSE = st.one_of(st.none(), st.integers(-3, 100), st.integers(-(10**17), 10**17))
CATEGORY = st.one_of(st.none(), st.integers(0, 2**60 - 1), st.integers(0, 2**32 - 1))
ROWS = st.lists(
    st.tuples(
        st.integers(0, 1), st.lists(DENSE, min_size=13, max_size=13), st.lists(CATEGORY, min_size=26, max_size=26)
    ),
    max_size=12,
)
HASHER = FeatureHasher([1000 + i for i in range(26)])
SCHEMA = Schema(label="y", dense=("a",), sparse=("c",))
"""Of one dense and one sparse column."""


TEXTS = ["ab", "AB", "0ab", "F", "02134", "2134", "0", "00", "-1", "1.0", "\u00e9", "x" * 300, " 7", "9" * 18]
TEXTS += [str(2**63 - 1), str(2**63), "9" * 19, "9" * 20, "-0", "-01", "-", "-5.0", str(-(2**63)), str(-(2**63) - 1)]
"""Categories as texts."""


def some_rows(count, seed=0):
    random = np.random.default_rng(seed)
    return [
        (
            int(random.integers(2)),
            [None if random.random() < 0.2 else int(random.integers(-3, 5000)) for _ in range(13)],
            [None if random.random() < 0.2 else int(random.integers(2**32)) for _ in range(26)],
        )
        for _ in range(count)
    ]


def to_text(rows, newline="\n"):
    lines = []
    for label, dense, categories in rows:
        fields = [str(label), *("" if x is None else str(x) for x in dense)]
        fields += ["" if x is None else f"{x:08x}" for x in categories]
        lines.append("\t".join(fields) + newline)
    return "".join(lines)


IDS = CategoryRule(are_ids=True, seed=3)


def category_of(value, *, floats=False, rule=FROM_ZERO):
    """The documented rules; None if missing."""
    if value is None or value == "" or value != value:
        return None
    if not isinstance(value, str):
        return int(value)
    sign = "-?" if rule.are_ids else ""
    number = re.fullmatch(rf"(0|{sign}[1-9][0-9]*)" + r"(\.0)?" * floats, value)
    if number and -(2**63) <= int(number[1]) < 2**63:
        return int(number[1])
    hashed = xxhash.xxh64_intdigest(value.encode(), rule.seed)
    return hashed - (hashed >> 63 << 64) if rule.are_ids else hashed >> 1


def expected_bags(column, *, floats=False):
    lists = [value if isinstance(value, list) else [value] for value in column]
    found = [[category_of(value, floats=floats) for value in each] for each in lists]
    return [[[category for category in each if category is not None]] for each in found]


def values_of(categories):
    return np.concatenate(categories.columns)


def bags(categories):
    values = values_of(categories)
    return [
        [values[column[row] : column[row + 1]].tolist() for column in categories.offsets]
        for row in range(categories.offsets.shape[1] - 1)
    ]


def matrix(categories):
    return np.array([[(*bag, -1)[0] for bag in row] for row in bags(categories)], np.int64)


def check_batch(batch, rows):
    assert len(batch) == len(rows)
    assert batch.labels.tolist() == [row[0] for row in rows]
    expected = [[0.0 if x is None else math.log1p(max(x, 0)) for x in row[1]] for row in rows]
    np.testing.assert_allclose(batch.dense.numpy(), np.array(expected).reshape(-1, 13), rtol=3e-6)
    matrix = np.array([[-1 if x is None else x for x in row[2]] for row in rows], np.int64).reshape(-1, 26)
    ids = HASHER(Categories.of_matrix(matrix))
    assert batch.sparse.keys() == [f"C{i}" for i in range(1, 27)]
    assert batch.sparse.values().tolist() == ids.values.tolist()
    assert batch.sparse.offsets().tolist() == ids.offsets.tolist()
    assert batch.sparse.lengths().tolist() == [int(row[2][i] is not None) for i in range(26) for row in rows]


def check_reader(reader, rows, *, batch_size=4, start_row=0, stop_row=None):
    wanted, options = rows[start_row:stop_row], {"batch_size": batch_size, "start_row": start_row, "stop_row": stop_row}
    batches = list(reader.batches(HASHER, **options))
    assert len(batches) == -(-len(wanted) // batch_size)
    parts = [reader.batches(HASHER, **options, part=part, parts=2) for part in range(2)]
    for number, (batch, first, second) in enumerate(zip(batches, *parts, strict=True)):
        own = wanted[number * batch_size : (number + 1) * batch_size]
        middle = len(own) // 2
        assert batch.total_rows == first.total_rows == second.total_rows == len(own)
        for found, expected in ((batch, own), (first, own[:middle]), (second, own[middle:])):
            check_batch(found, expected)


def write_npy(folder, values, offsets=None):
    """Three rows of ``SCHEMA``, their categories one a row or as bags."""
    np.save(folder / "label.npy", np.ones(3))
    np.save(folder / "dense.npy", np.ones((3, 1)))
    np.save(folder / "c.npy", values)
    if offsets is not None:
        np.save(folder / "c.offsets.npy", offsets)
    return open_reader(folder, schema=SCHEMA)
