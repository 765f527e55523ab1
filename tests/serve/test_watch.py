"""The watched loss against the trainer's own model on the same rows, and what a worse version does to it."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.loops import wait_for
from tests.serve.models.stores import tensor
from tests.serve.whole import serving
from tests.train.runs import commit_scaled
from tierstore.models import DLRM
from tierstore.serve.config import StoreConfig
from tierstore.serve.messages import ServeError, Status
from tierstore.serve.watch import LabelledRows, Watch
from tierstore.train.build import open_data
from tierstore.train.config import RunConfig
from tierstore.train.readers import DataError

ROWS = 230  # more than one request, and no whole number of them


def commit_and_evaluate(run: RunConfig, factor: float) -> tuple[int, float]:
    """Multiply the dense weights, commit them, and return the version and its log loss on the data's first rows."""
    reader, hasher = open_data(run)
    (batch,) = reader.batches(hasher, batch_size=ROWS, stop_row=ROWS)

    def loss_of(model: DLRM) -> float:
        logits = model(batch.dense, batch.sparse)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), batch.labels.double()).item()

    return commit_scaled(run, factor, loss_of)


def test_each_version_is_measured_and_a_worse_one_is_told_of(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"watch": run.data.path, "watch_rows": ROWS, "watch_loss": 0.02}
    caplog.set_level(logging.INFO)
    first = None
    with serving(Path(run.store.path), **settings) as server:
        for factor, holds in ((1.0, True), (1.01, True), (-1.0, False)):
            version, loss = commit_and_evaluate(run, factor)
            first = first or loss
            assert (loss <= 1.02 * first) == holds
            wait_for(lambda version=version: server.metric("tierstore_watch_version") == version)
            assert server.metric("tierstore_watch_log_loss") == pytest.approx(loss, rel=1e-5)
            told = server.status()["watch"]
            assert (told["version"], told["rows"], told["holds"]) == (version, ROWS, holds)
            said = [each for each in caplog.records if f"version {version} has a log loss of" in each.message]
            assert [each.levelname for each in said] == ["INFO" if holds else "WARNING"]
        assert server.metric("tierstore_request_seconds_count") == 0, "they are not a client's requests"


@pytest.mark.parametrize("changes", [False, True])
def test_a_reading_ends_and_bears_its_first_version(changes: bool, caplog: pytest.LogCaptureFixture) -> None:
    """However fast versions come: the last one is then measured next."""
    caplog.set_level(logging.INFO)
    asked = iter(range(9))

    async def score(inputs: Any) -> tuple[Any, int]:
        return inputs["dense"].data[:, 0], 7 + changes * next(asked)

    rows = [LabelledRows({"dense": tensor("FP32", [[p]])}, np.array([label])) for p, label in
            ((0.9, True), (0.2, False), (1.0, False))]  # fmt: skip
    commits = iter("abaa")
    watch = Watch(score, rows, bound=0.1, store="store", commit_id=lambda: next(commits))
    with pytest.raises(ServeError, match="the version changed as") as caught:
        asyncio.run(watch.measure())
    assert (caught.value.status, watch.last) == (Status.UNAVAILABLE, None)
    asked = iter(range(9))
    found = asyncio.run(watch.measure())
    assert found.commit_id == "a"
    want = -np.log([0.9, 0.8, 2.0**-24]).mean()
    assert (found.version, found.rows, found.log_loss) == (7, 3, pytest.approx(want, rel=1e-6))
    assert ("version 7 (to 9 in the end) has" if changes else "version 7 has") in caplog.text


def test_of_several_stores_each_is_watched_on_its_own(run: RunConfig) -> None:
    watched, other = (StoreConfig(path=run.store.path, name=name) for name in ("a", "b"))
    stores = (replace(watched, watch=run.data.path), other)
    with serving(stores=stores, watch_rows=ROWS) as server:
        wait_for(lambda: server.metric("tierstore_watch_rows", store="a") == ROWS)
        assert server.metric("tierstore_watch_rows") == ROWS, "b has none"
        status = server.status()
    assert status["watch"] is None
    assert [each["watch"] and each["watch"]["rows"] for each in status["stores"]] == [ROWS, None]


def test_what_cannot_be_watched_is_said_before_the_server_is_ready(run: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").write_text("")
    for name, error, says in (("none", DataError, "does not exist"), ("empty.tsv", ValueError, "no rows")):
        with pytest.raises(error, match=says), serving(run.store.path, watch=str(tmp_path / name)):
            pass
