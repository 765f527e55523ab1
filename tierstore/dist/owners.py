"""Which ranks own what: sharded tables as lookups see them, the owners of their rows, and the towers of hosts.

A *tower* is a group of tables on the ranks of one host, so that what leaves a host has passed its tower's module. With
H hosts of L ranks, rank h * L + l is number l of host h. Its peers are the ranks numbered l of all hosts. Results of
the rows of tower h go to the ranks of host h, each of which takes those for its peers' samples; then to the peers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..config import TableConfig
from ..kernels.arrays import Int64s
from ..layout import KEY_ROW_BITS, RowLayout
from ..lookup.base import id_error
from ..optim.configs import RowWiseAdagrad, RowWiseAdagradOfColumns
from ..pool.pool import Pool
from ..store import Table
from .plan import Shard, Sharding
from .ranks import Precision, Ranks, Traffic, leave, ranks_on_host

Ranks16 = NDArray[np.uint16]


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
        self.sharding, self.shards = sharding, sharding.shards(config.num_rows, config.embedding_dim)
        own = next((shard for shard in self.shards if shard.rank == rank), Shard(rank, 0, 0, 0, 0))
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


class Towers:
    """The towers of a store; made by ``open_sharded``.

    Attributes:
        tables: names of each host's tables. hosts, on_host: how many there are, and ranks of each.
        host, peers: the ranks of this one's host, and those of its number on all hosts.
        order: all ranks, by their numbers in their hosts.
    """

    def __init__(self, tables: Sequence[Sequence[str]], host: Ranks, peers: Ranks) -> None:
        self.tables = tuple(tuple(names) for names in tables)
        self.host = host
        self.peers = peers
        self.hosts, self.on_host = peers.size, host.size
        self.order = [rank for number in range(host.size) for rank in range(number, host.size * peers.size, host.size)]
        self._tower_of = {name: tower for tower, names in enumerate(self.tables) for name in names}

    @classmethod
    def of(cls, tables: Sequence[Sequence[str]], ranks: Ranks) -> Self:
        """Collective; hosts are told by LOCAL_WORLD_SIZE. ValueError: they have different numbers of ranks, there is
        not one tower for each, the store is of some ranks alone, or a table is in two towers."""
        counts = ranks.gather(ranks_on_host(ranks.size), "open_sharded")
        with ranks.together():
            sizes = sorted(set(counts))
            if len(sizes) > 1 or ranks.size % sizes[0]:
                raise ValueError(
                    f"towers need equally many ranks on each host; LOCAL_WORLD_SIZE of the {ranks.size} ranks is "
                    f"{', '.join(map(str, sizes))}"
                )
            hosts, on_host = ranks.size // sizes[0], sizes[0]
            if any(isinstance(names, str) for names in tables) or len(tables) != hosts:
                raise ValueError(
                    f"towers={list(tables)}: expected the tables of each host, and there are {hosts} hosts"
                )
            if twice := [name for name, count in Counter(chain.from_iterable(tables)).items() if count > 1]:
                raise ValueError(f"towers={list(tables)}: table {twice[0]!r} is in two towers; leave one out")
            if ranks.size != dist.get_world_size():
                raise ValueError("towers= are on the hosts of all ranks: leave group= out")
        own, number = divmod(ranks.rank, on_host)
        of_host = range(own * on_host, (own + 1) * on_host)
        of_number = range(number, ranks.size, on_host)
        members = range(ranks.size)
        groups = [
            dist.new_group(list(members[first : first + on_host]), backend="gloo") for first in members[::on_host]
        ]
        across = [dist.new_group(list(members[each::on_host]), backend="gloo") for each in range(on_host)]
        return cls(tables, Ranks(groups[own], of_host), Ranks(across[number], of_number))

    @property
    def own(self) -> int:
        """The number of this rank's host, and of its tower."""
        return self.peers.rank

    def ranks_of(self, name: str) -> range | None:
        """Of the host of a table; None if it is in no tower."""
        tower = self._tower_of.get(name)
        return None if tower is None else range(tower * self.on_host, (tower + 1) * self.on_host)

    def tower_of(self, name: str) -> int:
        """ValueError if the table is in none."""
        if name not in self._tower_of:
            raise ValueError(f"table {name!r} is in no tower of {list(map(list, self.tables))}: add it to one")
        return self._tower_of[name]

    def require_within(self, shardings: Iterable[tuple[str, Sharding]]) -> None:
        """ValueError if a table is on ranks of another host than its tower's."""
        for name, sharding in shardings:
            ranks = self.ranks_of(name)
            if ranks is not None and not set(sharding.ranks) <= set(ranks):
                raise ValueError(
                    f"table {name!r} is {sharding.sharding_type} over ranks {list(sharding.ranks)}, but its tower's "
                    f"host has ranks {list(ranks)}: shard it over these, or leave it out of towers="
                )

    def planned(self, given: Mapping[str, Sharding]) -> dict[str, Sharding]:
        """How tables are to be sharded: as given, and others of towers by rows over their hosts; errors as of
        ``require_within``."""
        self.require_within(given.items())
        names = chain.from_iterable(self.tables)
        return {name: Sharding("row_wise", tuple(self.ranks_of(name) or ()), "pooled") for name in names} | dict(given)

    def within_host(self, ranks: Ranks, values: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """``Ranks.exchange`` with the ranks of this host alone, by the group of all, which another thread may have a
        twin of."""
        own, around = self.own * self.on_host, (self.hosts - self.own - 1) * self.on_host
        sent, got = ([*([0] * own), *counts, *([0] * around)] for counts in (given, taken))
        return ranks.exchange(values, sent, got)

    def close(self) -> None:
        """Leave the groups that were made here."""
        for ranks in (self.host, self.peers):
            leave(ranks.group)


class Wire(NamedTuple):
    """How values cross: rows or pooled rows in forward, gradients in backward."""

    forward: Precision
    backward: Precision


class Owners:
    """Owners of the rows of a store's tables, by key."""

    def __init__(self, ranks: Ranks, wire: Wire, towers: Towers | None = None) -> None:
        self.ranks = ranks
        self.wire = wire
        self.towers = towers
        self._by_part: list[tuple[Int64s, Ranks16]] = []  # keys of shards' first rows, ascending, and their ranks

    @property
    def traffic(self) -> Traffic:
        """Of the ranks' exchanges, those within hosts and between peers included."""
        groups = [self.ranks] if self.towers is None else [self.ranks, self.towers.host, self.towers.peers]
        return Traffic(*map(sum, zip(*(group.traffic for group in groups), strict=True)))

    def close(self) -> None:
        """Leave the groups that were made for the store."""
        if self.towers is not None:
            self.towers.close()
        self.ranks.close()

    def set(self, tables: Iterable[ShardedTable]) -> None:
        """All tables. Of those that all ranks have whole, each rank owns every row."""
        parts: dict[int, list[tuple[int, int]]] = {}
        for table in tables:
            width = table.local.config.embedding_dim
            for shard in table.shards:
                if table.sharding.sharding_type != "data_parallel":
                    first = (table.index << KEY_ROW_BITS) | shard.first_row
                    parts.setdefault(shard.first_column // width, []).append((first, shard.rank))
        pairs = [np.array(sorted(parts[part]), np.int64) for part in sorted(parts)]
        self._by_part = [(each[:, 0].copy(), each[:, 1].astype(np.uint16)) for each in pairs]

    def of(self, keys: Int64s, num_parts: int) -> Ranks16:
        """uint16 [n, num_parts]: the rank of each range of columns of each key's row."""
        found = np.empty((len(keys), num_parts), np.uint16)
        for part, (firsts, ranks) in enumerate(self._by_part[:num_parts]):
            found[:, part] = ranks[np.searchsorted(firsts, keys, side="right") - 1]
        return found
