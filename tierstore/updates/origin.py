"""Whose rows a replica has: kept in the ``extra`` of each of its commits, beside what the source itself keeps there."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import FormatError
from ..store.lineage import is_commit_id
from ..store.version import ORIGIN_KEY
from ..system.excerpt import excerpt

__all__ = ["Origin", "is_store_id", "origin_of", "with_origin"]

_STORE_ID: Final = re.compile("[0-9a-f]{32}")


class Origin(NamedTuple):
    """A version of another store.

    Attributes:
        source: that store's id, hex.
        version: its number there, which a server tells its clients.
        commit_id: the commit's identity (``lineage``); "" of a release without identities.
    """

    source: str
    version: int
    commit_id: str = ""

    def __str__(self) -> str:
        return f"version {self.version} (commit {self.commit_id or 'unknown'}) of store {self.source}"

    def is_same(self, other: "Origin | None") -> bool:
        """Whether both are the very same commit, for certain."""
        return self == other and self.commit_id != ""


def is_store_id(value: object) -> bool:
    """Whether it is the id of a store, in hex."""
    return isinstance(value, str) and _STORE_ID.fullmatch(value) is not None


def origin_of(extra: Mapping[str, Any]) -> Origin | None:
    """Where the rows of a commit with this ``extra`` come from; None if the store is no replica.

    Raises:
        FormatError: it is not what ``with_origin`` wrote.
    """
    stored = extra.get(ORIGIN_KEY)
    if stored is None:
        return None
    try:
        source, version, commit_id = stored["source"], stored["version"], stored.get("commit_id", "")
    except (KeyError, TypeError, AttributeError):
        source, version, commit_id = None, None, None
    is_sound = is_store_id(source) and type(version) is int and version >= 1
    if not is_sound or not (commit_id == "" or is_commit_id(commit_id)):
        raise FormatError(f"extra[{ORIGIN_KEY!r}] is {excerpt(stored)}, not the source of a replica's rows")
    return Origin(source, version, commit_id)


def with_origin(extra: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """The source's own ``extra``, and where it comes from."""
    return {**extra, ORIGIN_KEY: origin._asdict()}
