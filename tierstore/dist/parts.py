"""A sharded store as one process reads it: all ranks' parts, at the newest commit that all have.

A commit has a number, and an identity that rank 0 draws: ranks have a commit in common if both are equal. A rank's
store may hold one version that is no commit of all ranks, as its newest: that of a commit that others did not make.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import StoreNotFoundError, TierstoreError
from ..exchange.rows import RowValues
from ..kernels.arrays import Int64s
from ..store import Store, open_store
from ..store.manifest import MANIFEST_NAME, Manifest, Part, parts_in
from ..store.stored_ids import ids_bytes
from ..store.version import MAX_ANCESTORS, RANK_KEY
from .plan import Shard, Sharding

SECTION: Final = RANK_KEY
"""Of ``extra`` of each rank's store."""
_DDR: Final = 64 * 2**20


class Commits(NamedTuple):
    """What a rank's store has.

    Attributes:
        run: the identity of what was trained; "" if there is none yet.
        versions: of the rank's store, by commit number, ascending; ``of`` leaves out those that are not kept.
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
            return NO_COMMITS
        section = store.extra.get(SECTION)
        if section is None:
            raise TierstoreError(
                f"{store.directory} is not a rank's part of a sharded store; open it by tierstore.open"
            )
        own = cls.read(section, store.version)
        return own._replace(versions={each: kept for each, kept in own.versions.items() if kept in store.versions})

    @classmethod
    def read(cls, section: Mapping[str, Any], version: int) -> "Commits":
        """What a version of a rank's store says, of the last 256 commits."""
        known = {int(number): each for number, each in section["versions"].items()}
        ids = {int(number): commit_id for number, commit_id in section.get("ids", {}).items()}
        return cls(section["run"], known | {section["number"]: version}, section["shardings"], ids)

    def packed(self, rank: int, ranks: int, number: int, extra: dict[str, Any] | None) -> dict[str, Any]:
        """``extra`` of the rank's next version, which is commit ``number``, with what the caller gave. ``read`` reads
        the section back; ``versions`` are those before, ``ids`` has this one's too."""
        versions = dict(sorted(self.versions.items())[-MAX_ANCESTORS:])
        ids = {each: commit_id for each, commit_id in self.ids.items() if each in versions or each == number}
        section = {
            "rank": rank,
            "ranks": ranks,
            "run": self.run,
            "number": number,
            "versions": {str(each): version for each, version in versions.items()},
            "ids": {str(each): commit_id for each, commit_id in ids.items()},
            "shardings": self.shardings,
        }
        return {SECTION: section, "extra": extra or {}}


NO_COMMITS: Final = Commits("", {}, {}, {})


def in_common(commits: Sequence[Commits]) -> list[int]:
    """Numbers of the commits that all these ranks have, ascending."""
    known = [{(number, each.ids.get(number)) for number in each.versions} for each in commits]
    return sorted(number for number, _ in set.intersection(*known))


def part_sets(directory: Path) -> dict[int, list[Part]]:
    """The ranks' folders that are in a directory, by the number of ranks."""
    found: dict[int, list[Part]] = {}
    for part in parts_in(directory):
        found.setdefault(part.size, []).append(part)
    return found


class Source(NamedTuple):
    """A complete set of parts."""

    number: int
    commits: tuple[Commits, ...]

    @property
    def size(self) -> int:
        """How many ranks wrote it."""
        return len(self.commits)


def newest_set(directory: Path) -> Source:
    """The one with the newest commit. StoreNotFoundError: no set is complete, or one that is not has a newer commit.
    TierstoreError: they are of different runs."""
    found = newer_set(directory, part_sets(directory), 0)
    if found is None:
        raise StoreNotFoundError(f"{directory} is a sharded store without a commit: train it, and commit, first")
    return found


def newer_set(directory: Path, sets: Mapping[int, Sequence[Part]], number: int) -> Source | None:
    """The one of some sets with the newest commit, if that is above ``number``; errors as of ``newest_set``."""
    best, last, wrong, runs = Source(number, ()), number, list[str](), set[str]()
    for size, parts in sets.items():
        commits, missing = list[Commits](), list[str]()
        for part in parts:
            try:
                commits.append(read_commits(part.path))
            except TierstoreError as error:
                missing.append(str(error))
        own_last = max([int(bool(missing)), *(each.last for each in commits)])  # a part that cannot be read has one
        if own_last <= number:
            continue
        runs |= {each.run for each in commits if each.last}
        missing += [f"{rank}-of-{size} is missing" for rank in sorted(set(range(size)) - {part.rank for part in parts})]
        common = [] if missing else in_common(commits)
        if max(common, default=0) > number:
            best = max(best, Source(max(common), tuple(commits)), key=lambda found: (found.number, found.size))
        else:
            last, wrong = max(last, own_last), wrong + (missing or [f"those of {size} ranks have no commit in common"])
    if len(runs) > 1:
        raise TierstoreError(
            f"{directory} has parts of {len(runs)} different runs: keep those of one, and move the others away"
        )
    if last > best.number:
        raise StoreNotFoundError(
            f"{directory} has not all parts of a sharded store, and those that are there have commits up to {last}: "
            f"{'; '.join(wrong)}. Copy the parts of all hosts into one folder, or start as many ranks as wrote them; "
            "to give up what they hold, move them away"
        )
    return best if best.commits else None


def read_commits(path: Path, version: int | None = None) -> Commits:
    """Of a rank's part, as its version, or the newest, says; errors as of ``open_store``, and of ``Commits.of``."""
    with open_store(path, mode="r", version=version, ddr="16MiB") as store:
        return Commits.of(store)


class Parts(NamedTuple):
    """A store, sharded or not, as one process reads it.

    Attributes:
        store: the whole tables of one commit, with the ``extra`` and tensors of rank 0.
        number: of the commit. run: see ``Commits``. shardings: of each table.
        paths: of the stores that it is read from.
    """

    store: Store
    number: int
    run: str
    shardings: dict[str, Sharding]
    paths: tuple[Path, ...]


def of_columns(rows: RowValues, config: TableConfig, shard: Shard) -> RowValues:
    weights: Any = np.ascontiguousarray(rows.weights[:, shard.first_column : shard.first_column + shard.num_columns])
    return RowValues(weights, np.ascontiguousarray(rows.state[:, state_columns(config, shard)]))


def state_columns(config: TableConfig, shard: Shard) -> Int64s:
    """int64: the columns of a whole row's optimizer state that a shard has."""
    width = config.optimizer.state_dim(config.embedding_dim)
    if width <= 1:  # of the row
        return np.arange(width)
    own = np.arange(shard.first_column, shard.first_column + shard.num_columns)
    found: Int64s = np.add.outer(np.arange(0, width, config.embedding_dim), own).ravel()
    return found


@contextlib.contextmanager
def open_parts(directory: Path, source: Source | None = None) -> Iterator[Parts]:
    """Open a sharded store, or one that is not, for reading by this process. ``source``: the newest parts; default: as
    found. Errors as of ``newest_set``; DamagedError."""
    is_plain = (directory / MANIFEST_NAME).exists()
    found = None if is_plain else source or newest_set(directory)
    version = None if found is None else found.number
    first = directory if found is None else directory / f"0-of-{found.size}"
    ddr = _DDR + (1 if found is None else found.size) * sum(map(ids_bytes, Manifest.read(first).tables))
    with open_store(directory, mode="r", version=version, ddr=ddr) as store:
        if found is None:
            if SECTION in store.extra:
                raise TierstoreError(f"{directory} is a rank's part of a sharded store: give the folder that it is in")
            whole = {name: Sharding("row_wise", (0,)) for name in store.tables}
            yield Parts(store, max(store.version, 1), secrets.token_hex(8), whole, (directory,))
        else:
            own = read_commits(first, found.commits[0].versions[found.number])  # the newest may be rank 0's alone
            shardings = {name: Sharding.from_json(own.shardings[name], found.size) for name in store.tables}
            paths = tuple(directory / f"{rank}-of-{found.size}" for rank in range(found.size))
            yield Parts(store, found.number, own.run, shardings, paths)
