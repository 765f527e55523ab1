"""Lookups over ranks where the owners pool: what crosses is each bag's sum of an owner's rows, and its gradient.

Forward: a rank sends the ids of each bag to the owners of their rows, they pool them in id-list order, and it adds up
the owners' sums in order of the owners. Backward: it divides gradients by the number of ranks and sends each bag's to
its owners, who merge each row's and update the row once, as one process does with one batch of all ranks' samples.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.arrays import Floats, Int64s
from ..lookup.base import AnyLookup
from ..lookup.lookup import make_lookup
from ..pool.joined import NO_FLOATS, Features, Joined
from ..store import Table
from .lookup import RoutedLookup, SendsGradients, Sent
from .owners import ShardedTable
from .ranks import Ranks

_HEADER: Final = 3
"""Numbers before a rank's sizes and keys: its samples, weights and ids."""


class PooledPlace(NamedTuple):
    """A feature whose table a rank has a part of, and the columns of the output where its results go."""

    feature: int
    columns: slice


class _Request(NamedTuple):
    """What one rank asks another for: ids of each bag, int64 [features of the owner, batch]; their keys, feature by
    feature, and weights, if there are any."""

    sizes: Int64s
    keys: Int64s
    scale: Floats


def _joined(
    tables: Sequence[Table], features: Sequence[Table], requests: Sequence[_Request], width: int, order: Sequence[int]
) -> Joined:
    """The bags that all ranks ask this one for, feature by feature, in it rank by rank, as in one batch of all; results
    of ``width`` columns in a flat output by ranks in this order. ``features``: the tables of this rank's, in order."""
    ends = [np.append(0, request.sizes.sum(1).cumsum()) for request in requests]
    first_bags = itertools.accumulate((requests[rank].sizes.size for rank in order), initial=0)
    bags = dict(zip(order, first_bags, strict=False))
    starts = np.append(0, np.cumsum([len(request.keys) for request in requests]))
    sizes, positions, columns = ([np.empty(0, np.int64)] for _ in range(3))
    table_bags, high, samples = [0], 0, sum(request.sizes.shape[1] for request in requests)
    counts = Counter(features)
    for table in tables:
        low, high = high, high + counts[table]
        for place, (rank, request) in itertools.product(range(low, high), enumerate(requests)):
            batch = request.sizes.shape[1]
            sizes.append(request.sizes[place])
            columns.append(bags[rank] + place * batch + np.arange(batch))
            positions.append(starts[rank] + np.arange(ends[rank][place], ends[rank][place + 1]))
        table_bags.append(table_bags[-1] + (high - low) * samples)
    places = np.concatenate(positions)
    keys, scale = (np.concatenate(parts) for parts in zip(*(request[1:] for request in requests), strict=True))
    return Joined(
        Features(list(tables), table_bags, np.concatenate(columns) * width), 1,
        np.append(0, np.concatenate(sizes).cumsum()), scale[places] if len(scale) else NO_FLOATS, keys=keys[places],
        places=places,
    )  # fmt: skip


class BagsRoute(NamedTuple):
    """The way of a batch's bags: of each rank how many results it gives, and wants; the batch's positions whose rows it
    has, int64 [n]; and what it asks for."""

    asked: list[int]
    given: list[int]
    positions: list[Int64s]
    requests: list[_Request]


class PooledLookup(RoutedLookup):
    @classmethod
    def merged(cls, lookups: Sequence["PooledLookup"], widths: Sequence[int]) -> "_MergedPooled":
        return _MergedPooled(lookups, widths)

    @cached_property
    def own(self) -> AnyLookup:
        tables = self._feature_tables
        features = [tables[place.feature].local for place in self._places[self._ranks.rank]]
        return make_lookup(_joined(self.tables, features, self._route.requests, self._width, self._order), mode="sum")

    @property
    def _order(self) -> Sequence[int]:
        """Of the ranks, by which this one has what they want."""
        return range(self._ranks.size)

    @property
    def _feature_tables(self) -> Sequence[ShardedTable]:
        tables: Any = self.joined.table_of_feature
        found: Sequence[ShardedTable] = tables
        return found

    @cached_property
    def _places(self) -> list[list[PooledPlace]]:
        found: list[list[PooledPlace]] = [[] for _ in range(self._ranks.size)]
        columns = self.joined.columns.tolist()
        for feature, (table, column) in enumerate(zip(self._feature_tables, columns, strict=True)):
            for shard in table.shards:
                first = column + shard.first_column
                found[shard.rank].append(PooledPlace(feature, slice(first, first + shard.num_columns)))
        return found

    def _find_route(self, ranks: Ranks) -> BagsRoute:
        joined, features = self.joined, [[place.feature for place in places] for places in self._places]
        with ranks.telling():
            positions, messages = self._requests_of(features)
            lengths, joint = [len(message) for message in messages], torch.from_numpy(np.concatenate(messages))
            order = np.concatenate(positions)
            scale = torch.from_numpy(joined.scale[order] if len(joined.scale) else NO_FLOATS)
        given = ranks.counts(lengths, f"lookup of {self._names}", then=1)
        taken = torch.split(ranks.exchange(joint, lengths, given), given)
        requests = []
        for message in (each.numpy() for each in taken):
            num_features, batch = len(features[ranks.rank]), int(message[0])
            keys = _HEADER + num_features * batch
            sizes = message[_HEADER:keys].reshape(num_features, batch)
            requests.append(_Request(sizes, message[keys:], NO_FLOATS))
        num_weights, num_ids = torch.stack([message[1:_HEADER] for message in taken]).sum(0).tolist()
        if num_weights not in (0, num_ids):  # so in all ranks
            raise ValueError("some ranks' batches have weights and others' have none; give all some, or none")
        if num_weights:
            ids = [len(request.keys) for request in requests]
            ranks.one_more()
            scales = torch.split(ranks.exchange(scale, [len(chosen) for chosen in positions], ids), ids)
            requests = [one._replace(scale=scale.numpy()) for one, scale in zip(requests, scales, strict=True)]
        asked = [len(own) * joined.batch for own in features]
        return BagsRoute(asked, [request.sizes.size for request in requests], positions, requests)

    def _requests_of(self, features: Sequence[Sequence[int]]) -> tuple[list[Int64s], list[Int64s]]:
        """Of each rank, whose ``features`` are given: the batch's positions whose rows it has, and what to ask it."""
        joined, keys = self.joined, self.joined.keys
        owner = self._owners.of(keys, self._sharded[0].num_parts)
        bag_of = np.repeat(np.arange(len(joined.starts) - 1), np.diff(joined.starts))
        positions = [np.flatnonzero((owner == rank).any(1)) for rank in range(len(features))]
        header = np.array([joined.batch, len(joined.scale), len(keys)], np.int64)
        messages = []
        for own, chosen in zip(features, positions, strict=True):
            sizes = np.bincount(bag_of[chosen], minlength=len(joined.starts) - 1).reshape(len(joined.columns), -1)
            messages.append(np.concatenate([header, sizes[own].ravel(), keys[chosen]]))
        return positions, messages

    @property
    def num_samples(self) -> int:
        """Of the output."""
        return self.joined.batch

    def _pieces(self) -> Iterator[tuple[slice, PooledPlace]]:
        """What owners give, in order: of which samples of the output and where."""
        return ((slice(0, self.joined.batch), place) for place in itertools.chain(*self._places))

    def forward(self, out: Tensor, *, keep: bool) -> None:
        sums, pieces = self._from_owners(self._route.given, self._route.asked, keep=keep), list(self._pieces())
        is_set = set[tuple[int, int]]()
        for (samples, place), bags in zip(pieces, torch.split(sums, piece_sizes(pieces)), strict=True):
            if (samples.stop, place.columns.start) in is_set:
                out[samples, place.columns] += bags
            else:
                out[samples, place.columns] = bags
                is_set.add((samples.stop, place.columns.start))
        if self.mode == "mean":
            dim = self._sharded[0].layout.dim
            for feature, sizes in self._bag_sizes.items():
                column = int(self.joined.columns[feature])
                out[:, column : column + dim] /= sizes

    @cached_property
    def _bag_sizes(self) -> dict[int, Tensor]:
        """Of each feature of the output: float32 [samples, 1] ids of each bag, 1 where there is none."""
        sizes = np.diff(self.joined.starts).reshape(len(self.joined.columns), -1)
        as_floats = torch.from_numpy(np.maximum(sizes, 1).astype(np.float32))[:, :, None]
        return dict(enumerate(as_floats.to(self._device)))

    def scale_gradient(self, grad_out: Tensor, grad_scale: Floats) -> None:
        route, joined = self._route, self.joined
        ids, given = (
            [len(each) for each in found] for found in (route.positions, [one.keys for one in route.requests])
        )
        with self._sending(then=2):
            gradients, there = self._in_order_of_owners(grad_out), torch.zeros(sum(given))
        self.own.scale_gradient(self._sent(gradients), there.numpy())
        own = np.zeros(len(joined), np.float32)
        parts = torch.split(self._ranks.exchange(there, given, ids), ids)
        for chosen, part in zip(route.positions, parts, strict=True):
            own[chosen] += part.numpy()
        joined.scatter(own, grad_scale)

    def sent(self, grad_out: Tensor) -> Sent:
        with self._sending():
            sent = self._in_order_of_owners(grad_out).div_(self._ranks.size)
            if self.mode == "mean":
                sizes = self._bag_sizes
                of_pieces = (sizes[place.feature][samples] for samples, place in self._pieces())
                sent *= 1 / torch.cat([sent.new_empty(0, 1), *of_pieces])
        return Sent(self.own, self._sent(sent))

    def _in_order_of_owners(self, grad_out: Tensor) -> Tensor:
        """float32 [bags, columns of a result]: the gradient of each result that owners gave."""
        none = grad_out.new_empty(0, self._width)  # where there are no pieces
        return torch.cat([none, *(grad_out[samples, place.columns] for samples, place in self._pieces())])

    def _sent(self, gradients: Tensor) -> Tensor:
        return self._to_owners(gradients, self._route.given, self._route.asked).view(1, -1)


class _MergedPooled(SendsGradients):
    """Several lookups: each sends its gradients, and this rank's bags of all are merged."""

    def __init__(self, lookups: Sequence[PooledLookup], widths: Sequence[int]) -> None:
        self.tables = list(dict.fromkeys(table for lookup in lookups for table in lookup.tables))
        self.holds = [hold for lookup in lookups for hold in lookup.holds]
        self._lookups, self._widths, self._ranks, self.mode = lookups, widths, lookups[0]._ranks, lookups[0].mode

    @cached_property
    def joined(self) -> Joined:
        return Joined.merged([lookup.joined for lookup in self._lookups], self._widths)

    def release(self) -> None:
        for lookup in self._lookups:
            lookup.release()

    def sent(self, grad_out: Tensor) -> Sent:
        sizes = [(lookup.num_samples, width) for lookup, width in zip(self._lookups, self._widths, strict=True)]
        parts = torch.split(grad_out.view(-1), [batch * width for batch, width in sizes])
        sent = [each.sent(part.view(size)) for each, part, size in zip(self._lookups, parts, sizes, strict=True)]
        kind: Any = type(sent[0].lookup)
        lookup = kind.merged([each.lookup for each in sent], [each.gradient.shape[1] for each in sent])
        return Sent(lookup, torch.cat([each.gradient for each in sent], dim=1))


def piece_sizes(pieces: Sequence[tuple[slice, PooledPlace]]) -> list[int]:
    return [samples.stop - samples.start for samples, _ in pieces]
