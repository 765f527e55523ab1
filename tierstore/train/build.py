"""From a run file to the things it names: data, tables, model, optimizer of the dense part."""

import contextlib
import dataclasses
import importlib
import inspect
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import init, optim
from ..config import TableConfig
from ..dist import TowerTieredEmbeddingBagCollection
from ..dist.placement.towers import Names, partition, similarity_of
from ..ids import LFU, LRU, DynamicIds, Frequency
from ..ids.texts import text_categories
from ..kernels.arrays import Int64s
from ..metrics import Measures, MetricName, Metrics
from ..models import DLRM, DCNTower, DLRMTower, Towers
from ..nn.collection import TieredEmbeddingBagCollection
from ..nn.module import Placeholder
from ..optim.configs import RULES
from ..settings.sections import ConfigError, nearest
from ..store import Store, open_store
from ..trace import TableTrace, Trace
from .config import RunConfig
from .processes import ALONE, Processes
from .readers import Categories, DataError, FeatureHasher, FollowingReader, Reader, Schema, open_reader
from .readers.arrow import ArrowReader
from .readers.base import ShuffledReader, random_order
from .readers.categories import offsets_of


class Run(NamedTuple):
    """What a training step needs, but its batch: the model is on the store's device, the optimizer that of its dense
    weights. Rows are updated inside backward."""

    store: Any  # a ``Store``, or over ranks a ``ShardedStore``
    model: Any  # a ``DLRM``, or of the class that the run file names
    embeddings: TieredEmbeddingBagCollection
    optimizer: torch.optim.Optimizer
    processes: Processes = ALONE
    config: RunConfig = RunConfig()
    measures: Measures = Measures()  # of test rows
    metrics: Metrics = Metrics(Measures(names=()))  # of training rows

    @property
    def local(self) -> Store:
        """The store of this process, or its part."""
        return self.processes.local(self.store)


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the optimizer of the dense weights trains, by name."""
    if isinstance(model, DLRM):
        return model.dense_parameters()
    return {name: each for name, each in model.named_parameters() if not isinstance(each, Placeholder)}


def dense_state(model: nn.Module) -> Mapping[str, Tensor]:
    """What a commit keeps of the model besides rows: dense weights and buffers, by name."""
    return model.dense_parameters() if isinstance(model, DLRM) else dict(model.state_dict())


def look_here() -> None:
    """Find modules of the current folder too, after all others; so do children (``child_options``)."""
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())


def loaded(name: str, key: str) -> Any:
    """The class or function of a key's "package.module:name", looked for in the current folder, too. ConfigError: it is
    not there, or cannot be called."""
    module, _, attribute = name.partition(":")
    look_here()
    try:
        found = attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError, TypeError, SyntaxError) as error:
        way = "give package.module:name, installed or in the folder where tierstore is started"
        raise ConfigError(f"{key} = {name!r} cannot be imported: {error}; {way}") from error
    if not callable(found):
        raise ConfigError(f"{key} = {name!r} is of type {type(found).__name__}; name a class or function")
    return found


def open_data(config: RunConfig, *, follow: bool = False) -> tuple[Reader, FeatureHasher]:
    """The reader of ``data.path``, and the hashing of its categories into the tables. ``follow``: it waits for files
    where ``data.follow`` says so; else it reads what is there. ValueError: it cannot be read."""
    data = config.data
    if not data.path:
        raise ValueError("the run file has no data.path; give the data with --data PATH")
    reader = _open(config, data.path, follow=follow and data.follow)
    return reader, FeatureHasher(config.table_sizes, mode=data.hashing)


def open_test_data(config: RunConfig, reader: Reader) -> Reader:
    """The reader of ``data.test_path``; without one that of the training data. ValueError: it cannot be read."""
    return _open(config, config.data.test_path) if config.data.test_path else reader


def reader_of_epoch(config: RunConfig, reader: Reader, epoch: int, position: dict[str, Any] | None = None) -> Reader:
    """The training data as an epoch reads them; ``position``: of a reader that follows a folder. ConfigError:
    there are no files to shuffle."""
    if isinstance(reader, FollowingReader) and position is not None:
        reader.seek(position)
    key, size = (config.train.seed, epoch), config.data.shuffle_rows
    if config.data.shuffle_files:
        if not isinstance(reader, ArrowReader):
            raise ConfigError(f"data.shuffle_files is for Parquet and CSV; for {reader.path} set data.shuffle_rows")
        reader = reader.reordered(random_order(len(reader.files), key=key).tolist())
    return ShuffledReader(reader, size, key) if size else reader


def _open(config: RunConfig, path: str, *, follow: bool = False) -> Reader:
    data = config.data
    columns: Any = {"label": data.label_column, "dense": data.dense_columns, "sparse": data.sparse_columns}
    columns |= {"weight": data.weight_column, "event_time": data.time_column}
    columns |= {"group": config.metrics.group, "segment": config.metrics.segment}
    options: Any = {"schema": Schema(**columns, rule=data.rule, longest=data.max_list_length), "quoting": data.quoting}
    if not follow:
        return open_reader(path, data_format=data.format, **options)
    return FollowingReader(
        path, order=data.follow_order, late=data.late_files, settle_seconds=data.settle_seconds,
        until=data.until or math.inf, checks_files=data.check_files, **options,
    )  # fmt: skip


def row_ids(config: RunConfig, column: str, categories: Sequence[str | int] | Tensor) -> Tensor:
    """The rows of a column's table, of ``data.sparse_columns``, that a run trains for categories: int64 [n]. These are
    integers, or texts, which are read as CSV fields are. ValueError: no such column, a missing category, or with
    ``data.hashing = "mod"`` one that is no row of the table."""
    columns = list(config.data.sparse_columns)
    if column not in columns:
        raise ValueError(f"column={column!r}: {nearest(column, columns)}")
    values: Any = categories.tolist() if isinstance(categories, Tensor) else list(categories)
    found = _categories(config, values)
    at = next((i for i, each in enumerate(values) if each == "" or found[i] < config.data.rule.least), None)
    if at is not None:
        raise ValueError(
            f"categories[{at}]={values[at]!r} stands for a missing category, which has no row: leave it out"
        )
    bags = [found if each == column else found[:0] for each in columns]
    given = Categories.of_columns(bags, [int(each == column) for each in columns], len(found))
    return torch.from_numpy(FeatureHasher(config.table_sizes, mode=config.data.hashing)(given).values)


def _categories(config: RunConfig, values: Sequence[str | int]) -> Int64s:
    texts = [each.encode() for each in values if not isinstance(each, int)]
    hashed = iter(text_categories(texts, config.data.rule).tolist())
    return np.array([each if isinstance(each, int) else next(hashed) for each in values], np.int64)


def _measures(config: RunConfig, *names: MetricName) -> Measures:
    section, labels = config.metrics, config.data.labels if len(config.data.labels) > 1 else ()
    categories = _categories(config, section.segment_values).tolist()
    segments = {at: f"{section.segment}={value}" for at, value in zip(categories, section.segment_values, strict=True)}
    every = tuple(dict.fromkeys((*names, *section.names)))
    return Measures(names=every, labels=labels, label_weights=config.data.label_weights, segments=segments)


def open_run_store(config: RunConfig, processes: Processes = ALONE) -> Any:
    options = {name: getattr(config.store, name) for name in ("slack", "ddr", "hbm", "device", "policy")}
    options["check_finite"] = None if config.train.check_finite == "none" else config.train.check_finite
    return processes.open(config, threads=config.store.threads or None, **options)


def build_run(config: RunConfig, store: Any, processes: Processes = ALONE) -> Run:
    """Tables, model and optimizer with the first weights, which depend on ``train.seed`` only, drawn on the CPU.
    Seeds torch. TableError: the store has a table of the same name and another configuration."""
    configs = table_configs(config)
    for table_config in configs:
        store.create_table(table_config)
    torch.manual_seed(config.train.seed)
    modules = build_towers(config)
    embeddings = processes.make_embeddings(store, [table_config.name for table_config in configs], modules)
    model = _build_class(config, embeddings) if config.model.class_ else build_model(config, embeddings, modules)
    model.to(processes.local(store).device)
    section = config.optimizer
    rules: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}
    options: dict[str, Any] = {"lr": section.dense_lr, "weight_decay": section.dense_weight_decay}
    if section.dense == "hessian-free":
        options = {"curvature": section.curvature, "products": section.curvature_products}
        options["average"] = lambda tensors: processes.average(tensors, torch.zeros(()), False)
    rule = rules.get(section.dense, optim.HessianFree)
    measures = _measures(config, "auc", "log_loss"), Metrics(_measures(config), window=config.metrics.window)
    optimizer: torch.optim.Optimizer = rule(dense_parameters(model).values(), **options)
    return Run(store, model, embeddings, optimizer, processes, config, *measures)


def _build_class(config: RunConfig, embeddings: TieredEmbeddingBagCollection) -> nn.Module:
    """The model of ``model.class``, which is imported. ConfigError: of that key or its arguments."""
    made, name = loaded(config.model.class_, "model.class"), f"model.class = {config.model.class_!r}"
    try:
        given = inspect.signature(made).bind(embeddings, num_dense=len(config.data.dense_columns), **config.model.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}, model.args: {error}") from error
    model = made(*given.args, **given.kwargs)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{name} makes {type(model).__name__}; name a class of torch.nn.Module")
    return model


def build_model(config: RunConfig, embeddings: TieredEmbeddingBagCollection, towers: Any = None) -> Any:
    """The DLRM over these tables, its weights drawn from torch's random numbers, on the CPU; ``towers``: modules that
    were drawn before, which ``embeddings`` over towers' hosts runs itself. ValueError: the run has a ``model.class``,
    which only a run's trainer imports."""
    if config.model.class_:
        raise ValueError(f"model.class = {config.model.class_!r}: only tierstore train makes a model of that class")
    modules: Any = build_towers(config) if towers is None else towers
    is_plain = not modules or isinstance(embeddings, TowerTieredEmbeddingBagCollection)
    shape = {"num_features": len(config.data.sparse_columns), "embedding_dim": config.embedding.dim}
    if modules and config.model.interaction == "dot":
        vectors = sum(module.num_vectors for module in modules)
        shape = {"num_features": vectors, "embedding_dim": modules[0].out_features // modules[0].num_vectors}
    elif modules:
        width = sum(module.out_features for module in modules)
        shape = {"num_features": width, "embedding_dim": 1, "dense_dim": config.embedding.dim}
    return DLRM(
        embeddings if is_plain else Towers(embeddings, config.model.towers, modules),
        **shape,
        num_dense=len(config.data.dense_columns),
        bottom_mlp=config.model.bottom_mlp,
        top_mlp=config.model.top_mlp,
        interaction=config.model.interaction,
        cross_layers=config.model.cross_layers,
        cross_rank=config.model.cross_rank,
        num_labels=len(config.data.labels),
    )


def build_towers(config: RunConfig) -> list[DLRMTower] | list[DCNTower]:
    """The module of each tower, if there are towers."""
    model, dim = config.model, config.embedding.dim
    if isinstance(model.towers, str):
        raise ValueError(f"model.towers={model.towers!r}: load the run file, which reads that one; or give the towers")
    sizes, most = [len(tower) for tower in model.towers], model.tower_compression
    if model.interaction == "dcn":
        widths = (max(1, round(size * dim / most)) for size in sizes)
        return [DCNTower(num_features=n, dim=dim, out_features=w) for n, w in zip(sizes, widths, strict=True)]
    per_feature, flat = model.tower_per_feature, model.tower_flat
    vectors = per_feature * sum(sizes) + flat * len(sizes)
    shape = {"dim": dim, "out_dim": max(1, round(sum(sizes) * dim / (most * max(vectors, 1))))}
    return [DLRMTower(num_features=size, **shape, per_feature=per_feature, flat=flat) for size in sizes]


def table_configs(config: RunConfig) -> list[TableConfig]:
    """One table a categorical column, of the column's name."""
    section, ids = config.embedding, None
    if section.ids == "dynamic":
        admission = Frequency(section.admit_after) if section.admit_after > 1 else None
        ids = DynamicIds(admission=admission, eviction=LFU() if section.evict == "lfu" else LRU())

    def made(name: str, size: int) -> TableConfig:
        own, rule = (of := config.of_table(name)).embedding, of.optimizer
        given: dict[str, Any] = {"lr": rule.sparse_lr, "weight_decay": rule.sparse_weight_decay, "eps": rule.sparse_eps}
        given["initial_accumulator_value"] = rule.sparse_initial_accumulator
        taken = {each.name for each in dataclasses.fields(RULES[rule.sparse])}
        optimizer = RULES[rule.sparse](**{key: value for key, value in given.items() if key in taken})
        first = init.Uniform(-own.init_range, own.init_range, seed=config.train.seed)
        return TableConfig(
            name=name, num_embeddings=size, embedding_dim=own.dim, dtype=own.dtype, rounding=own.rounding,
            feature_names=(name,), pooling=own.pooling, init=first, optimizer=optimizer, ids=ids,
        )  # fmt: skip

    return list(map(made, config.data.sparse_columns, config.table_sizes))


def trace_run(config: RunConfig, *, rows: int | None = None) -> Trace:
    """The lookups of one epoch, or of its first ``rows``, in their order; 16 bytes of memory a lookup, and more.
    ValueError if the data cannot be read, or has no such rows."""
    reader, hasher = open_data(config)
    stop = config.data.train_rows or None if rows is None else rows
    if stop is not None and stop < 1:
        raise ValueError(f"rows={rows}: a trace is of one row at least")
    names, batch_size = config.data.sparse_columns, config.train.batch_size
    ids, lengths = ({name: [np.empty(0, np.int64)] for name in names} for _ in range(2))
    for batch in reader_of_epoch(config, reader, 0).batches(hasher, batch_size=batch_size, stop_row=stop):
        for name, own in batch.sparse.to_dict().items():
            ids[name].append(own.values().numpy())
            lengths[name].append(own.lengths().numpy())
    tables = {name: TableTrace(np.concatenate(ids[name]), offsets_of(np.concatenate(lengths[name]))) for name in names}
    return Trace(tables=tables, batch_samples=batch_size)


@torch.no_grad()
def partition_run(config: RunConfig, count: int, *, rows: int = 10_000, seed: int = 0) -> Names:
    """``partition`` of a run's tables by what its store's last commit holds and its first ``rows`` training rows look
    up. Loads are lookups, and bytes of rows with optimizer state. Changes nothing.

    Raises:
        ValueError: there are fewer tables than towers, or no rows. StoreNotFoundError, TableError: it is not trained.
    """
    columns, (reader, hasher) = list(config.data.sparse_columns), open_data(config)
    lookups, size, stop = np.zeros(len(columns)), config.train.batch_size, min(rows, config.data.train_rows or rows)
    with open_store(config.store.path, mode="r", ddr=config.store.ddr) as store:
        embeddings = TieredEmbeddingBagCollection(store, tables=columns)

        def vectors() -> Iterator[Tensor]:
            for batch in reader.batches(hasher, batch_size=size, stop_row=stop):
                lookups[:] += batch.sparse.lengths().view(len(columns), -1).sum(dim=1).numpy()
                yield embeddings(batch.sparse).values().view(len(batch), len(columns), -1)

        similarity = similarity_of(vectors(), columns)
        bytes_each = [table.layout.row_bytes * table.config.num_embeddings for table in embeddings.tables]
    if not lookups.any():
        raise DataError(f"{reader.path}: its first {stop:,} rows look up nothing to compare tables by; read more")
    return partition(columns, similarity, np.stack([lookups, bytes_each], axis=1), count, seed=seed)
