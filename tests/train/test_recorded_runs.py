"""A training run that is recorded: the same run, and a trace of what it read."""

from pathlib import Path

import numpy as np
import pytest

from tests.train.runs import TEST_ROWS, TRAIN_ROWS, config_of
from tierstore.trace import read_trace
from tierstore.trace.sampling import is_sampled
from tierstore.train import train
from tierstore.train.build import trace_run

EPOCHS = 2


@pytest.mark.parametrize("rate", [1.0, 0.25])
def test_a_run_is_recorded_and_the_same(tmp_path: Path, rate: float) -> None:
    """All epochs, then the rows it is tested on; not the digest, which reads every row."""
    path = tmp_path / "lookups.npz"
    config = config_of(tmp_path, "recorded", store__record=str(path), store__record_rate=rate, train__epochs=EPOCHS)
    summary = train(config, bits=True)
    assert summary.bits == train(config_of(tmp_path, "plain", train__epochs=EPOCHS), bits=True).bits
    found, read = read_trace(path), trace_run(config, rows=TRAIN_ROWS + TEST_ROWS)
    assert list(found.tables) == list(read.tables)
    for index, (name, table) in enumerate(read.tables.items()):
        trained, tested = np.split(table.ids, table.offsets[[TRAIN_ROWS]])
        ids = np.concatenate([*[trained] * EPOCHS, tested])
        assert np.array_equal(found.tables[name].ids, ids[is_sampled(index << 40 | ids, rate)])
    rows = EPOCHS * TRAIN_ROWS + TEST_ROWS
    assert (found.num_samples, found.sampling_rate) == (rows, rate)
    assert summary.recorded is not None
    assert f"{found.num_lookups:,} lookups of {100 * rate:g} % of the rows" in summary.recorded
    assert summary.recorded in summary.describe()
