"""Modules over towers: results of a tower's tables pass its module on its host, and only what that gives leaves it."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..nn.function import Prepared
from ..nn.jagged import JaggedLike, KeyedTensor
from .lookup import ShardedLookup
from .modules import ShardedTieredEmbeddingBagCollection, average
from .owners import Owners, ShardedTable, Towers
from .pooled import BagsRoute, PooledLookup, PooledPlace, piece_sizes
from .ranks import Precision, Ranks, decoded, encoded
from .store import ShardedStore


class TowerBags(PooledLookup):
    """A pooled lookup whose output, float32 [samples of the peers, columns of this tower], is for a tower's module.

    Owners send sums of bags to the ranks of their host, each those for its peers' samples, and that rank adds them up.
    Gradients go back alike, and owners get them in order of the requesters. The features' columns are those of their
    towers' outputs.
    """

    @property
    def _towers(self) -> Towers:
        towers = self._owners.towers
        assert towers is not None
        return towers

    @property
    def num_samples(self) -> int:
        return sum(samples.stop - samples.start for samples in self._samples)

    @cached_property
    def _samples(self) -> list[slice]:
        """Of each peer, in the output."""
        ends = itertools.accumulate((request.sizes.shape[1] for request in self._route.requests[self._own]), initial=0)
        return [slice(*each) for each in itertools.pairwise(ends)]

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
        wanted = np.array(route.given)[towers.order].reshape(-1, towers.hosts).sum(1).tolist()
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
            if place.columns.start == self.joined.columns[place.feature]:  # of all ranges of columns, once
                of_bags = found.setdefault(place.feature, torch.zeros(self.num_samples))
                of_bags[samples] += sizes
        return {feature: sizes.clamp_(min=1)[:, None].to(self._device) for feature, sizes in found.items()}

    def _crossed(self, rows: Tensor, given: Sequence[int], taken: Sequence[int], _precision: Precision) -> Tensor:
        return self._ranks.exchange(rows, given, taken, self._towers.host)


class TowerTieredEmbeddingBagCollection(ShardedTieredEmbeddingBagCollection):
    """``ShardedTieredEmbeddingBagCollection`` over tables of towers; see "Towers" in docs/distributed.md. Collective.

    All features of host h's tables, for the samples of its ranks' peers on all hosts, pass module h on that host. Rows
    and weights train on the mean of all ranks' losses. Every rank has the modules of all towers, with rank 0's first
    weights, and trains the one of its host; the others are those of the last ``checkpoint.save``, which gathers them.

    Args:
        store: opened with ``towers=``.
        modules: of each tower: takes float32 [n, columns of its features], in order of the tables, and gives float32
            [n, ``out_features``], an attribute. None: results are those of ``exchange="pooled"``, bit for bit.

    Attributes:
        towers: the modules. widths, out_features: columns that each gives, and their sum.

    Raises:
        ValueError: the store has no towers, a table is in none or has ``exchange="rows"``, a tower has no table, or
            there is not one module for each. TypeError: a module has no ``out_features``. Others: as of the base.
    """

    def __init__(
        self,
        store: ShardedStore,
        modules: Sequence[nn.Module] | None = None,
        *,
        tables: Sequence[str] | None = None,
        is_weighted: bool = True,
    ) -> None:
        towers = store.owners.towers
        if towers is None:
            raise ValueError("the store has no towers: open it by open_sharded(..., towers=[tables of host 0, ...])")
        super().__init__(store, tables=tables, is_weighted=is_weighted)
        for table in self.tables:
            if table.config.counts_unseen:
                raise ValueError(
                    f'table {table.name!r} has DynamicIds(unseen="init"), and towers pool only rows: take "zeros", or '
                    "ShardedTieredEmbeddingBagCollection"
                )
            if store[table.name].sharding.exchange != "pooled":
                raise ValueError(f'table {table.name!r} has exchange="rows": towers pool where rows are; use "pooled"')
        if empty := [tower for tower, width in enumerate(self._columns_of_towers) if not width]:
            raise ValueError(f"tower {empty[0]} has none of the tables {[table.name for table in self.tables]}")
        self.widths = list(self._columns_of_towers)
        if modules is not None:
            if len(modules) != towers.hosts:
                raise ValueError(f"{len(modules)} modules are given for {towers.hosts} towers: give each its own")
            found: list[Any] = [getattr(module, "out_features", None) for module in modules]
            for module, width in zip(modules, found, strict=True):
                if not isinstance(width, int):
                    raise TypeError(f"{type(module).__name__} has no out_features, the number of columns that it gives")
            self.widths = found
            first = store.ranks.first([each.state_dict() for each in modules])
            for module, weights in zip(modules, first, strict=True):
                module.load_state_dict(weights)
        self.out_features = sum(self.widths)
        self.towers = None if modules is None else nn.ModuleList(modules)

    def forward(self, features: JaggedLike) -> KeyedTensor:
        """What the towers give for this rank's samples. Collective.

        Args:
            features: as for the base; batches may be of any sizes, or empty.

        Returns:
            KeyedTensor of float32 [B, out_features], with a key for each tower, "tower0", ...; without modules as the
            base. Errors: as the base; ValueError: a module gives another shape.
        """
        pooled = self._run((features,), self._sources(features))
        batch = (len(features.offsets()) - 1) // max(len(list(features.keys())), 1)
        towers = self._towers
        with towers.peers.telling():
            given = self._compressed(pooled)
            if torch.is_grad_enabled() and not given.requires_grad and any(p.requires_grad for p in self.parameters()):
                given = given.detach().requires_grad_()  # another tower has gradients, so all exchange them
        out = _ToPeers.apply(given, self._owners, self.widths, batch)  # type: ignore[no-untyped-call]
        if self.towers is None:
            return KeyedTensor(self.feature_names, self._dims, out if self._order is None else out[:, self._order])
        return KeyedTensor([f"tower{number}" for number in range(towers.hosts)], self.widths, out)

    def own_tensors(self) -> dict[str, Tensor]:
        """``rows``, and the modules' parameters, which hosts average, and buffers, which are each rank's own."""
        return dict(itertools.chain(self.named_parameters(), self.named_buffers()))

    def gather(self, optimizers: Sequence[Any]) -> None:
        """Fetch other towers' weights, and their state in these optimizers, from the hosts. Collective."""
        if self.towers is None:
            return
        peers = self._towers.peers
        with peers.telling():
            own = self.towers[peers.rank]
            given = [getattr(each, "state", {}) for each in optimizers]
            state = [[dict(each.get(parameter, {})) for parameter in own.parameters()] for each in given]
        for module, (weights, states) in zip(
            self.towers, peers.gather((own.state_dict(), state), "weights of towers"), strict=True
        ):
            if module is own:
                continue
            module.load_state_dict(weights)
            for optimizer, of_parameters in zip(optimizers, states, strict=True):
                for parameter, each in zip(module.parameters(), of_parameters, strict=True):
                    if each:
                        optimizer.state[parameter] = each

    @property
    def _towers(self) -> Towers:
        towers = self._owners.towers
        assert towers is not None
        return towers

    def _kind_of(self, table: ShardedTable) -> type[ShardedLookup]:  # noqa: ARG002
        return TowerBags

    def _compressed(self, pooled: Tensor) -> Tensor:
        if self.towers is None:
            return pooled
        own = self._towers.own
        module = self.towers[own]
        weights = {name: each for name, each in module.named_parameters() if each.requires_grad}
        if weights and torch.is_grad_enabled():
            shared = _OfHost.apply(self._owners, *weights.values())  # type: ignore[no-untyped-call]
            found: Tensor = torch.func.functional_call(module, dict(zip(weights, shared, strict=True)), (pooled,))
        else:
            found = module(pooled)
        found = found.float()  # autocast may make it another type, and not on all hosts
        if found.shape != (len(pooled), self.widths[own]):
            expected = f"[{len(pooled)}, {self.widths[own]}], by its out_features"
            raise ValueError(f"tower {own} gives {list(found.shape)}, and is to give {expected}")
        return found

    def _group_features(self) -> Any:
        """As the base, with the columns that features have in their tower's output."""
        towers = self._towers
        ends, order = [0] * towers.hosts, []
        for name, feature in self._features.items():
            tower = towers.tower_of(feature.table.name)
            order.append((tower, feature.column, feature.table.layout.dim))
            self._features[name] = feature._replace(column=ends[tower])
            ends[tower] += feature.table.layout.dim
        self._columns_of_towers = ends
        columns = [column for _, first, dim in sorted(order) for column in range(first, first + dim)]
        inverse = torch.tensor(columns, dtype=torch.int64).argsort()
        self._order = None if columns == sorted(columns) else inverse
        return super()._group_features()

    def prepare_by(self, ranks: Ranks, *arguments: Any) -> Prepared:
        made, features = super().prepare_by(ranks, *arguments), arguments[0]
        columns = self._columns_of_towers[self._towers.own]
        return _OfPeers(made.lookups, (made.shape[0], columns), made.scale, self._sources(features), made.store)


class _OfPeers(Prepared):
    """Its output has the samples of this rank's peers, as many as the exchange of ids says."""

    _found: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self._found is None:
            batch, columns = self._own
            first: Any = self.lookups[0]
            if isinstance(first, TowerBags):
                samples = first.num_samples
            else:  # of dynamic ids, which are looked for again
                peers = self.store.owners.towers.peers
                samples = sum(peers.counts([batch] * peers.size, "samples of a batch"))
            self._found = samples, columns
        return self._found

    @shape.setter
    def shape(self, own: tuple[int, ...]) -> None:
        self._own = own


class _OfHost(torch.autograd.Function):
    """Weights of a tower's module; backward averages their gradients as of all ranks' samples, which the ranks of the
    host have among them."""

    @staticmethod
    def forward(ctx: Any, owners: Owners, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.owners = owners
        return tuple(each.view_as(each) for each in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        towers = ctx.owners.towers
        means = [each / towers.hosts for each in gradients]
        average(means, ctx.owners.ranks, towers.host)  # in the call that ``_ToPeers`` began
        return None, *means


class _ToPeers(torch.autograd.Function):
    """float32 [B, columns of all towers] of this rank's B samples, of [samples of the peers, columns] of this tower.
    ``widths``: columns that each tower gives."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, owners: Owners, widths: Sequence[int], batch: int) -> Tensor:
        peers, precision = owners.towers.peers, owners.wire.forward  # type: ignore[union-attr]
        ctx.owners, ctx.widths = owners, list(widths)
        ctx.samples = peers.counts([batch] * peers.size, "results of towers", then=1)
        sizes = [_width(each, precision) for each in widths]
        sent, taken = encoded(given, precision).reshape(-1), [batch * size for size in sizes]
        found = peers.exchange(sent, [count * sizes[peers.rank] for count in ctx.samples], taken)
        parts = zip(torch.split(found, taken), sizes, strict=True)
        return torch.cat([decoded(part.view(batch, size), precision) for part, size in parts], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ranks, peers, precision = ctx.owners.ranks, ctx.owners.towers.peers, ctx.owners.wire.backward
        ranks.counts([0] * ranks.size, "backward of towers", then=1)
        sent = [encoded(each, precision).reshape(-1) for each in torch.split(gradient, ctx.widths, dim=1)]
        size = _width(ctx.widths[peers.rank], precision)
        found = ranks.exchange(
            torch.cat(sent), [each.numel() for each in sent], [count * size for count in ctx.samples], peers
        )
        return decoded(found.view(-1, size), precision), None, None, None


def _width(columns: int, precision: Precision) -> int:
    """Of a row on its way."""
    return encoded(torch.empty(1, columns), precision).shape[1]
