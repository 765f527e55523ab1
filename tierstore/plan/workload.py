"""A workload: the tables of a model, what a sample looks up, and what a DLRM's dense part computes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, get_args

from ..ids.id_map import map_bytes
from ..layout import MAX_ROWS, DtypeName, QuantizedName, RowLayout
from ..optim.configs import RULES, RuleName
from ..settings.sections import Checked, option
from ..system.checks import excerpt, require_choice

OptimizerName = Literal["none", RuleName]
Figure = Literal["dense_flops", "pooling_factor", "exponent"]
POOLING_FACTOR: Final = 1.0
EXPONENT: Final = 1.05
_UNKNOWN: Final = -1.0
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
    pooling_factor: float = option(POOLING_FACTOR, "ids a sample, on average", low=0)
    exponent: float = option(
        EXPONENT, "of Zipf's law of the rows' popularity, where no trace says it; 0: uniform", low=0
    )
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
    """A figure that nobody gave; ``tables``: names of those of which it is, of the dense model none."""

    figure: Figure
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


def specified(specs: Sequence[TableSpec], **figures: Any) -> Workload:
    """The workload of a file's tables. What it does not say is assumed: one id a sample, by Zipf's law, and the layers
    of MLPerf's DLRM-DCNv2."""
    found = Workload(tables=tuple(shape for spec in specs for shape in spec.shapes()), **figures)
    assumed = []
    if not found.dense_flops:
        flops = dlrm_work([table.embedding_dim for table in found.tables], **MLPERF_LAYERS).dense_flops
        found, assumed = replace(found, dense_flops=flops), [Assumed("dense_flops")]
    for figure in get_args(Figure)[1:]:
        own = (shape.name for spec in specs if getattr(spec, figure) == _UNKNOWN for shape in spec.shapes())
        assumed.append(Assumed(figure, tuple(own)))
    return replace(found, assumed=tuple(each for each in assumed if each.tables or each.figure == "dense_flops"))


def assumptions(workload: Workload) -> list[str]:
    """What nobody said, each with its value; of tables of different values the first's."""
    found, every = [], len(workload.tables)
    for figure, names in workload.assumed:
        if figure == "dense_flops":
            layers = "the layers of MLPerf's DLRM-DCNv2 over these tables"
            found.append(f"dense model: {workload.dense_flops / 1e6:.3g} Mflop a sample, forward: {layers}")
            continue
        value = next(float(getattr(each, figure)) for each in workload.tables if each.name == names[0])
        tables = f"{len(names):,} of " * (len(names) < every) + f"{every:,} table{'s' * (every != 1)}"
        text = {"pooling_factor": "pooling factor: {:g} id a sample", "exponent": "skew: Zipf's law of exponent {:g}"}
        found.append(f"{text[figure].format(value)}, in {tables}")
    return found
