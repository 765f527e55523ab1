"""Whose rows a replica has: kept in the ``extra`` of each of its commits, beside what the source itself keeps there."""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import FormatError
from ..excerpt import excerpt

__all__ = ["ORIGIN_KEY", "Origin", "is_store_id", "origin_of", "with_origin"]

ORIGIN_KEY: Final = "tierstore.update"
_STORE_ID: Final = re.compile("[0-9a-f]{32}")


class Origin(NamedTuple):
    """A version of another store.

    Attributes:
        source: that store's id, hex.
        version: its number there, which a server tells its clients.
    """

    source: str
    version: int


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
        source, version = stored["source"], stored["version"]
    except (KeyError, TypeError):
        source, version = None, None
    if not is_store_id(source) or type(version) is not int or version < 1:
        raise FormatError(f"extra[{ORIGIN_KEY!r}] is {excerpt(stored)}, not the source of a replica's rows")
    return Origin(source, version)


def with_origin(extra: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """The source's own ``extra``, and where it comes from."""
    return {**extra, ORIGIN_KEY: origin._asdict()}
