"""Whose rows a replica has: kept in the ``extra`` of each of its commits, with what the source itself keeps there."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import FormatError
from ..store.manifest import is_store_id
from ..store.version import ORIGIN_KEY, is_commit_id
from ..system.excerpt import excerpt


class Origin(NamedTuple):
    """A version of another store."""

    source: str
    """That store's id, hex."""
    version: int
    """Its number there, which a server tells its clients."""
    commit_id: str = ""
    """The commit's identity (``lineage``); "" of a release without identities."""

    def __str__(self) -> str:
        return f"version {self.version} (commit {self.commit_id or 'unknown'}) of store {self.source}"

    def is_same(self, other: "Origin | None") -> bool:
        """Whether both are the very same commit, for certain."""
        return self == other and self.commit_id != ""


def origin_of(extra: Mapping[str, Any]) -> Origin | None:
    """Where the rows of a commit with this ``extra`` come from; None if the store is no replica. FormatError: it is not
    what ``apply_update`` wrote."""
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
