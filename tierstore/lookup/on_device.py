"""Ids that are on the device that holds the rows: joined there, so that the host does not wait for them."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from ..hbm.base import POSITIONS_MAX, DeviceBatch, DeviceRows, rows_of
from ..hbm.batch import DeviceIds
from ..hbm.lanes import refused_in_graph
from ..kernels.arrays import Int64s
from ..layout import ROW_MASK
from .joined import Features, Jagged, Joined

_FETCHED: Final = ("bag_starts", "bags", "scale", "_ids", "_starts", "_stops", "_keys", "_slots", "_numbering")


class DeviceJagged:
    """A ``Jagged`` whose tensors are on a device.

    Args:
        given: the tensors.
        num_bags: bags of all features.
        to_host: copies them to the host, checked; waits for the device.
        offsets_error: the error for a wrong offset, given its index.

    Attributes:
        batch: bags of each feature; of one, until ``of`` says otherwise.
    """

    def __init__(
        self, given: DeviceIds, num_bags: int, to_host: Callable[[], Jagged], offsets_error: Callable[[int], ValueError]
    ) -> None:
        self.given = given
        self.batch = self._num_bags = num_bags
        self.offsets_error = offsets_error
        self._to_host = to_host

    def of(self, batch: int) -> "DeviceJagged":
        self.batch = batch
        return self

    @cached_property
    def on_host(self) -> Jagged:
        """A copy; waits for the device."""
        if torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise refused_in_graph("a batch must have ids, and the features of one lookup, all of them in order")
        return self._to_host()._replace(batch=self.batch)

    def join(self, features: Features, places: Sequence[int]) -> Joined:
        """As ``Jagged.join``: on the device, if these are all features, in order, and their rows are there."""
        is_all = self.batch > 0 and list(places) == list(range(self._num_bags // self.batch))
        if not (is_all and 0 < len(self.given.ids) <= POSITIONS_MAX):
            return self.on_host.join(features, places)

        return features.tables[0].in_pool(lambda pool: OnDevice(features, self, rows_of(pool)))


class OnDevice(Joined):
    """Ids of all features of a batch, joined and checked on the device. What the host has of them otherwise it fetches
    when it is first asked for: that waits for the device, and raises ValueError for a wrong id or offset.

    Attributes:
        rows: of whose numbering they are.
        sent: the batch there.
    """

    def __init__(self, features: Features, jagged: DeviceJagged, rows: DeviceRows) -> None:
        self.tables, self.columns, self.table_of = features.tables, features.columns, features.table_of
        self.batch = jagged.batch
        self.table_bags = features.bounds * self.batch
        self._features = features
        self.rows = rows
        rows.begin()

        def explain(record: Int64s) -> ValueError:
            if record[-1]:
                return jagged.offsets_error(int(record[-1]) - 1)
            feature = int(np.flatnonzero(record)[0])
            return features.owners[feature].id_error(int(record[feature]))

        self.sent: DeviceBatch = rows.join(features, self.batch, jagged.given, explain)

    def __len__(self) -> int:
        return len(self.sent)

    def __getattr__(self, name: str) -> Any:
        if name not in _FETCHED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._fetch()
        return getattr(self, name)

    def _fetch(self) -> None:
        rows, sent = self.rows, self.sent
        rows.lane.require_no_capture("the host reads no ids, as it would for a table that is looked up twice or traced")
        rows.require_right(sent)
        keys = rows.position_keys(sent)
        rows.lane.follow(sent.ready)
        starts = sent.bags.bag_starts.cpu().numpy().astype(np.int64)
        scale = sent.bags.scale
        jagged = Jagged(keys & ROW_MASK, starts, self.batch, None if scale is None else scale.cpu().numpy())
        super().__init__(self._features, jagged, list(range(len(self.columns))))
        self.note_keys(keys)
