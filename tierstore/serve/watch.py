"""The log loss and other metrics of what is served, on labelled rows, version by version.

The store's engine is asked for them as by a client, so what is measured is what clients get: rows as they are kept in
memory, layers as they are computed.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch

from ..metrics import Measures, MetricName, Predictions
from ..train.build import open_data
from ..train.config import RunConfig
from .messages import InferTensor, ServeError, Status

_LOG: Final = logging.getLogger("tierstore.serve")
_REQUEST_ROWS: Final = 128
_PAUSE: Final = 4.0
"""Between two requests, times what the one before took: a fifth of the store's thread at most."""
_LEAST: Final = 2.0**-24
"""Probabilities are float32, which rounds those near 1 to it: none counts as nearer to 0 or 1."""
Score = Callable[[Mapping[str, InferTensor]], Awaitable[tuple[Any, int]]]
"""The ranking model's probabilities, float32 [B], of a request, and the version that they are of. ServeError."""


class LabelledRows(NamedTuple):
    """A request to the ranking model, and of its rows the labels, bool [B], and weights and groups, or None."""

    inputs: Mapping[str, InferTensor]
    labels: Any
    of_rows: tuple[Any, ...] = ()


class WatchReading(NamedTuple):
    """``version``: that of the first row. Metrics of the watched rows, GAUC if the run has groups. ``holds``: whether
    the log loss is within the bound."""

    version: int
    log_loss: float
    rows: int
    holds: bool
    commit_id: str = ""
    ne: float = math.nan
    calibration: float = math.nan
    auc: float = math.nan
    gauc: float = math.nan


def read_labelled(config: RunConfig, path: str, *, max_rows: int, batch_rows: int) -> list[LabelledRows]:
    """The first rows of a file in the format of the run's data, as requests of up to ``batch_rows``. DataError or
    another ValueError: it cannot be read, or has no rows."""
    reader, _ = open_data(replace(config, data=replace(config.data, path=path)))
    found = []
    for rows in reader.read_chunks(0, max_rows, min(batch_rows, _REQUEST_ROWS)):
        dense = InferTensor("FP32", np.nan_to_num(rows.dense, nan=0.0))
        columns, offsets = (each[: len(reader.schema.sparse)] for each in rows.categories)
        values = InferTensor("INT64", np.concatenate(columns))
        lengths = InferTensor("INT32", np.diff(offsets).astype(np.int32))
        inputs, keys = {"dense": dense, "values": values, "lengths": lengths}, reader.keys_of(rows, reader.schema.group)
        found.append(LabelledRows(inputs, rows.labels > 0, (rows.weights, keys)))
    if not found:
        raise ValueError(f"{path} has no rows to watch the loss on")
    return found


class Watch:
    """Measures what ``score`` serves, against a bound of ``1 + bound`` times the first log loss that is a number.
    ``store``: its name for the log. ``commit_id``: gives the identity of what is served."""

    def __init__(
        self, score: Score, rows: Sequence[LabelledRows], *, bound: float, store: str,
        commit_id: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._score, self._rows, self._bound, self._store, self._commit_id = score, rows, bound, store, commit_id
        self._first: tuple[int, float] | None = None  # version and log loss
        self.last: WatchReading | None = None

    async def measure(self) -> WatchReading:
        """Ask for every row, keep the reading, and log it: as a warning if the bound does not hold. ServeError: what
        the engine refuses; UNAVAILABLE: the version changed as it began. Of later rows a newer version may be served: a
        reading ends however often versions come."""
        found, commit_id, versions = Predictions(), self._commit_id(), list[int]()
        for each in self._rows:
            begun = time.monotonic()
            probabilities, version = await self._score(each.inputs)
            versions.append(version)
            if len(versions) == 1 and self._commit_id() != commit_id:
                raise ServeError(Status.UNAVAILABLE, "the version changed as its loss was measured; measure again")
            chances = torch.from_numpy(np.clip(probabilities.astype(np.float64), _LEAST, 1 - _LEAST))
            found.add(each.labels, torch.logit(chances), *each.of_rows)
            await asyncio.sleep(_PAUSE * (time.monotonic() - begun))
        measures, rows = Measures(names=get_args(MetricName)), sum(len(each.labels) for each in self._rows)
        figures = measures.named(*found.measured(measures))
        number, loss = versions[0], figures["log_loss"]
        self._first = self._first or ((number, loss) if math.isfinite(loss) else None)
        first, before = self._first or (number, loss)
        above = 100 * (loss / before - 1)
        self.last = WatchReading(number, rows=rows, holds=above <= 100 * self._bound, commit_id=commit_id, **figures)
        level, then = (logging.INFO, "") if self.last.holds else (logging.WARNING, ", above the bound")
        others = "" if version == number else f" (to {version} in the end)"
        message = "%s: version %d%s has a log loss of %.6f on %d watched rows, %+.4f %% of version %d's%s"
        _LOG.log(level, message, self._store, number, others, loss, rows, above, first, then)
        return self.last
