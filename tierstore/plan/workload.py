"""A workload: the tables of a model, what a sample looks up, and what a DLRM's dense part computes; published ones by
name, others from the ``[workload]`` of a file or from a run file of ``tierstore train``."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from ..ids.id_map import map_bytes
from ..layout import MAX_ROWS, DtypeName, QuantizedName, RowLayout
from ..optim.configs import RULES, RuleName
from ..settings.sections import Checked, ConfigError, load_sections, nearest, option, read_toml, toml_value
from ..system.checks import excerpt, require_choice
from ..system.sizes import format_size, parse_size

OptimizerName = Literal["none", RuleName]
_UNKNOWN: Final = -1.0
_COUNT, _DIM, _STEP, _QUERY = 26, 128, 8192, 1  # assumed: tables, their columns, samples of a step and of a query
_SOURCES: Final = ("preset", "file", "tables", "bytes", "rows")  # of tables: one of them
_OF_TABLES: Final = ("pooling_factor", "exponent")  # figures of them that a file may leave open
_MAX_SCALE: Final = 1e6
OF_RUNS: Final = {"data", "embedding", "model", "train"}  # sections of a run file, one of which it has
MLPERF_LAYERS: Final[dict[str, Any]] = {
    "num_dense": 13,
    "bottom_mlp": (512, 256),
    "top_mlp": (1024, 1024, 512, 256),
    "interaction": "dcn",
    "cross_layers": 3,
    "cross_rank": 512,
}
"""Of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2/torchrec_dlrm), as ``models.DLRM`` takes them."""


class DenseWork(NamedTuple):
    """Forward: flops of a sample, products of matrices of a batch, values that are read and written, of a sample."""

    dense_flops: float
    dense_products: float
    dense_values: float


def dlrm_work(
    dims: Sequence[int],
    *,
    num_dense: int,
    bottom_mlp: Sequence[int],
    top_mlp: Sequence[int],
    interaction: str,
    cross_layers: int,
    cross_rank: int,
) -> DenseWork:
    """As ``models.DLRM`` computes it; flops are 2 a b for a layer of a inputs and b outputs."""
    dim, vectors = max(dims), len(dims) + 1
    if interaction == "dot":
        pairs = vectors * (vectors - 1) // 2
        crossing, width, products = 2 * vectors**2 * dim, dim + pairs, 1
        values = 4 * vectors * dim + 2 * vectors**2 + pairs + 2 * width
    else:
        width = dim + sum(dims)
        linears = [(width, cross_rank), (cross_rank, width)] if cross_rank else [(width, width)]
        crossing = cross_layers * sum(2 * inputs * outputs for inputs, outputs in linears)
        products = cross_layers * len(linears)
        values = 2 * width + cross_layers * (sum(map(sum, linears)) + 6 * width)
    layers = [*pairwise([num_dense, *bottom_mlp, dim]), *pairwise([width, *top_mlp, 1])]
    return DenseWork(
        float(sum(2 * inputs * outputs for inputs, outputs in layers) + crossing),
        float(len(layers) + products),
        float(sum(inputs + 3 * outputs for inputs, outputs in layers) + values),
    )


@dataclass(frozen=True, kw_only=True)
class TableShape(Checked):
    """One table, and how often and how unevenly its rows are looked up."""

    name: str
    num_embeddings: int = option(1, "rows", low=1, high=MAX_ROWS)
    embedding_dim: int = option(1, "columns", low=1, high=1 << 16)
    pooling_factor: float = option(1.0, "ids a sample, on average", low=0)
    exponent: float = option(1.05, "of Zipf's law of the rows' popularity, where no trace says it; 0: uniform", low=0)
    ids: Literal["fixed", "dynamic"] = option(
        "fixed", '"dynamic": any int64 is an id, and num_embeddings is how many have rows at a time'
    )
    candidates: int = option(0, "dynamic ids without a row that are counted", low=0, high=MAX_ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name:
            raise ValueError("name='': expected a text")
        if self.ids == "fixed" and self.candidates:
            raise ValueError(f'candidates={self.candidates}: expected 0 unless ids = "dynamic"')


@dataclass(frozen=True, kw_only=True)
class TableSpec(TableShape):
    """In a file: a table, or several alike, named with a number."""

    name: str = option("table", "its name; of several alike the beginning of theirs")
    embedding_dim: int = option(16, "columns", low=1, high=1 << 16)
    pooling_factor: float = option(_UNKNOWN, "ids a sample, on average; -1: not known, 1 is assumed", low=_UNKNOWN)
    exponent: float = option(
        _UNKNOWN, "of Zipf's law of the rows' popularity; 0: uniform; -1: not known, 1.05 is assumed", low=_UNKNOWN
    )
    count: int = option(1, "tables that are so", low=1, high=1 << 16)

    def shapes(self) -> list[TableShape]:
        given = {each.name: getattr(self, each.name) for each in fields(TableShape)}
        first = TableShape(**{name: value for name, value in given.items() if value != _UNKNOWN})
        alike = range(self.count)
        return [first] if self.count == 1 else [replace(first, name=f"{self.name}{number}") for number in alike]


class Assumed(NamedTuple):
    """A key of ``[workload]`` that nobody gave; ``tables``: names of those of which it is, of the whole model none."""

    figure: str
    tables: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Workload(Checked):
    """A model in use; ``assumed``: which figures nobody gave. ValueError: names the field, its value and what is
    accepted."""

    name: str
    tables: tuple[TableShape, ...]
    batch_samples: int = option(2048, "samples of a training step, or of a query", low=1)
    optimizer: OptimizerName = "none"
    """Of training; "none": rows are looked up only."""
    dtype: DtypeName = "float32"  # of the weights, in memory and on SSD
    dense_flops: float = option(0.0, "of the model beside its tables, forward, a sample", low=0, high=1e15)
    dense_products: float = option(0.0, "of matrices, of the same, a batch; 0: not known", low=0, high=1e15)
    dense_values: float = option(0.0, "that it reads and writes, a sample", low=0, high=1e15)
    assumed: tuple[Assumed, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tables:
            raise ValueError("the workload has no table")
        twice = next((name for name, count in Counter(table.name for table in self.tables).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"the workload has two tables {excerpt(twice)}")
        require_choice(self.optimizer, get_args(OptimizerName), "optimizer")
        require_choice(self.dtype, get_args(DtypeName), "dtype")
        if self.is_training and self.dtype in get_args(QuantizedName):
            raise ValueError(
                f"dtype={self.dtype!r}: such rows are looked up, not trained; train float32, float16 or bfloat16, or "
                'set optimizer = "none"'
            )

    @property
    def dense(self) -> DenseWork:
        """Of the model beside its tables; of one whose layers nobody told flops alone."""
        return DenseWork(*(getattr(self, name) for name in DenseWork._fields))

    @property
    def is_training(self) -> bool:
        """Whether rows are updated."""
        return self.optimizer != "none"

    def layout(self, table: TableShape) -> RowLayout:
        """How the rows of a table lie in a store."""
        dim = table.embedding_dim
        state = RULES[self.optimizer]().state_dim(dim) if self.is_training else 0
        return RowLayout(dim=dim, dtype=self.dtype, state_dim=state)

    @property
    def table_bytes(self) -> int:
        """Of all rows, were they all in memory."""
        return sum(table.num_embeddings * self.layout(table).row_bytes for table in self.tables)

    @property
    def id_rows(self) -> int:
        """Rows in which a store keeps dynamic ids."""
        return sum(1 + table.num_embeddings + table.candidates for table in self.tables if table.ids == "dynamic")

    @property
    def id_bytes(self) -> int:
        """Memory for dynamic ids, in each process that has all of them."""
        own = (table for table in self.tables if table.ids == "dynamic")
        return sum(map_bytes(table.num_embeddings) + map_bytes(table.candidates) for table in own)

    @property
    def lookups(self) -> float:
        """Ids of a batch."""
        return self.batch_samples * sum(table.pooling_factor for table in self.tables)


def specified(
    specs: Sequence[TableSpec], sized: Sequence[str] = (), *, is_training: bool = False, **figures: Any
) -> Workload:
    """The workload of a file's tables. What it does not say is assumed, and so are the keys ``sized``: one id a sample,
    by Zipf's law; one sample a query; a dense part as of ``with_dense``. ``is_training``: by row-wise Adagrad, unless
    an optimizer is given."""
    assumed = list(map(Assumed, sized))
    if is_training and "optimizer" not in figures:
        figures["optimizer"] = "rowwise_adagrad"
        assumed.append(Assumed("optimizer"))
    if "batch_samples" not in figures:
        assumed.append(Assumed("batch_samples"))
        figures["batch_samples"] = _QUERY if figures.get("optimizer", "none") == "none" else _STEP
    found = Workload(tables=tuple(shape for spec in specs for shape in spec.shapes()), **figures)
    for figure in _OF_TABLES:
        own = tuple(shape.name for spec in specs if getattr(spec, figure) == _UNKNOWN for shape in spec.shapes())
        assumed += [Assumed(figure, own)] if own else []
    return with_dense(replace(found, assumed=tuple(assumed)))


def with_dense(workload: Workload) -> Workload:
    """The same, its unknown figures of a dense part assumed: those of MLPerf's DLRM-DCNv2 over these tables, its layers
    as wide as take the flops, if they are known. Of 1 flop, which stands for tables alone, the others are 0."""
    own, known = dlrm_work([each.embedding_dim for each in workload.tables], **MLPERF_LAYERS), workload.dense
    width = math.sqrt(known.dense_flops / own.dense_flops) if known.dense_flops else 1.0
    taken = DenseWork(own.dense_flops, own.dense_products, own.dense_values * width)._asdict()
    unknown = [name for name, value in known._asdict().items() if not value and known.dense_flops != 1]
    assumed = (*workload.assumed, *map(Assumed, unknown))
    return replace(workload, **{name: taken[name] for name in unknown}, assumed=assumed)


_ASSUMED: Final[Mapping[str, str]] = {
    "count": "tables: {:,}, of equal size",
    "embedding_dim": "columns of a row: {:,}",
    "optimizer": "optimizer: {}",
    "batch_samples": "samples of a step or query: {:,}",
    "pooling_factor": "ids a sample and table: {:g}",
    "exponent": "skew: Zipf's law of exponent {:g}",
    "dense_flops": "dense model: {:,.0f} flops a sample, as of MLPerf's DLRM-DCNv2",
    "dense_products": "dense model: {:,.0f} matrix products a batch, as that",
    "dense_values": "dense model: {:,.0f} values a sample, read and written, as that",
}


class Assumption(NamedTuple):
    """What nobody said, as people read it, with its value; ``key``: sets it, in a file or by ``--set``."""

    key: str
    text: str


def assumptions(workload: Workload) -> list[Assumption]:
    """What nobody said; of tables of different values the first's."""
    found, every = [], len(workload.tables)
    for figure, names in workload.assumed:
        table = next((each for each in workload.tables if each.name in names), workload.tables[0])
        value = every if figure == "count" else getattr(workload, figure, getattr(table, figure, None))
        part = f", in {len(names):,} of {every:,} tables" if 0 < len(names) < every else ""
        found.append(Assumption(f"workload.{figure}", _ASSUMED[figure].format(value) + part))
    return found


KAGGLE_ROWS: Final = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows of the 26 tables of the Criteo-Kaggle set, as published with its DLRM baseline (facebookresearch/dlrm)."""
_MLPERF_ROWS: Final = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""Of DLRM-DCNv2: ``--num_embeddings_per_feature`` of mlcommons/training, recommendation_v2/torchrec_dlrm."""
_MLPERF_MULTI_HOT: Final = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each of these tables: ``--multi_hot_sizes`` of the same."""


def _published(
    name: str, rows: Sequence[int], ids: Sequence[int], dim: int, flops: int, batch: int, optimizer: OptimizerName
) -> Workload:
    tables = tuple(
        TableShape(name=f"t{number}", num_embeddings=own, embedding_dim=dim, pooling_factor=pooling)
        for number, (own, pooling) in enumerate(zip(rows, ids, strict=True))
    )
    skew = Assumed("exponent", tuple(table.name for table in tables))  # no publication says how popular rows are
    given: dict[str, Any] = {"batch_samples": batch, "optimizer": optimizer, "dense_flops": flops, "assumed": (skew,)}
    return with_dense(Workload(name=name, tables=tables, **given))


PRESETS: Final[Mapping[str, Workload]] = {
    each.name: each
    for each in (
        # Tables and layers: models/configs of harvard-acc/DeepRecSys, the code of Gupta et al., "DeepRecSys: A System
        # for Optimizing End-To-End At-scale Neural Recommendation Inference" (2020). They are looked up, not trained;
        # the batch is the largest that RecSSD (Wilkening et al., 2021) measures them with.
        _published("rmc1", [4_000_000] * 8, [80] * 8, 32, 200_832, 128, "none"),
        _published("rmc2", [500_000] * 32, [120] * 32, 64, 639_104, 128, "none"),
        _published("rmc3", [2_000_000] * 10, [20] * 10, 32, 6_406_656, 128, "none"),
        # bench/dlrm_s_criteo_kaggle.sh of facebookresearch/dlrm.
        _published("criteo-kaggle", KAGGLE_ROWS, [1] * 26, 16, 972_064, 128, "sgd"),
        # The command lines in the README of mlcommons/training, recommendation_v2/torchrec_dlrm.
        _published("mlperf-dlrm-v2", _MLPERF_ROWS, _MLPERF_MULTI_HOT, 128, 32_060_928, 65_536, "adagrad"),
    )
}
"""Flops are of one sample, forward, 2 a b for a layer of a inputs and b outputs: of the layers that
docs/planning/traces.md lists, and of the interaction's matrix products."""


@dataclass(frozen=True, kw_only=True)
class WorkloadSection(Checked):
    """[workload]: the model in use: a preset, a file, tables written here, or the size of all tables."""

    bytes: int | str = option("", 'all rows as float32, without state, as "300GB", in count equal tables; or rows')
    rows: int = option(0, "of all tables, likewise", low=0, high=MAX_ROWS)
    count: int = option(0, f"tables of bytes or rows; 0: {_COUNT} are assumed", low=0, high=1 << 16)
    embedding_dim: int = option(0, f"columns of the same; 0: {_DIM} are assumed", low=0, high=1 << 16)
    pooling_factor: float = option(_UNKNOWN, "ids a sample, of tables that do not say it; -1: 1", low=_UNKNOWN)
    exponent: float = option(_UNKNOWN, "of Zipf's law, of tables that do not say it; -1: 1.05", low=_UNKNOWN)
    preset: str = option("", "one of tierstore plan presets")
    file: str = option("", "another file with a [workload], as tierstore plan presets NAME prints one, or a run file")
    tables: tuple[TableSpec, ...] = option((), "tables, each as [[workload.tables]] with name, num_embeddings, ...")
    name: str = option("", "what the report calls it")
    scale: float = option(1.0, "of the rows of every table: 0.01 plans for a hundredth of them", low=0, high=_MAX_SCALE)
    batch_samples: int = option(
        0, f"samples of a step or query; 0: the workload's own, or {_STEP} of a step, {_QUERY} of a query", low=0
    )
    optimizer: str = option("", 'of training: "sgd", "rowwise_adagrad", "adagrad", "adam"; "none": lookups only')
    dtype: str = option("", 'of the rows: "float32", "float16", "bfloat16", "int8" or "int4"')
    dense_flops: float = option(
        0.0,
        "of the model beside its tables, forward, a sample; 0: the workload's own, or as of MLPerf's DLRM-DCNv2 over "
        "these tables; 1: tables alone",
        low=0,
        high=1e15,
    )
    dense_products: float = option(0.0, "of matrices, of the same, a batch; a run file has them", low=0, high=1e15)
    dense_values: float = option(0.0, "that it reads and writes, a sample; likewise", low=0, high=1e15)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [key for key in _SOURCES if getattr(self, key)]
        if len(given) > 1:
            raise ConfigError(f"workload.{given[1]} = {excerpt(getattr(self, given[1]))}: {given[0]} is given too")


@dataclass(frozen=True, kw_only=True)
class _File:
    workload: WorkloadSection = WorkloadSection()


def workload_of(section: WorkloadSection, name: str = "workload", *, is_training: bool = False) -> Workload:
    """``is_training``: if the section does not say it. ValueError: it names no tables, or some that there are not, or a
    value that cannot be."""
    if not any(getattr(section, key) for key in _SOURCES):
        raise ConfigError(
            f"workload.bytes = '': give the size of all tables, as --bytes 300GB; or workload.preset, one of "
            f"{', '.join(PRESETS)}; or workload.file, or [[workload.tables]]"
        )
    keys = ("name", "batch_samples", "optimizer", "dtype", *DenseWork._fields)
    given = {key: getattr(section, key) for key in keys if getattr(section, key)}
    try:
        if section.preset or section.file:
            found = load_workload(section.file, is_training=is_training) if section.file else preset(section.preset)
        else:
            sized = [key for key in ("count", "embedding_dim") if not section.tables and not getattr(section, key)]
            tables = section.tables or (_alike(section),)
            found = specified(tables, sized, is_training=is_training, **{"name": name, **given})
        return _given(scaled(found, section.scale), section, given)
    except ValueError as error:
        begin = "workload" if not section.file else f"workload.file = {excerpt(section.file)}"
        is_named = isinstance(error, ConfigError) and not section.file
        raise ConfigError(str(error) if is_named else f"{begin}: {error}") from None


def _alike(section: WorkloadSection) -> TableSpec:
    """Equal tables of so many bytes or rows in all."""
    dim, count = section.embedding_dim or _DIM, section.count or _COUNT
    rows = section.rows or parse_size(section.bytes, name="workload.bytes", memory_bytes=0) // (4 * dim)
    return TableSpec(num_embeddings=math.ceil(rows / count), embedding_dim=dim, count=count)


def _given(found: Workload, section: WorkloadSection, given: dict[str, Any]) -> Workload:
    """With what the section says in place of what a file or preset has, or what was assumed."""
    of_tables: dict[str, Any] = {key: getattr(section, key) for key in _OF_TABLES if getattr(section, key) != _UNKNOWN}
    tables = list(found.tables)
    for figure, value in of_tables.items():
        names = {name for each in found.assumed if each.figure == figure for name in each.tables}
        tables = [replace(each, **{figure: value}) if each.name in names else each for each in tables]
    dense: dict[str, Any] = {
        name: 0.0 for name in DenseWork._fields if section.dense_flops
    }  # not of the file's layers then
    kept = tuple(each for each in found.assumed if each.figure not in dense | given | of_tables)
    return with_dense(replace(found, **dense | given, tables=tuple(tables), assumed=kept))


def preset(name: str) -> Workload:
    """A published model, by its name in any case. ValueError says the nearest."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ValueError(f"there is no preset {excerpt(name)}; {nearest(name.lower(), PRESETS)}")
    return found


def load_workload(source: str | os.PathLike[str], *, is_training: bool = False) -> Workload:
    """A preset by its name; or that of a run file, or of a file with a ``[workload]``, by its path. ``is_training`` as
    of ``workload_of``. ValueError: it is neither, or the file has an unknown key or a value that cannot be; names the
    file, the key and what is accepted."""
    text, path = os.fspath(source), Path(source)
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    if path.suffix != ".toml" and not path.exists():
        known = nearest(text.lower(), PRESETS, all_are="presets are")
        raise ValueError(f"{excerpt(text)} is neither a preset nor a workload file; {known}")
    sections = set(read_toml(path, "workload file"))
    if OF_RUNS & sections:
        return _of_run(path)
    if "table" in sections:
        raise ConfigError(f"{path}: write [[workload.tables]] in place of each [[table]]")
    section = load_sections(_File, path, what="workload file").workload
    if section.file:
        raise ConfigError(f"{path}: workload.file = {excerpt(section.file)}: give that file instead")
    try:
        return workload_of(section, path.stem, is_training=is_training)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def scaled(workload: Workload, factor: float) -> Workload:
    """With ``factor`` times the rows, of each table one at least. ValueError: the factor is 0 or too large."""
    if factor == 1:
        return workload
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor={factor}: expected a number above 0")
    tables = tuple(
        replace(
            each, num_embeddings=max(1, round(each.num_embeddings * factor)), candidates=round(each.candidates * factor)
        )
        for each in workload.tables
    )
    return replace(workload, name=f"{workload.name} x {factor:g}", tables=tables)


def _of_run(path: Path) -> Workload:
    """What a run trains: its tables, batch and optimizer, and the work of its DLRM, as without towers or a class of its
    own."""
    from ..train.config import load

    run = load(path)
    columns, dims = run.data.sparse_columns, [run.of_table(name).embedding.dim for name in run.data.sparse_columns]
    ids, counts = run.embedding.ids, run.embedding.ids == "dynamic" and run.embedding.admit_after > 1
    others = ("tower", "class", "args")
    layers: dict[str, Any] = {name: each for name, each in asdict(run.model).items() if not name.startswith(others)}
    return specified(
        [
            TableSpec(name=name, num_embeddings=size, embedding_dim=dim, ids=ids, candidates=counts * size)
            for name, size, dim in zip(columns, run.table_sizes, dims, strict=True)
        ],
        name=path.stem,
        batch_samples=run.train.batch_size,
        optimizer=run.optimizer.sparse,
        dtype=run.embedding.dtype,
        **dlrm_work(dims, num_dense=len(run.data.dense_columns), **layers)._asdict(),
    )


def describe_workload(workload: Workload) -> str:
    rows = sum(table.num_embeddings for table in workload.tables)
    ids = sum(table.pooling_factor for table in workload.tables)
    dim = max(table.embedding_dim for table in workload.tables)
    return (
        f"{workload.name}: {len(workload.tables)} tables, {rows:,} rows of {dim} columns, "
        f"{format_size(workload.table_bytes)}, {ids:g} lookups a sample, {workload.dense_flops / 1e6:g} Mflop a sample"
    )


def workload_toml(workload: Workload) -> str:
    """TOML: ``[workload]``, with ``[[workload.tables]]``; what is assumed is a comment."""
    unknown = {(each.figure, table) for each in workload.assumed for table in each.tables or ("",)}

    def line(each: Workload | TableShape, key: str, table: str = "") -> str:
        text = f"{key} = {toml_value(getattr(each, key))}"
        return f"# {text} # assumed" if (key, table) in unknown else text

    lines = ["[workload]"]
    lines += [line(workload, each.name) for each in fields(Workload) if each.name not in ("tables", "assumed")]
    for table in workload.tables:
        lines += ["", "[[workload.tables]]", *(line(table, each.name, table.name) for each in fields(TableShape))]
    return "\n".join(lines) + "\n"
