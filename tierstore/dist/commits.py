"""What each rank's store keeps of the commits that all ranks made."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import TierstoreError
from ..store import Store

SECTION: Final = "tierstore.dist"
"""Of ``extra`` of each rank's store."""


class Commits(NamedTuple):
    """What a rank's store has.

    Attributes:
        run: the identity of what was trained; "" if there is none yet.
        versions: of the rank's store, by the number of the commit; those that ``of`` tells are kept.
        shardings: of each table, as JSON.
    """

    run: str
    versions: dict[int, int]
    shardings: dict[str, Any]

    @classmethod
    def of(cls, store: Store) -> "Commits":
        """TierstoreError if the store is no rank's part."""
        if not store.version:
            return cls("", {}, {})
        section = store.extra.get(SECTION)
        if section is None:
            raise TierstoreError(
                f"{store.directory} is not a rank's part of a sharded store; open it by tierstore.open"
            )
        told = cls.told(section, store.version)
        return told._replace(versions={each: kept for each, kept in told.versions.items() if kept in store.versions})

    @classmethod
    def told(cls, section: Mapping[str, Any], version: int) -> "Commits":
        """What a version of a rank's store says, of the last 256 commits."""
        known = {int(number): each for number, each in section["versions"].items()}
        return cls(section["run"], known | {section["number"]: version}, section["shardings"])


def packed(
    run: str, number: int, versions: dict[int, int], shardings: dict[str, Any], extra: dict[str, Any] | None
) -> dict[str, Any]:
    """``extra`` of a rank's commit: ``versions`` of its store by the numbers before, each table's sharding as JSON, and
    what the caller gave."""
    section = {
        "run": run,
        "number": number,
        "versions": {str(each): version for each, version in versions.items()},
        "shardings": shardings,
    }
    return {SECTION: section, "extra": extra or {}}
