"""Which rank is gone, when an exchange failed: torch's own error gives an address, or nothing."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import torch.distributed as dist

from ..errors import RankError

_GRACE_SECONDS: Final = 2.0
"""So long after the last report of a failure, who has not reported is gone: an exchange fails everywhere at once."""
_POLL_SECONDS: Final = 0.1


@contextlib.contextmanager
def naming_gone(group: Any, rank: int, size: int) -> Iterator[None]:
    """Run an exchange.

    Raises:
        RankError: it failed; names the ranks that ended or hang.
    """
    try:
        yield
    except RuntimeError as error:
        gone = _gone(dist.get_process_group_ranks(group or dist.group.WORLD), rank, size)
        who = f"rank{'s' * (len(gone) > 1)} {', '.join(map(str, gone))}" if gone else "a rank"
        raise RankError(
            f"{who} ended, or did not answer within the group's timeout. Start all ranks again: they go on from the "
            "last commit that all have"
        ) from error


def _gone(members: list[int], rank: int, size: int) -> list[int]:
    """Ranks that do not report that an exchange failed. Empty if there is nowhere to report it."""
    reports: Any = dist.distributed_c10d._get_default_store()
    keys = [f"tierstore.dist/failed/{'-'.join(map(str, members))}/{each}" for each in range(size)]
    try:
        reports.set(keys[rank], "")
        known, since = 0, time.monotonic()
        while known < size - 1 and time.monotonic() - since < _GRACE_SECONDS:  # the last one left is gone
            count = sum(map(reports.check, ([key] for key in keys)))
            if count > known:
                known, since = count, time.monotonic()
            time.sleep(_POLL_SECONDS)
        return [each for each, key in enumerate(keys) if not reports.check([key])]
    except RuntimeError:  # rank 0 had the reports, and is gone
        return []
