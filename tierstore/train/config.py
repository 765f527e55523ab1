"""The run file: one TOML file says what a training run is. A flag overrides a key; an unknown key is an error.

Each section is a dataclass; the help in a field is what the documentation shows.
"""

# ruff: noqa: RUF009 (option makes dataclass fields)

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config import MAX_KEPT_VERSIONS, MAX_SLACK
from ..dist.placement.towers import load_towers
from ..dist.ranks import Precision
from ..io.log import DEFAULT_SLACK
from ..layout import MAX_ROWS
from ..metrics import MetricName
from ..optim.configs import RuleName
from ..settings import sections
from ..settings.sections import Checked, ConfigError, Override, nearest, option, table_option
from ..system.checks import excerpt
from ..system.sizes import parse_size
from .readers import CategoryRule, DataFormat
from .readers.categories import Hashing
from .readers.following import FollowOrder, LateFiles

_MAX_THREADS, _MAX_WIDTH, _MAX_LAYERS, _MAX_SEGMENTS = 1024, 1 << 20, 1000, 100
_MAX_COUNT, _MAX_TIMEOUT, _MAX_RATE = (1 << 63) - 1, 1 << 20, 1e30
"""Bounds far above any use, so that a typing error is reported at once and not by what overflows later."""


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key} = {excerpt(value)}: expected {expected}")


@dataclass(frozen=True, kw_only=True)
class StoreSection(Checked):
    """[store]: where the tables live and what memory they get. Nothing here but ``device`` changes a result."""

    path: str = option("./run", "folder of the store")
    ddr: str | int = option(
        "50%", 'memory for rows of each rank: "1GiB", "50%" of the machine\'s, "5% of tables"; ranks divide the default'
    )
    hbm: str | int = option(0, 'GPU memory for rows, above ddr: bytes, "2GiB", "50%" or "5% of tables"; 0: none')
    device: str = option("cpu", 'where the model computes: "cpu", or "cuda" ("cuda:1") with hbm; decides last bits')
    policy: str = option("auto", 'which rows leave memory first: "auto", "lru", "lfu" or "tinylfu"')
    threads: int = option(0, "threads of the store; 0 chooses", low=0, high=_MAX_THREADS)
    keep: int = option(1, "commits to keep, for tierstore rollback; ranks: 2 or more", low=1, high=MAX_KEPT_VERSIONS)
    slack: float = option(DEFAULT_SLACK, "size of the row file, over that of its rows, from which it is cleaned")
    record: str = option("", 'file to record in which rows are looked up, as "trace.npz", for tierstore plan; "": none')
    record_rate: float = option(0.01, "share of the rows that is recorded; less once the recording has 64 MiB")

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(bool(self.path), "store.path", self.path, "a path")
        _require(bool(self.device), "store.device", self.device, 'a device, as "cpu" or "cuda"')
        _require(0 < self.record_rate <= 1, "store.record_rate", self.record_rate, "a number above 0, and at most 1")
        _require(1 < self.slack <= MAX_SLACK, "store.slack", self.slack, f"a number above 1, and at most {MAX_SLACK}")

    @property
    def has_hbm(self) -> bool:
        """Whether the store has a tier in GPU memory; ValueError if ``hbm`` is no size."""
        return parse_size(self.hbm, name="hbm", table_bytes=_MAX_COUNT) > 0


@dataclass(frozen=True, kw_only=True)
class DataSection(Checked):
    """[data]: what to read. Rows are taken in file order: the first ``train_rows``, then ``test_rows``."""

    path: str = option("", "file or folder to read")
    format: DataFormat = option("auto", '"auto", "criteo", "parquet", "csv" or "npy"')
    train_rows: int = option(0, "rows to train on, from the start; 0: all", low=0, high=_MAX_COUNT)
    test_rows: int = option(0, "rows after those, to evaluate on; 0: do not evaluate", low=0, high=_MAX_COUNT)
    test_path: str = option("", "file or folder to evaluate on instead: test_rows of it, or with 0 all")
    hashing: Hashing = option(
        "mix", '"mix": spread categories over a table; "mod": they are row numbers; "none": they are dynamic ids'
    )
    hash_seed: int = option(0, "of the XXH64 that makes texts categories", low=0, high=_MAX_COUNT)
    log_dense: bool = option(True, "turn dense values x into log(1 + max(x, 0))")
    label_column: str | tuple[str, ...] = option("label", "name of the label's column, or a list of several labels'")
    label_weights: tuple[float, ...] = option((), "of each label's loss in their sum; []: all 1")
    weight_column: str = option("", 'column of weights of rows in the loss, 0 or more; "": all 1')
    dense_columns: tuple[str, ...] = option(tuple(f"I{i}" for i in range(1, 14)), "names of the dense columns, if any")
    sparse_columns: tuple[str, ...] = option(tuple(f"C{i}" for i in range(1, 27)), "names of the categorical columns")
    max_list_length: int = option(0, "categories of a list to keep, the last ones; 0: all", low=0, high=_MAX_COUNT)
    quoting: bool = option(True, "a field may stand in double quotes (CSV); false: quotes are characters like others")
    shuffle_rows: int = option(0, "rows to shuffle in memory, in multiples of batch_size; 0: none", low=0, high=1 << 26)
    shuffle_files: bool = option(False, "each epoch reads the folder's files in another order (Parquet, CSV)")
    check_files: bool = option(True, "go on within an epoch only if files have the names, sizes and rows they had")
    time_column: str = option("", 'column of event times: Unix seconds, or timestamps in Parquet; "": none')
    follow: bool = option(False, "read files as they come to the folder, once, until a file _END comes")
    follow_order: FollowOrder = option("name", 'in which files are read: "name", or "time", of their first rows')
    late_files: LateFiles = option("error", 'what becomes of files that come out of order or stay cut short: or "skip"')
    settle_seconds: float = option(1.0, "for which a CSV or npy file must not have changed", low=0, high=_MAX_TIMEOUT)
    until: float = option(0.0, "Unix seconds at which it ends as by a file _END; 0: never", low=0, high=_MAX_RATE)

    def __post_init__(self) -> None:
        super().__post_init__()
        is_after = self.test_rows > 0 and not self.test_path
        _require(not is_after or self.train_rows > 0, "data.train_rows", 0, "1 or more with data.test_rows")
        good, labels, weights = not (self.shuffle_files and self.train_rows), self.labels, self.label_weights
        _require(good, "data.train_rows", self.train_rows, "0 with data.shuffle_files; test on data.test_path")
        _require(bool(labels), "data.label_column", self.label_column, "the name of a column")
        good = any(weights) and all(0 <= weight <= _MAX_RATE for weight in weights) and len(weights) == len(labels) > 1
        expected = "a weight of 0 or more for each of several labels, not all 0"
        _require(good or not weights, "data.label_weights", weights, expected)
        is_plain = self.format == "auto" and not (self.train_rows or self.shuffle_rows or self.shuffle_files)
        expected = 'false with data.train_rows, shuffle_rows, shuffle_files, or a format other than "auto"'
        _require(is_plain or not self.follow, "data.follow", self.follow, expected)
        _require(self.follow or not self.until, "data.until", self.until, "0 without data.follow")

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels' columns."""
        return (self.label_column,) if isinstance(self.label_column, str) else self.label_column

    @property
    def rule(self) -> CategoryRule:
        """What values of categorical columns become."""
        return CategoryRule(are_ids=self.hashing == "none", seed=self.hash_seed)

    @property
    def has_test(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.test_rows > 0 or bool(self.test_path)


@dataclass(frozen=True, kw_only=True)
class TableSection:
    """[embedding.tables.NAME]: keys of [embedding] and [optimizer] that one column's table has otherwise."""

    dim: int | None = None
    pooling: Literal["sum", "mean"] | None = None
    init_range: float | None = None
    sparse: RuleName | None = None
    sparse_lr: float | None = None


@dataclass(frozen=True, kw_only=True)
class EmbeddingSection(Checked):
    """[embedding]: one table for each categorical column."""

    dim: int = option(16, "columns of an embedding vector", low=1, high=_MAX_WIDTH)
    num_embeddings: int | tuple[int, ...] = option(100_000, "rows of every table, or a list with one number for each")
    ids: Literal["fixed", "dynamic"] = option(
        "fixed", '"dynamic", with data.hashing = "none": num_embeddings categories at a time have a row of their own'
    )
    admit_after: int = option(1, "times that a category is seen until it has a row (dynamic ids)", low=1, high=255)
    evict: Literal["lru", "lfu"] = option("lru", "which categories lose their rows to others (dynamic ids)")
    dtype: Literal["float32", "float16", "bfloat16"] = option("float32", "type the vectors are stored in")
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest", 'of vectors to float16 or bfloat16; "stochastic", not with store.hbm, keeps small steps on average'
    )
    pooling: Literal["sum", "mean"] = option("sum", "what a row's categories in one column become: their sum or mean")
    init_range: float = option(0.01, "untrained rows are uniform in [-init_range, init_range)", low=0, high=_MAX_RATE)
    tables: dict[str, TableSection] = table_option("of columns' own: dim, pooling, init_range, sparse, sparse_lr")

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.num_embeddings if isinstance(self.num_embeddings, tuple) else (self.num_embeddings,)
        good = bool(sizes) and all(1 <= size <= MAX_ROWS for size in sizes)
        _require(good, "embedding.num_embeddings", self.num_embeddings, f"1 or more, up to {MAX_ROWS}")
        is_known = self.rounding == "nearest" or self.dtype != "float32"
        expected = '"nearest" with embedding.dtype "float32", "stochastic" with "float16" and "bfloat16"'
        _require(is_known, "embedding.rounding", self.rounding, expected)


@dataclass(frozen=True, kw_only=True)
class ModelSection(Checked):
    """[model]: a DLRM, or the class that the run file names."""

    class_: str = option("", 'class of the model, as "package.module:Net"; "": DLRM, by the keys below')
    args: dict[str, Any] = table_option("arguments of that class, by name")
    interaction: Literal["dot", "dcn"] = option("dot", '"dot": products of all pairs; "dcn": DCN-v2 cross network')
    bottom_mlp: tuple[int, ...] = option((64,), "hidden widths of the MLP over the dense features")
    top_mlp: tuple[int, ...] = option((64,), "hidden widths of the MLP over the interaction")
    cross_layers: int = option(2, 'layers of the cross network ("dcn")', low=1, high=_MAX_LAYERS)
    cross_rank: int = option(32, 'rank of its weight matrices ("dcn"); 0: full', low=0, high=_MAX_WIDTH)
    towers: str | tuple[tuple[str, ...], ...] = option(
        (), "columns that are compressed together: a JSON file of them, or lists; []: none"
    )
    tower_compression: float = option(4.0, "bytes of their vectors over those that towers give", low=1, high=1000)
    tower_per_feature: int = option(0, 'vectors that a tower gives for each of its columns ("dot")', low=0, high=1000)
    tower_flat: int = option(4, 'vectors that it gives for all of them together ("dot")', low=0, high=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, widths in (("model.bottom_mlp", self.bottom_mlp), ("model.top_mlp", self.top_mlp)):
            good = len(widths) <= _MAX_LAYERS and all(1 <= width <= _MAX_WIDTH for width in widths)
            _require(good, key, widths, f"up to {_MAX_LAYERS} widths of 1 or more, up to {_MAX_WIDTH}")
        _require(self.tower_per_feature + self.tower_flat > 0, "model.tower_flat", 0, "1 or more vectors of a tower")
        _require(bool(self.class_) or not self.args, "model.args", self.args, "none without model.class")
        _require(not self.class_ or not self.towers, "model.towers", self.towers, "none with model.class")
        try:
            json.dumps(self.args)
        except TypeError:
            _require(False, "model.args", self.args, "no dates; write them as strings")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection(Checked):
    """[optimizer]: update rules of the embedding rows (sparse) and of the MLPs (dense)."""

    sparse: RuleName = option("rowwise_adagrad", "rule for embedding rows")
    sparse_lr: float = option(0.02, "its learning rate", low=0, high=_MAX_RATE)
    sparse_eps: float = option(1e-8, "its eps (all but sgd)", low=0, high=_MAX_RATE)
    sparse_weight_decay: float = option(0.0, "its weight decay, on the rows of a batch", low=0, high=_MAX_RATE)
    sparse_initial_accumulator: float = option(0.0, "first sum of squares (adagrad)", low=0, high=_MAX_RATE)
    dense: Literal["sgd", "adagrad", "adam", "hessian-free"] = option(
        "adagrad", 'rule for everything else; "hessian-free" not with model.towers'
    )
    dense_lr: float = option(0.02, 'its learning rate; of "hessian-free" it is 1, a whole step', low=0, high=_MAX_RATE)
    dense_weight_decay: float = option(0.0, "its weight decay", low=0, high=_MAX_RATE)
    dense_clip_norm: float = option(0.0, "norm that its whole gradient is cut to; 0: never", low=0, high=_MAX_RATE)
    curvature: Literal["hessian", "gauss-newton"] = option(
        "hessian", 'of "hessian-free": Bi-CGSTAB that follows negative curvature, or conjugate gradients without any'
    )
    curvature_share: float = option(0.25, 'share of a batch\'s rows whose curvature is used ("hessian-free")')
    curvature_products: int = option(20, 'products with it in a step, at most ("hessian-free")', low=2, high=1 << 20)
    warmup_steps: int = option(0, "first steps, in which both learning rates rise evenly", low=0, high=_MAX_COUNT)
    decay: Literal["none", "linear", "cosine"] = option("none", "how both learning rates fall after that")
    decay_steps: int = option(0, "steps after warm-up in which they fall", low=0, high=_MAX_COUNT)
    decay_to: float = option(0.0, "the share of them that is left then, and stays", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        good = (self.decay != "none") == (self.decay_steps > 0)
        _require(good, "optimizer.decay_steps", self.decay_steps, '1 or more with optimizer.decay, 0 with "none"')
        share, unused = self.curvature_share, self.dense_weight_decay or self.dense_clip_norm
        _require(0 < share <= 1, "optimizer.curvature_share", share, "a number above 0, and at most 1")
        good, expected = not unused or self.dense != "hessian-free", '0 with optimizer.dense = "hessian-free"'
        _require(good, "optimizer.dense_weight_decay or dense_clip_norm", unused, expected)

    def rate_at(self, step: int) -> float:
        """The share of the learning rates that the step has that follows so many."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "none":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        left = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.decay_to + (1 - self.decay_to) * left


@dataclass(frozen=True, kw_only=True)
class TrainSection(Checked):
    """[train]: how to go through the data."""

    batch_size: int = option(128, "rows of a step; over ranks, of all together", low=1, high=1 << 24)
    epochs: int = option(1, "times through the training rows", low=1, high=_MAX_COUNT)
    seed: int = option(0, "of the first weights, of shuffling and of dropout", low=0, high=_MAX_COUNT)
    prefetch_depth: int | Literal["auto"] = option(
        "auto", 'batches whose rows are fetched ahead; "auto": 2 where that is faster', low=0, high=_MAX_THREADS
    )
    commit_every: int = option(1000, "steps between commits; 0: only at the end", low=0, high=_MAX_COUNT)
    commit_seconds: float = option(0.0, "commit, too, when so many have passed since; 0: not", low=0, high=_MAX_RATE)
    test_each_epoch: bool = option(False, "evaluate after each epoch, not only after the last")
    test_every_steps: int = option(0, "evaluate after so many steps, too; 0: not", low=0, high=_MAX_COUNT)
    test_every_minutes: float = option(0.0, "evaluate when so many have passed; 0: not", low=0, high=_MAX_RATE)
    best_by: MetricName = option("log_loss", "figure of the test rows that says which version is best")
    patience: int = option(0, "end after so many tests in turn that are not the best; 0: never", low=0)
    keep_best: bool = option(False, "keep the version that tests best; in the end the store shows that one")
    callbacks: tuple[str, ...] = option((), 'called with a Record after each step, test and commit: "package:function"')
    metrics: str = option("", 'file of JSON lines, as "run.jsonl": losses, tests, commits; "": none')
    metrics_every: int = option(100, "steps between two of its lines of losses", low=1, high=_MAX_COUNT)
    tensorboard: str = option("", 'folder for TensorBoard, of the same figures; "": none')
    check_finite: Literal["none", "log", "error"] = option("none", 'NaN in updates: "log" it, or end by an "error"')
    torch_threads: int = option(1, "threads of torch, which decide last bits", low=1, high=_MAX_THREADS)


@dataclass(frozen=True, kw_only=True)
class MetricsSection(Checked):
    """[metrics]: of training rows, as the model scores them before their step, and of test rows."""

    names: tuple[MetricName, ...] = option((), 'of "ne", "calibration", "auc", "gauc" and "log_loss"; []: none')
    window: int = option(100_000, "training rows of a window; the next one begins where it ends", low=1, high=1 << 27)
    group: str = option("", 'column by whose values "gauc" groups rows, as "user_id"')
    segment: str = option("", "column whose segment_values have figures of their own")
    segment_values: tuple[int | str, ...] = option((), 'those values, as ["DE", "US"]; the others are one segment')


@dataclass(frozen=True, kw_only=True)
class RanksSection(Checked):
    """[ranks]: of a run that torchrun starts in several processes."""

    plan: str = option("", 'file that says which rank has which table, of tierstore shard plan; "": all share all rows')
    forward_precision: Precision = option("fp32", 'how rows cross between ranks: "fp32", "bf16", "fp16" or "int8"')
    backward_precision: Precision = option("fp32", "the same of their gradients; fewer bits cost accuracy")
    timeout_seconds: int = option(300, "wait for a rank until it counts as hung", low=1, high=_MAX_TIMEOUT)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run; ``load`` reads it from TOML."""

    store: StoreSection = field(default_factory=StoreSection)
    data: DataSection = field(default_factory=DataSection)
    embedding: EmbeddingSection = field(default_factory=EmbeddingSection)
    model: ModelSection = field(default_factory=ModelSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    ranks: RanksSection = field(default_factory=RanksSection)

    def __post_init__(self) -> None:
        is_dynamic = self.embedding.ids == "dynamic"
        expected = '"none" with embedding.ids = "dynamic", "mix" or "mod" without'
        _require(is_dynamic == (self.data.hashing == "none"), "data.hashing", self.data.hashing, expected)
        good = self.optimizer.dense != "hessian-free" or not (self.model.towers or self.model.class_)
        _require(good, "optimizer.dense", "hessian-free", "another rule with model.towers or model.class")
        size, batch, epochs = self.data.shuffle_rows, self.train.batch_size, self.train.epochs
        _require(epochs == 1 or not self.data.follow, "train.epochs", epochs, "1 with data.follow")
        _require(not size % batch, "data.shuffle_rows", size, f"a multiple of train.batch_size, {batch:,}")
        tests = (self.train.test_each_epoch, self.train.test_every_steps, self.train.test_every_minutes)
        wanted, good = self.train.patience or self.train.keep_best, self.data.has_test and any(tests)
        expected = "none without test rows and train.test_each_epoch, test_every_steps or test_every_minutes"
        _require(good or not wanted, "train.patience or keep_best", wanted, expected)
        metrics, values = self.metrics, self.metrics.segment_values
        _require(bool(metrics.group) or "gauc" not in metrics.names, "metrics.group", "", 'a column, for "gauc"')
        good, expected = bool(metrics.segment) == bool(values), "values with metrics.segment, none without; up to 100"
        _require(good and len(values) <= _MAX_SEGMENTS, "metrics.segment_values", values, expected)
        good = self.train.best_by in ("log_loss", "auc", *metrics.names)
        _require(good, "train.best_by", self.train.best_by, '"log_loss", "auc", or a metric of metrics.names')
        good, expected = self.data.has_test or not any(tests[1:]), "none without data.test_rows or data.test_path"
        _require(good, "train.test_every_steps or test_every_minutes", max(tests[1:]), expected)
        sizes = self.embedding.num_embeddings
        columns = len(self.data.sparse_columns)
        if isinstance(sizes, tuple) and len(sizes) != columns:
            raise ConfigError(f"embedding.num_embeddings lists {len(sizes)} tables, data.sparse_columns {columns}")
        for name in self.embedding.tables:
            if name not in self.data.sparse_columns:
                raise ConfigError(f"embedding.tables.{name}: {nearest(name, self.data.sparse_columns)}")
            try:
                dim = self.of_table(name).embedding.dim
            except ValueError as error:
                raise ConfigError(f"embedding.tables.{name}: {error}") from None
            good = dim == self.embedding.dim or bool(self.model.class_)
            expected = "embedding.dim, that of all tables of a DLRM; a model.class takes others"
            _require(good, f"embedding.tables.{name}.dim", dim, expected)

    def of_table(self, name: str) -> "RunConfig":
        """The run with the keys of [embedding.tables.NAME] in their places. ValueError: one is out of range."""
        keys: dict[str, Any] = vars(self.embedding.tables.get(name, TableSection()))
        own = {key: value for key, value in keys.items() if value is not None}
        rule = {key: own.pop(key) for key in ("sparse", "sparse_lr") if key in own}
        embedding = replace(self.embedding, **own, tables={})
        return replace(self, embedding=embedding, optimizer=replace(self.optimizer, **rule))

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of each column's table."""
        sizes = self.embedding.num_embeddings
        return sizes if isinstance(sizes, tuple) else (sizes,) * len(self.data.sparse_columns)


parse_override = functools.partial(sections.parse_override, example="train.batch_size=512")


def load(path: str | Path, overrides: Iterable[Override] = ()) -> RunConfig:
    """Read a run file, then set what ``overrides`` say; the last wins. Of a file of towers, the towers take the place.
    ConfigError: not TOML, unknown keys, wrong values, or that file cannot be read."""
    config = sections.load_sections(RunConfig, path, overrides, what="run file")
    if isinstance(config.model.towers, str):
        try:
            towers = load_towers(config.model.towers)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.towers = {excerpt(config.model.towers)}: {error}") from None
        config = replace(config, model=replace(config.model, towers=towers))
    return config
