"""What each rank's store keeps of the commits that all ranks made."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ..errors import TierstoreError
from ..store import Store
from ..store.version import RANK_KEY

SECTION: Final = RANK_KEY
"""Of ``extra`` of each rank's store."""


class Place(NamedTuple):
    """Whose part a store is: ``rank`` of so many ``ranks``."""

    rank: int
    ranks: int


class Commits(NamedTuple):
    """What a rank's store has.

    Attributes:
        run: the identity of what was trained; "" if there is none yet.
        versions: of the rank's store, by the number of the commit; those that ``of`` tells are kept.
        shardings: of each table, as JSON.
        source: identity of the commit of another number of ranks that the last version was made of; "" if of none.
    """

    run: str
    versions: dict[int, int]
    shardings: dict[str, Any]
    source: str = ""

    @property
    def last(self) -> int:
        """The highest number; 0 if nothing was committed."""
        return max(self.versions, default=0)

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
        numbered = known | {section["number"]: version}
        return cls(section["run"], numbered, section["shardings"], section.get("source", ""))


def packed(
    place: Place,
    run: str,
    number: int,
    versions: dict[int, int],
    shardings: dict[str, Any],
    extra: dict[str, Any] | None,
    source: str = "",
) -> dict[str, Any]:
    """``extra`` of a rank's commit: ``versions`` of its store by the numbers before, each table's sharding as JSON, and
    what the caller gave."""
    section = {
        **place._asdict(),
        **({"source": source} if source else {}),
        "run": run,
        "number": number,
        "versions": {str(each): version for each, version in versions.items()},
        "shardings": shardings,
    }
    return {SECTION: section, "extra": extra or {}}
