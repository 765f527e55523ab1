"""A model sharded as it stands: modules over a sharded store in the place of its own, each row loaded by its owners."""

import contextlib
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import TableConfig
from ..errors import TableError
from ..exchange.rows import RowValues, chunks, write_rows
from ..init import Initializer, Normal, Uniform
from ..nn.collection import Collection, TieredEmbeddingBagCollection, TieredEmbeddingCollection
from ..nn.convert import Embedding, Rule, Rules, hung_on, rules_of, weights_of
from ..nn.embedding import TieredEmbedding, TieredEmbeddingBag
from ..nn.module import Placeholder, TieredModule, plain_names, take_place
from ..pool.converting import raw_weights
from ..store import Store, Table
from ..store.version import TableState
from ..trace import Trace
from .modules import (
    ShardedModule,
    ShardedTieredEmbedding,
    ShardedTieredEmbeddingBag,
    ShardedTieredEmbeddingBagCollection,
    ShardedTieredEmbeddingCollection,
    data_parallel,
)
from .opening import require_alike
from .owners import ShardedTable, local_config
from .parts import of_columns, open_parts
from .plan import Plan, Sharding
from .ranks import Ranks
from .reshard import copied
from .store import ShardedStore, planned_tables

if TYPE_CHECKING:
    from .placement import Demand, RankCosts

_LOG: Final = logging.getLogger("tierstore")
_SECONDS: Final = 10.0
"""Of measured steps."""
_SAMPLES: Final = 1024
"""Of a rank's batch, where nothing is known of batches."""
PathLike = str | os.PathLike[str]
_TIERED: Final = (TieredEmbeddingBag, TieredEmbedding, TieredEmbeddingBagCollection, TieredEmbeddingCollection)
_TORCHREC: Final = {"EmbeddingBagCollection": "embedding_bags", "EmbeddingCollection": "embeddings"}
"""TorchRec's collections by class, and where each has a module for each table. TorchRec itself need not be there."""


class _Rows(NamedTuple):
    """What a table begins with: how many rows, what reads a range of them, what all rows share, and their checksum."""

    stop: int
    read: Callable[[int, int], RowValues]
    state: TableState | None
    checksum: int


class _Found(NamedTuple):
    """A table of the model: the module's path, and its rows, None for first values."""

    config: TableConfig
    path: str
    rows: _Rows | Table | None


def shard(
    model: nn.Module,
    store: ShardedStore,
    plan: Plan | PathLike | Literal["auto"] | None = "auto",
    *,
    tables: Mapping[str, str] | None = None,
    optimizer: Rules | None = None,
    init: Initializer | None = None,
    source: PathLike | Store | None = None,
    demand: Trace | None = None,
    costs: "RankCosts | PathLike | None" = None,
    rank_bytes: float = float("inf"),
    **options: Any,
) -> nn.Module:
    """Shard a model as it stands over a store's ranks, and make the rest data-parallel; collective.

    Replaced are modules over a plain store, TorchRec's ``EmbeddingBagCollection`` and ``EmbeddingCollection``,
    ``nn.EmbeddingBag`` and ``nn.Embedding``. Those that share a weight or a table still do. Bits are those of sharded
    modules written by hand. A rank reads only rows that it owns, 8 MiB at a time. Tables that the store has stay. New
    ones get the rows of ``source``; else the model's, with optimizer state; on "meta", first values.

    Args:
        model: changed in place; alike on all ranks. Modules that stay are not on "meta", and get rank 0's weights.
        plan: of new tables: a plan, its file, or "auto": one is found for those that the store's own lacks. None, or
            where it lacks a table: as the store's own, else "row_wise".
        tables: the table's name of torch's modules by path; others stay. Default: all, named by their path.
        optimizer: of tables made of torch's and TorchRec's modules, see ``convert``; a dict is by table name.
            Default: what ``apply_optimizer_in_backward`` gave a weight, else ``SGD()``.
        init: where weights are on "meta". Default: normal with std 1, or as TorchRec's configs say.
        source: a store or its folder, sharded or not, with tables of these names.
        demand: of "auto": of all ranks' batches. Default: 1,024 samples a rank, an id a feature, all rows alike.
        costs: of "auto": of these ranks, or their file. Default: measured now, in up to a minute.
        rank_bytes: of "auto": limit of a rank's rows with optimizer state.

    Returns:
        ``DistributedDataParallel(model, **options)``, or the model if it has no other parameters that are trained.

    Raises:
        ValueError, TypeError: modules that cannot be replaced, each with its reason; a wrong argument. TableError:
            ranks' models differ, or the source has another table. OSError: no file. RankError: another rank failed. The
            model was not changed; tables may have been made, but not committed.
    """
    if not isinstance(store, ShardedStore):
        raise TypeError(f"store must be a ShardedStore, as open_sharded gives, not {type(store).__name__}")
    with contextlib.ExitStack() as opened:
        with store.ranks.together("shard"):
            found, known = _Model(model, store, tables, optimizer, init), store.tables.keys() - store.unloaded
            new = {name: each for name, each in found.tables.items() if name not in known}
            rows = _rows_of(source if new else None, new, opened)
            planned: Mapping[str, Sharding] = {} if plan == "auto" else planned_tables(plan, store.ranks)
        require_alike(store.ranks, weights={name: own.checksum for name, own in rows.items() if isinstance(own, _Rows)})
        if plan == "auto" and (unplanned := [each.config for name, each in new.items() if name not in store.planned]):
            planned = _found_plan(store, unplanned, demand, costs, rank_bytes)
        for name, table in found.tables.items():
            made_so = {} if name in store.tables or name not in planned else planned[name]._asdict()
            store.create_table(table.config, **made_so)
        store.unloaded |= new.keys()  # until they have their rows, another call makes them again
        with store.ranks.together("shard"):
            for name, own in rows.items():
                _load(own, store[name], store.ranks.rank)
            made = [(module, make(store)) for module, make in found.made.values()]
    store.unloaded -= new.keys()
    for pair in made:
        take_place(*pair)
    for name, trained in found.trained.items():
        trained.hand_over(store[name].local)
    is_trained = any(each.requires_grad for each in model.parameters() if not isinstance(each, Placeholder))
    return data_parallel(model, **options) if is_trained else model


class _Model:
    """What a model has of modules to be replaced; arguments, and ValueError: see ``shard``. ``made`` has them by
    ``id``, with what makes a module over the store in place of each; ``trained`` is by table."""

    def __init__(
        self,
        model: nn.Module,
        store: ShardedStore,
        tables: Mapping[str, str] | None,
        rules: Any,
        init: Initializer | None,
    ) -> None:
        self.tables: dict[str, _Found] = {}
        self.made: dict[int, tuple[nn.Module, Callable[[ShardedStore], nn.Module]]] = {}
        self.trained: dict[str, Rule] = {}
        self._store, self._rules, self._init, self._refused = store, rules, init, dict[str, str]()
        torchs, inner, plain = dict[str, Embedding](), set[int](), plain_names(model)
        for given, module in model.named_modules(remove_duplicate=False):
            path = plain[given]
            if isinstance(module, ShardedModule) or id(module) in self.made or id(module) in inner:
                continue
            if isinstance(module, TieredModule):
                self._add_tiered(path, module)
            elif hasattr(module, _TORCHREC.get(type(module).__name__, "")):
                inner |= {id(each) for each in module.modules()}
                self._add_torchrec(path, module, _TORCHREC[type(module).__name__])
            elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
                torchs[path] = module
        tables = None if tables is None else {plain.get(path, path): name for path, name in tables.items()}
        if unknown := [path for path in tables or () if path not in torchs]:
            raise ValueError(f"tables: {unknown[0]!r} is no nn.Embedding or nn.EmbeddingBag, as are {list(torchs)}")
        names = {id(torchs[path].weight): name for path, name in (tables or {}).items()}
        chosen = [each for each in torchs.items() if tables is None or id(each[1].weight) in names]
        weights, refused = weights_of(model, chosen)
        self._refused |= refused
        for each in weights:
            (rows, dim), name = each.weight.shape, names.get(id(each.weight), each.name)
            for module in each.modules:
                self._put(each.name, module, [name], is_trained=each.weight.requires_grad)
            shape: Any = {"num_embeddings": rows, "embedding_dim": dim, "pooling": each.mode}
            config = TableConfig(name=name, init=self._init or Normal(std=1.0), **shape)
            self._add_weight(each.name, each.weight, config)
        gone = {id(each) for module in model.modules() if id(module) in self.made for each in module.parameters()}
        for name, weight in model.named_parameters():
            if weight.is_meta and id(weight) not in gone:
                self._refused[name] = 'is on "meta": to_empty(device="cpu") of its module, and initialize it, before'
        if self._refused:
            why = "".join(f"\n  {path or 'embedding'!r}: {reason}" for path, reason in self._refused.items())
            raise ValueError(f"nothing was sharded. Change these modules, or leave them out by tables={{...}}:{why}")

    def _add(self, found: _Found) -> None:
        known = self.tables.setdefault(found.config.name, found)
        if known.config != found.config or known.rows is not found.rows:
            self._refused[found.path] = f"table {found.config.name!r} is another one of {known.path!r}: rename one"

    def _put(self, path: str, module: Any, names: Sequence[str], *, is_trained: bool = True) -> None:
        """A module over the tables in the place of one of ours, torch's or TorchRec's."""
        kind: Any = ShardedTieredEmbedding
        options: dict[str, Any] = {"table": next(iter(names), None)}
        if hasattr(module, "embedding_bag_configs"):
            kind, options = ShardedTieredEmbeddingBagCollection, {"tables": names, "is_weighted": module.is_weighted()}
        elif hasattr(module, "embedding_configs"):
            kind, options = ShardedTieredEmbeddingCollection, {"tables": names}
        elif hasattr(module, "include_last_offset"):
            kind = ShardedTieredEmbeddingBag
            options |= {"include_last_offset": module.include_last_offset, "padding_idx": module.padding_idx}
        elif module.padding_idx is not None:
            self._refused[path] = (
                "padding_idx is not supported over ranks for single rows: leave it out, and multiply the result by "
                "(ids != padding_idx), or take an EmbeddingBag with one id a bag"
            )

        def made(store: ShardedStore) -> nn.Module:
            found: nn.Module = kind(store, **options)
            return found.requires_grad_(is_trained and not store.readonly).train(module.training)

        self.made[id(module)] = module, made

    def _add_tiered(self, path: str, module: Any) -> None:
        if type(module) not in _TIERED:
            self._refused[path] = f"is a {type(module).__name__}, which may compute something else than its base"
            return
        if reason := hung_on(module):
            self._refused[path] = reason
        tables = module.tables if isinstance(module, Collection) else [module.table]
        is_trained = module.rows.requires_grad or module._store.readonly
        self._put(path, module, [table.name for table in tables], is_trained=is_trained)
        for table in tables:
            config = table.config
            if table.ids is None:  # first values of dynamic ids do not go by the place in a store
                config = replace(config, init=config.init.of_place(table.index))
            self._add(_Found(config, path, table if table.store.has_rows_of(table.name) else None))

    def _add_torchrec(self, path: str, module: Any, inner: str) -> None:
        configs = module.embedding_bag_configs() if inner == "embedding_bags" else module.embedding_configs()
        self._put(path, module, [each.name for each in configs])
        for each in configs:
            bag = getattr(module, inner)[each.name]
            weight: Tensor = bag.weight
            if reason := hung_on(module) or hung_on(bag) or hung_on(weight):
                self._refused[path] = f"table {each.name!r}: {reason}"
            is_set = self._init or not weight.is_meta or getattr(each.init_fn, "func", None) is nn.init.uniform_
            if getattr(each, "use_virtual_table", False) or not is_set:
                self._refused[path] = (
                    f'table {each.name!r}: use_virtual_table, and an init_fn on "meta", have no counterpart: take a '
                    "table with TableConfig(ids=tierstore.DynamicIds()), and init="
                )
                continue
            dtype: Any = str(weight.dtype).removeprefix("torch.")
            config = TableConfig(
                name=each.name, num_embeddings=each.num_embeddings, embedding_dim=each.embedding_dim, dtype=dtype,
                pooling=each.pooling.name.lower() if hasattr(each, "pooling") else "sum",
                feature_names=tuple(each.feature_names),
                init=self._init or Uniform(each.get_weight_init_min(), each.get_weight_init_max()),
            )  # fmt: skip
            self._add_weight(path, weight, config)

    def _add_weight(self, path: str, weight: Tensor, config: TableConfig) -> None:
        try:
            trained = rules_of(self._rules, config.name, weight)
        except ValueError as error:
            self._refused[path] = str(error)
        else:
            self.trained[config.name] = trained
            known = self._store.tables.get(config.name)
            config = replace(config, optimizer=trained.rule_of(None if known is None else known.config))
            self._add(_Found(config, path, None if weight.is_meta else _rows_of_weight(weight, config, trained)))


def _rows_of_weight(weight: Tensor, config: TableConfig, trained: Rule) -> _Rows:
    def read(start: int, stop: int) -> RowValues:
        rows = weight.detach()[start:stop].cpu().to(getattr(torch, config.dtype)).contiguous()
        own: Any = trained.state_rows(config, start, stop)
        if own is None:  # that of new rows
            shape = stop - start, config.optimizer.state_dim(config.embedding_dim)
            own = np.full(shape, config.optimizer.initial_state, np.float32)
        return RowValues(raw_weights(rows), own)

    state = trained.state
    kept = TableState(int(state["step"]), config.optimizer.lr) if "step" in state else None
    checksum = zlib.crc32(weight.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return _Rows(len(weight), read, kept, checksum)


def _rows_of(
    source: PathLike | Store | None, tables: Mapping[str, _Found], opened: contextlib.ExitStack
) -> Mapping[str, _Rows | Table | None]:
    """Rows of the tables; TableError, ValueError: the source has others, or lacks one."""
    if source is None:
        return {name: each.rows for name, each in tables.items()}
    if not isinstance(source, Store):
        if Path(source).is_file():
            raise ValueError(f"{source} is a file: import it by tierstore import into a store, and give that as source")
        source = opened.enter_context(open_parts(Path(source))).store
    for name, each in tables.items():
        wanted, known = (
            (one.num_embeddings, one.layout(page_bytes=4096), one.optimizer.kind, one.ids is None)
            for one in (each.config, source[name].config)
        )
        if wanted != known:
            told = f"{source.directory} has {source[name].config}, not {each.config}"
            raise TableError(f"{told}: export it, and import that with this config into a store to give as source")
    return {name: source[name] for name in tables}


def _load(rows: _Rows | Table | None, table: ShardedTable, rank: int) -> None:
    """Write this rank's part of a table."""
    if rows is None:
        return
    for own in [each for each in table.shards if each.rank == rank]:
        if isinstance(rows, Table):
            for _ in copied(rows, table.local, own):
                pass
        else:
            for start, stop in chunks(table.local, rows.stop):
                write_rows(table.local, start, *of_columns(rows.read(start, stop), table.config, own))
    if rows.state is not None:
        table.local.restore(rows.state)


def _found_plan(
    store: ShardedStore, tables: Sequence[TableConfig], demand: Trace | None, costs: Any, rank_bytes: float
) -> dict[str, Sharding]:
    """The sharding of each table without dynamic ids, found by one rank for all; collective. Arguments and errors as of
    ``shard``. Tables of one optimizer are planned together, as costs are of one."""
    # Training without it has no use for these.
    from .placement import RankCosts, Search, demand_of
    from .placement.measure import measure_ranks

    ranks, counted, found = store.ranks, [table for table in tables if table.ids is None], dict[str, Sharding]()
    with ranks.telling():
        if not isinstance(demand, Trace | None):
            raise TypeError(f"demand must be a Trace, as Store.record writes one, not {type(demand).__name__}")
    asked = _evenly(ranks, counted) if demand is None else demand_of(demand, counted, ranks.size)
    kinds: Any = dict.fromkeys(table.optimizer.kind for table in counted)
    for kind in kinds:
        if (known := costs) is None:
            if ranks.size != dist.get_world_size():
                raise ValueError('plan="auto" measures all ranks of torch.distributed: give costs= of the store\'s')
            if ranks.rank == 0:
                _LOG.warning("measuring for up to %d s what steps over these ranks cost; costs= has it", _SECONDS)
            known = measure_ranks(optimizer=kind, seconds=_SECONDS)
        with ranks.telling():
            if ranks.rank == 0:
                known = known if isinstance(known, RankCosts) else RankCosts.load(known)
                if known.world_size != ranks.size:
                    raise ValueError(f"the costs are of {known.world_size} ranks, and there are {ranks.size}")
                own = [table for table in counted if table.optimizer.kind == kind]
                best = Search(own, asked, known, rank_bytes=rank_bytes).best()
                found |= {table.name: _possible(store, table, best.plan.tables[table.name]) for table in own}
                rank_bytes -= float(best.size_bytes.max())
    return ranks.gather(found, "shard")[0]


def _possible(store: ShardedStore, table: TableConfig, sharding: Sharding) -> Sharding:
    """It, or by rows where the table cannot be sharded so."""
    try:
        store.local.find_or_require(local_config(table, sharding, store.ranks.rank))
    except (ValueError, TableError):
        return Sharding("row_wise", tuple(range(store.ranks.size)))
    return sharding


def _evenly(ranks: Ranks, tables: Sequence[TableConfig]) -> "Demand":
    """One id a feature, all rows alike."""
    from .placement import Demand, TableDemand

    found = {}
    for table in tables:
        rows, ids = table.num_embeddings, _SAMPLES * len(table.feature_names)
        own, of_all = (rows * -np.expm1(count * np.log1p(-1 / (rows + 1))) for count in (ids, ids * ranks.size))
        found[table.name] = TableDemand(ids, own, of_all)
    return Demand(_SAMPLES, found)
