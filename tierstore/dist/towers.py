"""Towers: groups of tables, each on the ranks of one host, so that what leaves a host has passed its tower's module.

With H hosts of L ranks, rank h * L + l is number l of host h. Its peers are the ranks numbered l of all hosts. Results
of the rows of tower h go to the ranks of host h, each of which takes those for its peers' samples; then to the peers.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Self

import torch.distributed as dist
from torch import Tensor

from .plan import Sharding
from .ranks import Ranks, leave, ranks_on_host


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
