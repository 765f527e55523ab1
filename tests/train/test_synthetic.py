"""The generated clicks: in the format, from the model they claim, with the best AUC they claim."""

import numpy as np
import pytest

from tierstore.train import synthetic
from tierstore.train.readers import CriteoReader
from tierstore.train.synthetic import write_synthetic

from .readers.rows import matrix


def test_labels_are_drawn_with_the_chances_that_the_best_auc_is_of():
    rows = synthetic._Source(5).draw(50_000)
    chances = 1 / (1 + np.exp(-rows.logits))
    order = np.argsort(chances)
    for part in np.array_split(order, 10):
        # 5,000 draws: three standard deviations are at most 0.021.
        assert rows.labels[part].mean() == pytest.approx(chances[part].mean(), abs=0.021)


def test_the_seed_decides_every_byte(tmp_path):
    made = [write_synthetic(tmp_path / str(n), train_rows=50, test_rows=20, seed=n // 2) for n in range(3)]
    texts = [each.path.read_bytes() for each in made]
    assert texts[0] == texts[1] != texts[2]
    with pytest.raises(ValueError, match="test_rows=0"):
        write_synthetic(tmp_path / "a", train_rows=1, test_rows=0)


@pytest.mark.kernel
def test_every_row_is_read_back(tmp_path):
    data = write_synthetic(tmp_path / "clicks.tsv", train_rows=6_000, test_rows=1_000, seed=3)
    (rows,) = CriteoReader(data.path).read_chunks(0, None, 9_000)
    drawn = synthetic._Source(3).draw(7_000)
    assert (data.train_rows, data.test_rows, data.best.rows) == (6_000, 1_000, 1_000)
    assert rows.labels.tolist() == drawn.labels.tolist()
    assert rows.dense.tolist() == drawn.dense.tolist()
    assert matrix(rows.categories).tolist() == np.where(drawn.hashes, drawn.hashes, np.int64(-1)).tolist()
    missing = (drawn.hashes == 0).mean(axis=0)
    assert (missing[0::2] == 0).all()
    assert ((missing[1::2] > 0.03) & (missing[1::2] < 0.05)).all()
