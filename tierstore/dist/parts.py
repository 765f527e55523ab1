"""A sharded store as one process reads it: all ranks' parts, at the newest commit that all have."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..config import TableConfig
from ..errors import StoreNotFoundError, TierstoreError
from ..exchange.rows import Rows, read_rows
from ..kernels.arrays import Int64s
from ..store import Store, open_store
from ..store.manifest import MANIFEST_NAME, Part, parts_in
from ..store.version import TableState
from .commits import SECTION, Commits
from .plan import Shard, Sharding
from .table import whole_config


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
        if common := set.intersection(*(set(each.versions) for each in commits)) if commits else set():
            best = max(best, Source(max(common), commits), key=lambda found: (found.number, found.size))
    if not best.number:
        raise StoreNotFoundError(
            f"{directory} has not all parts of a sharded store: {'; '.join(wrong) or 'nothing was committed'}. Copy "
            "the parts of all hosts into one folder, or start as many ranks as wrote them"
        )
    return best


def _commits_of(path: Path) -> Commits:
    with open_store(path, mode="r", ddr="16MiB") as store:
        return Commits.of(store)


class Parts:
    """Rows of whole tables, read from the ranks' stores, or from a store that is not sharded.

    Attributes:
        number: of the commit. run: see ``Commits``.
        tables: configurations of the whole tables, in order.
        extra, tensors: rank 0's of that commit.
    """

    def __init__(self, stores: Sequence[Store], number: int, run: str, shardings: dict[str, Sharding]) -> None:
        self._stores = stores
        self.number = number
        self.run = run
        self.shardings = shardings
        self.tables = {name: whole_config(stores[0][name].config, each) for name, each in shardings.items()}
        extra = stores[0].extra
        self.extra: dict[str, Any] = extra["extra"] if SECTION in extra else extra
        self.tensors: dict[str, Tensor] = stores[0].tensors()

    def state_of(self, name: str) -> TableState:
        """The table's updates so far and learning rate."""
        return self._stores[0][name].state

    def read(self, name: str, start: int, stop: int) -> Rows:
        """Rows ``[start, stop)`` of a whole table; see ``exchange.rows.read_rows``."""
        config = self.tables[name]
        layout = config.layout(self._stores[0][name].layout.page_bytes)
        weights = np.empty((stop - start, layout.stored_columns), layout.numpy_dtype)
        state = np.empty((stop - start, layout.state_dim), np.float32)
        for shard in self.shardings[name].shards(config.num_embeddings, config.embedding_dim):
            first, last = max(start, shard.first_row), min(stop, shard.first_row + shard.num_rows)
            if first < last:
                rows, own = read_rows(self._stores[shard.rank][name], first, last), slice(first - start, last - start)
                weights[own, shard.first_column : shard.first_column + shard.num_columns] = rows.weights
                state[own, state_columns(config, shard)] = rows.state
        return Rows(weights, state)


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
def open_parts(directory: Path, source: Source | None = None, *, ddr: str = "64MiB") -> Iterator[Parts]:
    """Open a sharded store, or one that is not, for reading by this process.

    Args:
        source: which parts; default: the newest.
        ddr: memory for rows, of each part.

    Raises:
        StoreNotFoundError: not all parts are there. TierstoreError: they are of different runs. DamagedError.
    """
    with contextlib.ExitStack() as opened:
        if (directory / MANIFEST_NAME).exists():
            store = opened.enter_context(open_store(directory, mode="r", ddr=ddr))
            if SECTION in store.extra:
                raise TierstoreError(f"{directory} is a rank's part of a sharded store: give the folder that it is in")
            whole = {name: Sharding("row_wise", (0,)) for name in store.tables}
            yield Parts([store], max(store.version, 1), secrets.token_hex(8), whole)
            return
        source = source or newest_set(directory)
        number, size = source.number, source.size
        runs = {each.run for each in source.commits}
        if len(runs) > 1:
            raise TierstoreError(f"{directory}: the ranks' stores are of {len(runs)} different runs")
        stores = [
            opened.enter_context(
                open_store(directory / f"{rank}-of-{size}", mode="r", version=each.versions[number], ddr=ddr)
            )
            for rank, each in enumerate(source.commits)
        ]
        shardings = stores[0].extra[SECTION]["shardings"]
        yield Parts(
            stores, number, runs.pop(), {name: Sharding.from_json(each, size) for name, each in shardings.items()}
        )
