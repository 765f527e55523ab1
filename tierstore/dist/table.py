"""A sharded table as lookups see it: whole, with this rank's part behind it."""

from dataclasses import asdict, replace

from ..config import TableConfig
from ..layout import RowLayout
from ..lookup.base import id_error
from ..optim.configs import RowWiseAdagrad, RowWiseAdagradOfColumns
from ..pool.pool import Pool
from ..store import Table
from .plan import Shard, Sharding


class ShardedTable:
    """One table, sharded over ranks; made by ``ShardedStore.create_table`` and found in ``ShardedStore.tables``.

    Attributes:
        name, store, config: of the whole table, and this rank's store. sharding, shards: how it is sharded, its parts.
        local: this rank's part, a table of its own store. Read and write only rows that this rank owns in it.
        rows, columns: that this rank owns; empty if it has no part.
    """

    def __init__(self, config: TableConfig, sharding: Sharding, local: Table, rank: int) -> None:
        self.name, self.store, self.config = config.name, local.store, config
        self.local, self.index = local, local.index
        self.in_pool, self.require_float, self.require_whole = local.in_pool, local.require_float, lambda: None
        self.layout: RowLayout = config.layout(local.layout.page_bytes)
        self._rank = rank
        self.take(sharding)

    def take(self, sharding: Sharding) -> None:
        """Be sharded so."""
        self.sharding = sharding
        self.shards = sharding.shards(self.config.num_rows, self.config.embedding_dim)
        own = next((shard for shard in self.shards if shard.rank == self._rank), Shard(self._rank, 0, 0, 0, 0))
        self.rows = range(own.first_row, own.first_row + own.num_rows)
        self.columns = range(own.first_column, own.first_column + own.num_columns)
        self.local.rows = self.rows or range(1)  # nobody asks for that row: a store has no table without rows

    @property
    def pool(self) -> Pool:
        return self.local.pool

    @property
    def learning_rate(self) -> float:
        """The optimizer's rate in force; the same is to be set on all ranks."""
        return self.local.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.local.learning_rate = rate

    @property
    def num_parts(self) -> int:
        """Ranges of columns that its rows are divided into."""
        return self.config.embedding_dim // self.local.config.embedding_dim

    def id_error(self, row: int) -> ValueError:
        return id_error(self.name, row, range(self.config.num_embeddings))

    def __repr__(self) -> str:
        config = self.config
        return (
            f"<ShardedTable {config.name!r} {config.num_embeddings} x {config.embedding_dim} {config.dtype}, "
            f"{self.sharding.sharding_type} over ranks {list(self.sharding.ranks)}>"
        )


def local_config(config: TableConfig, sharding: Sharding, rank: int) -> TableConfig:
    """Of the table that a rank's store has: all rows in number, and the columns of its part.
    ValueError, TableError: the table cannot be sharded so."""
    shards = sharding.shards(config.num_embeddings, config.embedding_dim)
    if sharding.exchange == "pooled" and config.pooling == "max":
        raise ValueError(f'table {config.name!r} has pooling="max", which owners cannot pool; use exchange="rows"')
    if config.ids is not None:
        if sharding.sharding_type == "data_parallel" or sharding.parts > 1:
            raise ValueError(
                f"table {config.name!r} has dynamic ids, which have one owner each: {sharding.sharding_type} does not "
                "serve it; shard it by rows, or table_wise"
            )
        place = sharding.ranks.index(rank) if rank in sharding.ranks else len(sharding.ranks)
        return _of_owners(config, len(sharding.ranks), (place, min(place + 1, len(sharding.ranks))))
    if sharding.parts == 1:
        return config
    kind = sharding.sharding_type
    if config.rounding == "stochastic":
        raise ValueError(f'table {config.name!r}: rounding="stochastic" does not serve {kind}; shard it by rows')
    own = next((shard for shard in shards if shard.rank == rank), shards[0])
    rule, first_values = config.optimizer, config.init.from_column(own.first_column)
    if type(rule) is RowWiseAdagrad:
        if sharding.exchange == "pooled":
            raise ValueError(
                f'table {config.name!r}: exchange="pooled" does not serve {kind} with row-wise Adagrad: then no '
                'rank has the gradient of a whole row; use exchange="rows"'
            )
        rule = RowWiseAdagradOfColumns(**asdict(rule))
    return replace(config, embedding_dim=own.num_columns, optimizer=rule, init=first_values)


def whole_config(local: TableConfig, sharding: Sharding) -> TableConfig:
    """Inverse of ``local_config``; of dynamic ids it has those of all owners."""
    if local.ids is not None:
        return _of_owners(local, len(sharding.ranks), (0, len(sharding.ranks)))
    if sharding.parts == 1:
        return local
    rule = local.optimizer
    if isinstance(rule, RowWiseAdagradOfColumns):
        rule = RowWiseAdagrad(**asdict(rule))
    dim = local.embedding_dim * sharding.parts
    return replace(local, embedding_dim=dim, optimizer=rule, init=local.init.from_column(0))


def _of_owners(config: TableConfig, owners: int, owned: tuple[int, int]) -> TableConfig:
    assert config.ids is not None
    return replace(config, ids=replace(config.ids, owners=owners, owned=owned))
