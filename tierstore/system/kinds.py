"""Settings that are kept as a dict, whose ``kind`` says of which class they are."""

from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def by_kind(fields: dict[str, Any], kinds: Mapping[str, type[_T]], what: str) -> _T:
    """The settings that these fields are. ValueError for an unknown kind; what the class raises for other fields."""
    rest = dict(fields)
    kind = rest.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"{what} kind {kind!r} is not one of {sorted(kinds)}")
    return kinds[kind](**rest)
