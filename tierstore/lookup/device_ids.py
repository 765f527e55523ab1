"""The ids of a batch that are on a device, as modules have checked them; ``join`` makes what pools take."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ..hbm.base import POSITIONS_MAX, DeviceRows, rows_of
from ..hbm.kernel_types import DeviceIds
from ..kernels.arrays import Int64s
from ..layout import ROW_MASK
from ..pool.joined import NO_FLOATS, Features, Jagged, Joined


class DeviceJagged:
    """A ``Jagged`` whose tensors are on a device. ``to_host`` copies them, checked, and waits; ``offsets_error``: the
    error for a wrong offset, given its index."""

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
        return self._to_host()._replace(batch=self.batch)

    def join(self, features: Features, places: Sequence[int]) -> Joined:
        """As ``Jagged.join``: on the device, if these are all features, in order, of tables without dynamic ids."""
        is_all = self.batch > 0 and list(places) == list(range(self._num_bags // self.batch))
        if features.has_dynamic_ids or not (is_all and 0 < len(self.given.ids) <= POSITIONS_MAX):
            return self.on_host.join(features, places)
        in_pool: Any = features.tables[0].in_pool
        made: Joined = in_pool(lambda pool: _JoinedThere(features, self, rows_of(pool)))
        return made


class _JoinedThere(Joined):
    """Ids of all features of a batch, joined and checked on the device. What the host has of them otherwise it fetches
    when it is first asked for: that waits for the device, and raises ValueError for a wrong id or offset."""

    _places = _read_rows = None

    def __init__(self, features: Features, jagged: DeviceJagged, rows: DeviceRows) -> None:
        self.features, self.tables, self.batch = features, features.tables, jagged.batch
        self.columns, self.tier = features.columns, rows
        rows.begin()

        def explain(record: Int64s) -> ValueError:
            if record[-1]:
                return jagged.offsets_error(int(record[-1]) - 1)
            feature = int(np.flatnonzero(record)[0])
            error: ValueError = features.tables[features.table_of[feature]].id_error(int(record[feature]))
            return error

        self.sent = rows.join(features, self.batch, jagged.given, explain)

    def __len__(self) -> int:
        return len(self.sent)

    def __getattr__(self, name: str) -> Any:
        """What ``Joined.__init__`` sets."""
        if name not in ("starts", "scale", "_ids", "_keys", "_slots", "_numbering"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows, sent = self.tier, self.sent
        rows.require_right(sent)
        keys = rows.position_keys(sent)
        rows.streams.follow(sent.ready)
        starts = sent.bags.bag_starts.cpu().numpy().astype(np.int64)
        scale = NO_FLOATS if sent.bags.scale is None else sent.bags.scale.cpu().numpy()
        ends = starts[:: self.batch]
        super().__init__(
            self.features, self.batch, starts, scale, ids=(keys & ROW_MASK, ends[:-1], ends[1:]), keys=keys
        )
        return getattr(self, name)
