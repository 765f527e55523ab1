"""A sharded store as one process reads it: all ranks' parts, at the newest commit that all have."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..config import TableConfig
from ..errors import StoreNotFoundError, TierstoreError
from ..exchange.rows import Rows
from ..kernels.arrays import Int64s
from ..store import Store, open_store
from ..store.manifest import MANIFEST_NAME, Part, parts_in
from .commits import SECTION, Commits, in_common
from .plan import Shard, Sharding

_DDR: Final = "64MiB"


def part_sets(directory: Path) -> dict[int, list[Part]]:
    """The ranks' folders that are in a directory, by the number of ranks."""
    found: dict[int, list[Part]] = {}
    for part in parts_in(directory):
        found.setdefault(part.size, []).append(part)
    return found


class Source(NamedTuple):
    """A complete set of parts.

    Attributes:
        number: of the newest commit that all have.
        commits: of each rank's store, in order.
    """

    number: int
    commits: tuple[Commits, ...]

    @property
    def size(self) -> int:
        """How many ranks wrote it."""
        return len(self.commits)


def newest_set(directory: Path) -> Source:
    """The one with the newest commit.

    Raises:
        StoreNotFoundError: no set is complete.
    """
    best, wrong = Source(0, ()), []
    for size, parts in part_sets(directory).items():
        lost = sorted(set(range(size)) - {part.rank for part in parts})
        wrong += [f"{rank}-of-{size} is missing" for rank in lost]
        try:
            commits = () if lost else tuple(_commits_of(part.path) for part in parts)
        except TierstoreError as error:  # a part that was begun, and cut short
            commits = ()
            wrong.append(str(error))
        if common := in_common(commits) if commits else []:
            best = max(best, Source(common[-1], commits), key=lambda found: (found.number, found.size))
    if not best.number:
        raise StoreNotFoundError(
            f"{directory} has not all parts of a sharded store: {'; '.join(wrong) or 'nothing was committed'}. Copy "
            "the parts of all hosts into one folder, or start as many ranks as wrote them"
        )
    return best


def _commits_of(path: Path) -> Commits:
    with open_store(path, mode="r", ddr="16MiB") as store:
        return Commits.of(store)


class Parts(NamedTuple):
    """A store, sharded or not, as one process reads it.

    Attributes:
        store: the whole tables, ``extra`` and tensors of one commit; of a sharded store rank 0's ``extra`` and tensors.
        number: of the commit. run: see ``Commits``.
        shardings: of each table.
    """

    store: Store
    number: int
    run: str
    shardings: dict[str, Sharding]


def of_columns(rows: Rows, config: TableConfig, shard: Shard) -> Rows:
    """What a shard has of whole rows."""
    weights: Any = np.ascontiguousarray(rows.weights[:, shard.first_column : shard.first_column + shard.num_columns])
    return Rows(weights, np.ascontiguousarray(rows.state[:, state_columns(config, shard)]))


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
    """Open a sharded store, or one that is not, for reading by this process.

    Args:
        source: the newest parts; default: they are looked for.

    Raises:
        StoreNotFoundError: not all parts are there. TierstoreError: they are of different runs. DamagedError.
    """
    is_plain = (directory / MANIFEST_NAME).exists()
    found = None if is_plain else source or newest_set(directory)
    version = None if found is None else found.number
    with open_store(directory, mode="r", version=version, ddr=_DDR) as store:
        if found is None:
            if SECTION in store.extra:
                raise TierstoreError(f"{directory} is a rank's part of a sharded store: give the folder that it is in")
            whole = {name: Sharding("row_wise", (0,)) for name in store.tables}
            yield Parts(store, max(store.version, 1), secrets.token_hex(8), whole)
        else:
            own = found.commits[0]
            shardings = {name: Sharding.from_json(own.shardings[name], found.size) for name in store.tables}
            yield Parts(store, found.number, own.run, shardings)
