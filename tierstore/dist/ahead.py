"""Batches brought in ahead, over ranks: ids are exchanged and owners bring rows in while an earlier batch computes."""

import contextlib
from typing import TYPE_CHECKING, Any

from ..nn.function import Prepared
from .ranks import Ranks

if TYPE_CHECKING:
    from .collection import ShardedCollection


class Ahead:
    """What ``tierstore.prefetch`` drives, from its thread, for one pass over batches. Every rank's pass has as many.

    Args:
        module: the module.
        ranks: in a group of this object's own, so that its exchanges and those of forward have no order between them.
    """

    def __init__(self, module: "ShardedCollection", ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks
        self._is_over = False

    @property
    def has_room(self) -> bool:
        return self._module.has_room

    def prepare(self, features: Any) -> Prepared:
        """Bring the rows of a batch in; see ``TieredModule.prepare``.

        Raises:
            RuntimeError: another rank failed, or has no more batches.
        """
        try:
            prepared = self._module.prepare_by(self._ranks, features)
            lookups: list[Any] = list(prepared.lookups)
            for lookup in lookups:
                lookup.bring_in(self._ranks)
            return self._module.keep(features, prepared)
        except BaseException:
            self._is_over = True  # for all ranks
            raise

    def forget(self, ticket: Prepared) -> None:
        self._module.forget(ticket)

    def announce(self, features: Any) -> Any:
        return self._module.announce(features)

    def end(self) -> None:
        """Tell the other ranks that there are no more batches, and wait until they have none. In the pass's thread."""
        with contextlib.suppress(RuntimeError):  # of a rank that is gone, as forward will say
            if not self._is_over:
                self._ranks.end()
        self._is_over = True
        self._ranks.close()
