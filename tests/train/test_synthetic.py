"""The generated clicks: in the format, from the model they claim, with the best AUC they claim."""

import numpy as np
import pytest

from tierstore.train import synthetic
from tierstore.train.readers import CriteoReader
from tierstore.train.synthetic import write_synthetic

from .readers.rows import matrix
from .readers.test_hashing import splitmix64


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "clicks.tsv"
    data = write_synthetic(path, train_rows=30_000, test_rows=10_000, seed=3)
    (rows,) = CriteoReader(path).read_chunks(0, None, 50_000)
    return data, rows


def test_every_row_is_read_back(written):
    data, rows = written
    assert (data.train_rows, data.test_rows, len(rows.labels)) == (30_000, 10_000, 40_000)
    assert data.best.rows == 10_000
    assert not np.isnan(rows.dense).any()
    assert (rows.dense >= 0).all()
    missing = (matrix(rows.categories) < 0).mean(axis=0)
    assert (missing[0::2] == 0).all()
    assert ((missing[1::2] > 0.03) & (missing[1::2] < 0.05)).all()


def test_labels_are_drawn_with_the_chances_that_the_best_auc_is_of():
    rows = synthetic._Source(5).draw(50_000)
    chances = 1 / (1 + np.exp(-rows.logits))
    order = np.argsort(chances)
    for part in np.array_split(order, 10):
        # 5,000 draws: three standard deviations are at most 0.021.
        assert rows.labels[part].mean() == pytest.approx(chances[part].mean(), abs=0.021)


def test_the_seed_decides_every_byte(tmp_path):
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_synthetic(tmp_path / name, train_rows=50, test_rows=20, seed=seed)
        texts.append((tmp_path / name).read_bytes())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    with pytest.raises(ValueError, match="test_rows=0"):
        write_synthetic(tmp_path / "a", train_rows=1, test_rows=0)


@pytest.mark.kernel
def test_lines_are_what_python_would_format(tmp_path):
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 40).astype(np.uint8)
    dense = random.integers(0, 10 ** random.integers(1, 19, (40, 13)))
    ranks = random.integers(-1, 1000, (40, 26))
    hashes = np.zeros((40, 26), np.uint32)
    synthetic._hash(ranks, hashes)

    for i, line in enumerate(synthetic._text(synthetic._Rows(labels, dense, hashes, None)).splitlines()):
        fields = line.split("\t")
        assert fields[:14] == [str(labels[i]), *map(str, dense[i].tolist())]
        for column, (field, rank) in enumerate(zip(fields[14:], ranks[i].tolist(), strict=True)):
            hashed = splitmix64(rank + (column + 1) * 0x9E3779B97F4A7C15)
            assert field == ("" if rank < 0 else f"{hashed >> 32:08x}")
