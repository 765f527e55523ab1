"""A workload: the tables of a model, what a sample looks up, and what a DLRM's dense part computes; published ones by
name, others from the ``[workload]`` of a file or from a run file of ``tierstore train``."""

import functools
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
from ..settings.sections import Checked, ConfigError, converted, load_sections, nearest, option, read_toml, toml_value
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

    def shapes(self, **others: float) -> list[TableShape]:
        """``others``: figures that are not known here."""
        own = {each.name: getattr(self, each.name) for each in fields(TableShape)}
        known = {name: value for name, value in own.items() if value != _UNKNOWN}
        first, alike = TableShape(**others | known), range(self.count)
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


@functools.cache
def presets() -> Mapping[str, WorkloadSection]:
    """Published models, by name."""
    found = read_toml(Path(__file__).with_name("presets.toml"), "file of presets")
    return {name: converted({**own, "name": name}, WorkloadSection, name) for name, own in found.items()}


@dataclass(frozen=True, kw_only=True)
class _File:
    workload: WorkloadSection = WorkloadSection()


def workload_of(section: WorkloadSection, *, is_training: bool = False) -> Workload:
    """``is_training``: if the section does not say it. ValueError: it names no tables, or some that there are not, or a
    value that cannot be."""
    try:
        whole = _whole(section)
        found = scaled(_filled(whole, is_training=is_training), whole.scale)
    except ValueError as error:
        begin = "workload" if not section.file else f"workload.file = {excerpt(section.file)}"
        is_named = isinstance(error, ConfigError) and not section.file
        raise ConfigError(str(error) if is_named else f"{begin}: {error}") from None
    return replace(found, name=section.name or found.name)


def _whole(section: WorkloadSection) -> WorkloadSection:
    """With what its file or preset says, where it says nothing itself. A dense part of other flops is another one."""
    if not (section.file or section.preset):
        return section
    base, nothing = _read(section.file or section.preset), WorkloadSection()
    changes: dict[str, Any] = dict.fromkeys(DenseWork._fields, 0.0) if section.dense_flops else {}
    changes |= {key: value for key, value in vars(section).items() if value != getattr(nothing, key)}
    return replace(base, **changes | {"scale": base.scale * section.scale, "file": "", "preset": ""})


def _filled(section: WorkloadSection, *, is_training: bool) -> Workload:
    """The workload of its tables. What it does not say is assumed: one id a sample, by Zipf's law; one sample a query;
    in training row-wise Adagrad; a dense part as of MLPerf's DLRM-DCNv2 over these tables, its layers as wide as take
    the flops, if they are known. Of 1 flop, which stands for tables alone, the other figures of it are 0."""
    if not any(getattr(section, key) for key in _SOURCES):
        raise ConfigError(
            f"workload.bytes = '': give the size of all tables, as --bytes 300GB; or workload.preset, one of "
            f"{', '.join(presets())}; or workload.file, or [[workload.tables]]"
        )
    keys = ("optimizer", "batch_samples", "dtype", *DenseWork._fields)
    given: dict[str, Any] = {key: getattr(section, key) for key in keys if getattr(section, key)}
    specs, assumed = section.tables or _alike(section), list[Assumed]()
    for key in ("count", "embedding_dim"):
        if section.tables and getattr(section, key):
            raise ConfigError(f"workload.{key} = {getattr(section, key)}: of workload.bytes or rows only; leave it out")
        assumed += [] if section.tables or getattr(section, key) else [Assumed(key)]
    if is_training and not section.optimizer:
        given["optimizer"] = "rowwise_adagrad"
        assumed.append(Assumed("optimizer"))
    if not section.batch_samples:
        given["batch_samples"] = _QUERY if given.get("optimizer", "none") == "none" else _STEP
        assumed.append(Assumed("batch_samples"))
    others = {figure: value for figure in _OF_TABLES if (value := getattr(section, figure)) != _UNKNOWN}
    for figure in _OF_TABLES:
        own = tuple(shape.name for spec in specs if getattr(spec, figure) == _UNKNOWN for shape in spec.shapes())
        assumed += [Assumed(figure, own)] if own and figure not in others else []
    shapes = tuple(shape for spec in specs for shape in spec.shapes(**others))
    found = Workload(name=section.name or "workload", tables=shapes, **given)
    work, flops = dlrm_work([each.embedding_dim for each in shapes], **MLPERF_LAYERS), found.dense_flops
    width = math.sqrt(flops / work.dense_flops) if flops else 1.0
    taken = work._replace(dense_values=work.dense_values * width)._asdict()
    unknown = [name for name in taken if not getattr(found, name) and flops != 1]
    return replace(found, **{name: taken[name] for name in unknown}, assumed=(*assumed, *map(Assumed, unknown)))


def _alike(section: WorkloadSection) -> tuple[TableSpec]:
    """Equal tables of so many bytes or rows in all."""
    dim, count = section.embedding_dim or _DIM, section.count or _COUNT
    rows = section.rows or parse_size(section.bytes, name="workload.bytes", memory_bytes=0) // (4 * dim)
    if not 1 <= rows <= count * MAX_ROWS:
        raise ConfigError(
            f"workload.bytes = {excerpt(section.bytes)}: {rows:,} rows of {dim} columns, and {count} tables have 1 to "
            f"{count * MAX_ROWS:,}; give bytes, as 300GB, or another workload.count"
        )
    return (TableSpec(num_embeddings=math.ceil(rows / count), embedding_dim=dim, count=count),)


def load_workload(source: str | os.PathLike[str]) -> Workload:
    """A published model by its name in any case; or that of a run file, or of a file with a ``[workload]``, by its
    path. ValueError: it is neither, or the file has an unknown key or a value that cannot be; names the file, the key
    and what is accepted."""
    found = _read(source)
    try:
        return workload_of(found)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _read(source: str | os.PathLike[str]) -> WorkloadSection:
    """What ``load_workload`` is of, as far as it is said there."""
    text, path = os.fspath(source), Path(source)
    if text.lower() in presets():
        return presets()[text.lower()]
    if path.suffix != ".toml" and not path.exists():
        known = nearest(text.lower(), presets(), all_are="presets are")
        raise ValueError(f"{excerpt(text)} is neither a preset nor a workload file; {known}")
    sections = set(read_toml(path, "workload file"))
    if OF_RUNS & sections:
        return _of_run(path)
    if "table" in sections:
        raise ConfigError(f"{path}: write [[workload.tables]] in place of each [[table]]")
    section = load_sections(_File, path, what="workload file").workload
    if section.file:
        raise ConfigError(f"{path}: workload.file = {excerpt(section.file)}: give that file instead")
    return _whole(replace(section, name=section.name or path.stem))


def scaled(workload: Workload, factor: float) -> Workload:
    """With ``factor`` times the rows, of each table one at least. ValueError: the factor is 0 or too large."""
    if factor == 1:
        return workload
    if not 0 < factor < float("inf"):
        raise ValueError(f"scale = {factor:g}: expected a number above 0")
    tables = tuple(
        replace(
            each, num_embeddings=max(1, round(each.num_embeddings * factor)), candidates=round(each.candidates * factor)
        )
        for each in workload.tables
    )
    return replace(workload, name=f"{workload.name} x {factor:g}", tables=tables)


def _of_run(path: Path) -> WorkloadSection:
    """What a run trains: its tables, batch and optimizer, and the work of its DLRM, as without towers or a class of its
    own."""
    from ..train.config import load

    run = load(path)
    columns, dims = run.data.sparse_columns, [run.of_table(name).embedding.dim for name in run.data.sparse_columns]
    ids, counts = run.embedding.ids, run.embedding.ids == "dynamic" and run.embedding.admit_after > 1
    others = ("tower", "class", "args")
    layers: dict[str, Any] = {name: each for name, each in asdict(run.model).items() if not name.startswith(others)}
    return WorkloadSection(
        tables=tuple(
            TableSpec(name=name, num_embeddings=size, embedding_dim=dim, ids=ids, candidates=counts * size)
            for name, size, dim in zip(columns, run.table_sizes, dims, strict=True)
        ),
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
