"""What each rank's store keeps of the commits that all ranks made.

A commit has a number, and an identity that rank 0 draws: ranks have a commit in common if both are equal. A rank's
store may hold one version that is no commit of all ranks, as its newest: that of a commit that others did not make.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
        ids: of the commits, by number; commits of earlier releases have none.
    """

    run: str
    versions: dict[int, int]
    shardings: dict[str, Any]
    ids: dict[int, str]

    @property
    def last(self) -> int:
        """The highest number; 0 if nothing was committed."""
        return max(self.versions, default=0)

    @classmethod
    def of(cls, store: Store) -> "Commits":
        """TierstoreError if the store is no rank's part."""
        if not store.version:
            return cls("", {}, {}, {})
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
        ids = {int(number): commit_id for number, commit_id in section.get("ids", {}).items()}
        return cls(section["run"], known | {section["number"]: version}, section["shardings"], ids)


def in_common(commits: Sequence[Commits]) -> list[int]:
    """Numbers of the commits that all these ranks have, ascending."""
    known = [{(number, each.ids.get(number)) for number in each.versions} for each in commits]
    return sorted(number for number, _ in set.intersection(*known))


def packed(
    place: Place,
    run: str,
    number: int,
    versions: Mapping[int, int],
    shardings: dict[str, Any],
    extra: dict[str, Any] | None,
    ids: Mapping[int, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """``extra`` of a rank's commit: ``versions`` of its store by the numbers before, each table's sharding as JSON,
    what the caller gave, and the identities of the commits, this one included."""
    section = {
        **place._asdict(),
        "run": run,
        "number": number,
        "versions": {str(each): version for each, version in versions.items()},
        "ids": {str(each): commit_id for each, commit_id in ids.items()},
        "shardings": shardings,
    }
    return {SECTION: section, "extra": extra or {}}
