"""Batches brought in ahead, over ranks: ids are exchanged and owners bring rows in while an earlier batch computes."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..nn.function import Prepared
from ..nn.module import arguments_of
from .ranks import Ranks

if TYPE_CHECKING:
    from .collection import ShardedModule


class Ahead:
    """What ``tierstore.prefetch`` drives, from its thread, for one pass over batches. Every rank's pass has as many.

    Args:
        module: the module.
        ranks: in a group that only this object uses, so that its exchanges and those of forward have no order between
            them; released at the end.
    """

    def __init__(self, module: "ShardedModule", ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks
        self._is_over = False

    def prepare(self, features: Any) -> Prepared:
        """Exchange the ids of a batch; see ``TieredModule.prepare``.

        Raises:
            RuntimeError: another rank failed, or has no more batches.
        """
        with self._ending_for_all():
            prepared = self._module.prepare_by(self._ranks, *arguments_of(features))
            lookups: list[Any] = list(prepared.lookups)
            for lookup in lookups:
                lookup.route(self._ranks)
            return self._module.keep(features, prepared)

    def has_room(self, ticket: Prepared) -> bool:
        """Whether this rank has, for the rows that it owns."""
        return ticket.has_room()

    def bring_in(self, ticket: Prepared) -> bool:
        """Bring the batch's rows in that this rank owns; see ``TieredModule.bring_in``.

        Raises:
            RuntimeError: another rank failed, or has no more batches.
        """
        with self._ending_for_all(), self._ranks.together("a prefetched batch"):
            return ticket.stage()

    @contextlib.contextmanager
    def _ending_for_all(self) -> Iterator[None]:
        """What fails within fails on all ranks."""
        try:
            yield
        except BaseException:
            self._is_over = True
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
        self._ranks.release()
