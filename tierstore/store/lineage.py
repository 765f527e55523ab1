"""The commits that a commit was made from. A number alone does not tell two commits apart.

A store that was restored from a copy, or that lost its last commits, uses their numbers again for other rows. A reader
may have seen the lost ones. So each commit has a random identity and names the commits before it: a commit was made
from another if and only if the other's number and identity are in its lineage. Commits of releases without identities
have none; nothing is made from them for certain.
"""

import re
import secrets
from typing import Any, Final, NamedTuple

MAX_ANCESTORS: Final = 256
_COMMIT_ID: Final = re.compile("[0-9a-f]{16}")
_MAX_VERSION: Final = 2**40


class Ancestor(NamedTuple):
    """A commit before another: its number, and its identity, 16 hex digits."""

    version: int
    commit_id: str


def is_commit_id(value: object) -> bool:
    return isinstance(value, str) and _COMMIT_ID.fullmatch(value) is not None


class Lineage(NamedTuple):
    """A commit's identity and the commits that it was made from."""

    commit_id: str = ""
    """8 random bytes in hex; "" if it is not known."""
    ancestors: tuple[Ancestor, ...] = ()
    """The last ``MAX_ANCESTORS`` of them whose identity is known, ascending."""

    def following(self, version: int) -> "Lineage":
        """The lineage of the next commit, made from this one, whose number is ``version``."""
        own = (Ancestor(version, self.commit_id),) if self.commit_id else ()
        return Lineage(secrets.token_hex(8), (*self.ancestors, *own)[-MAX_ANCESTORS:])

    def id_of(self, version: int) -> str:
        """The identity of the ancestor with this number; "" if there is none."""
        return next((each.commit_id for each in self.ancestors if each.version == version), "")

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.commit_id, "ancestors": [list(each) for each in self.ancestors]}

    @classmethod
    def from_dict(cls, fields: Any) -> "Lineage":
        """Inverse of ``to_dict``; None, which earlier releases leave, is ``NO_LINEAGE``. ValueError, TypeError or
        KeyError for what ``to_dict`` did not give."""
        if fields is None:
            return NO_LINEAGE
        ancestors = tuple(Ancestor(*each) for each in fields["ancestors"])
        if not is_commit_id(fields["id"]) or len(ancestors) > MAX_ANCESTORS:
            raise ValueError("no identity of a commit, or too many before it")
        before = 0
        for version, commit_id in ancestors:
            if type(version) is not int or not before < version < _MAX_VERSION or not is_commit_id(commit_id):
                raise ValueError("a commit before it has no number or no identity")
            before = version
        return cls(fields["id"], ancestors)


NO_LINEAGE: Final = Lineage()
"""Of version 0, and of a commit by a release without identities."""
