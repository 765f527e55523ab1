"""Named steps of write-back and commit, at which the crash tests end the process.

``reach`` does nothing unless a test sets ``hook``. Each name stands where a process that ends leaves something new
behind: a file, a transaction, a tree of which one part follows the other.
"""

from collections.abc import Callable
from typing import Final

POINTS: Final = (
    "manifest: written beside", "manifest: replaced",
    "rows file: made under another name", "rows file: in place",
    "anchor: tree synced", "anchor: slot written", "anchor: slot synced", "recovery: anchored meta pages put back",
    "log: numbers taken", "write-back: rows chosen", "cleaning: rows put", "write-back: segments put",
    "write-back: transaction committed", "cleaning: rows published", "write-back: segments published",
    "commit: rows frozen", "commit: frozen rows written", "commit: payload put", "commit: record put",
    "commit: transaction committed", "commit: durable",
    "prune: segments deleted", "prune: transaction committed", "prune: done",
    "rollback: head put", "rollback: transaction committed", "rollback: durable", "rollback: segments deleted",
)  # fmt: skip

COPY_POINTS: Final = (
    "copy: rows in place", "copy: manifest in place", "copy: done",
    "reshard: other parts held", "reshard: stale part set aside", "reshard: part written", "reshard: parts opened",
    "reshard: replaced part set aside", "reshard: done",
)  # fmt: skip
"""Those of copies that are made in a place of their own, and of ranks that reshard."""

UPDATE_POINTS: Final = (
    "fetch: part written", "fetch: checked", "update: applied", "update: shown", "update: file kept"
)  # fmt: skip
"""Those of a server that gets an update."""

PUBLISH_POINTS: Final = ("publish: canary heard", "publish: urgent rows offered", "publish: file made")
ROLLBACK_POINTS: Final = ("canary: approved", "canary: declined", "rollback: declined", "rollback: written")
"""Those of a publisher, and of a server that judges or goes back."""

FEED_POINTS: Final = ("feed: change noted", "feed: ids noted", "feed: acknowledged")
"""Those of a process that takes changes."""

hook: Callable[[str], None] | None = None
"""Called with the name of each point as it is reached, in whatever thread."""


def reach(name: str) -> None:
    """A point of one of the lists is reached."""
    if hook is not None:
        known = POINTS + COPY_POINTS + UPDATE_POINTS + ROLLBACK_POINTS + PUBLISH_POINTS + FEED_POINTS
        assert name in known, f"{name!r} is in no list of points"
        hook(name)
