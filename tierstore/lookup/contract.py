"""What modules and backward passes ask of a lookup, wherever its rows are."""

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from ..kernels.arrays import Floats, Int64s
from ..pool import Pool
from .hbm import HbmLookup
from .joined import Joined
from .lookup import Lookup
from .tables import TrainsRows


class AnyLookup(TrainsRows, Protocol):
    joined: Joined
    mode: str

    @property
    def group(self) -> Hashable:
        """Equal of lookups that may be merged."""
        ...

    @property
    def demand(self) -> tuple[Pool, Int64s]:
        """The pool and the keys, int64 [N], of the rows it will use."""
        ...

    def has_room(self) -> bool:
        """Whether ``stage`` would bring the rows in."""
        ...

    def stage(self) -> bool:
        """Bring the rows in and hold them until used; False, and nothing is read, if the pool has no room."""
        ...

    def forward(self, out: Tensor, *, keep: bool) -> None:
        """Pool every bag into ``out``."""
        ...

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        """Gradient of the per-sample weights into ``grad_scale``."""
        ...


def make_lookup(joined: Joined, *, mode: str) -> AnyLookup:
    """A pooled lookup in the fastest tier of the tables. ValueError, which names table and id, for an id outside its
    table; where each row has a slot of its own, and in device memory, the lookup raises it."""
    pool = joined.tables[0].pool
    if pool.tier.on_device:
        return HbmLookup(joined, mode=mode)
    if pool.rows.numbering is None:
        joined.keyed  # noqa: B018 - reads ids
    return Lookup(joined, mode=mode)
