"""Lookups of towers' tables: as those of other tables, but for the way of the values.

Pooled: owners send the sums of bags to the ranks of their host, each those for its peers' samples. That rank adds them
up, as the requester does elsewhere: its output has the peers' samples, host by host, and this tower's features.
Gradients go back alike, and owners get them in order of the requesters.

Rows: each goes to the rank of the owner's host that is the requester's peer, and on to the requester.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from .device import DeviceRowsLookup
from .lookup import RowsLookup, RowsRoute
from .pooled import BagsRoute, PooledLookup, PooledPlace, piece_sizes
from .ranks import Ranks
from .towers import Towers, sums, transposed


class _OfTowers:
    """What both have in common."""

    @property
    def _towers(self) -> Towers:
        towers: Towers = self._owners.towers  # type: ignore[attr-defined]
        return towers


class TowerBags(_OfTowers, PooledLookup):
    """A pooled lookup whose output, float32 [samples of the peers, columns of this tower], is for a tower's module. The
    features' columns are those of their towers' outputs."""

    @property
    def num_samples(self) -> int:
        return sum(samples.stop - samples.start for samples in self._samples)

    @cached_property
    def _samples(self) -> list[slice]:
        """Of each peer, in the output."""
        ends = accumulate((request.sizes.shape[1] for request in self._route.requests[self._own]), initial=0)
        return [slice(*each) for each in pairwise(ends)]

    @property
    def _own(self) -> slice:
        """The peers, among all ranks."""
        return slice(self._towers.host.rank, None, self._towers.on_host)

    @property
    def _order(self) -> Sequence[int]:
        return self._towers.order

    @property
    def _of_host(self) -> list[list[PooledPlace]]:
        first = self._towers.own * self._towers.on_host
        return self._places[first : first + self._towers.on_host]

    def _pieces(self) -> Iterator[tuple[slice, PooledPlace]]:
        return ((samples, place) for places in self._of_host for samples in self._samples for place in places)

    def _find_route(self, ranks: Ranks) -> BagsRoute:
        route, towers = super()._find_route(ranks), self._towers
        samples = sum(request.sizes.shape[1] for request in route.requests[self._own])
        wanted = sums([route.given[rank] for rank in towers.order], towers.hosts)
        route = route._replace(given=wanted, asked=[len(places) * samples for places in self._of_host])
        if self.mode == "mean":
            own = torch.from_numpy(np.concatenate([route.requests[rank].sizes.ravel() for rank in towers.order]))
            ranks.one_more()
            self._sizes = towers.within_host(ranks, own, wanted, route.asked)
        return route

    @cached_property
    def _bag_sizes(self) -> dict[int, Tensor]:
        pieces = list(self._pieces())
        found: dict[int, Tensor] = {}
        for (samples, place), sizes in zip(pieces, torch.split(self._sizes, piece_sizes(pieces)), strict=True):
            if place.columns.start == self.joined.bags.columns[place.feature]:  # of all ranges of columns, once
                of_bags = found.setdefault(place.feature, torch.zeros(self.num_samples))
                of_bags[samples] += sizes
        return {feature: sizes.clamp_(min=1)[:, None].to(self._device) for feature, sizes in found.items()}

    def _carried(self, rows: Tensor, given: Sequence[int], asked: Sequence[int]) -> Tensor:
        return self._ranks.exchange(rows, given, asked, self._towers.host)

    def _to_owners(self, gradients: Tensor, given: Sequence[int], asked: Sequence[int]) -> Tensor:
        return self._ranks.exchange(gradients, asked, given, self._towers.host)


class TowerRows(_OfTowers, RowsLookup):
    """A lookup of rows that leave their owners' host by the requester's peer there."""

    def _find_route(self, ranks: Ranks) -> RowsRoute:
        route, towers = super()._find_route(ranks), self._towers
        counts = torch.tensor([route.given[rank] for rank in towers.order])
        ranks.one_more()
        each = [towers.hosts] * towers.on_host
        self._passing: list[int] = towers.within_host(ranks, counts, each, each).tolist()  # by owner, then peer
        return route

    def _carried(self, rows: Tensor, given: Sequence[int], asked: Sequence[int]) -> Tensor:
        towers, ranks = self._towers, self._ranks
        ranks.one_more()
        sent, counts = transposed(rows, given, towers.on_host)
        passing = ranks.exchange(sent, sums(counts, towers.hosts), sums(self._passing, towers.hosts), towers.host)
        sent, counts = transposed(passing, self._passing, towers.hosts)
        given, asked = sums(counts, towers.on_host), sums(asked, towers.on_host)
        return ranks.exchange_rows(sent, given, asked, self._owners.wire.forward, towers.peers)

    def _to_owners(self, gradients: Tensor, given: Sequence[int], asked: Sequence[int]) -> Tensor:
        towers, ranks = self._towers, self._ranks
        ranks.one_more()
        counts = [n for peer in range(towers.hosts) for n in self._passing[peer :: towers.hosts]]
        of_peers, of_owners = sums(counts, towers.on_host), sums(self._passing, towers.hosts)
        wire = self._owners.wire.backward
        passing = ranks.exchange_rows(gradients, sums(asked, towers.on_host), of_peers, wire, towers.peers)
        back = transposed(passing, counts, towers.on_host)[0]
        counts = [given[rank] for rank in towers.order]
        taken = ranks.exchange(back, of_owners, sums(counts, towers.hosts), towers.host)
        return transposed(taken, counts, towers.hosts)[0]


class DeviceTowerRows(TowerRows, DeviceRowsLookup):
    """Of tables whose rows are on a device."""
