"""What a table is: a frozen, keyword-only description that the manifest keeps."""

from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, get_args

from . import init as initializers
from . import optim
from .errors import TableError
from .ids import DynamicIds
from .layout import MAX_ROWS, DtypeName, QuantizedName, RowLayout
from .system.checks import excerpt, hinting, require_choice, require_int

__all__ = ["MAX_KEPT_VERSIONS", "MAX_SLACK", "Pooling", "Rounding", "TableConfig", "require_names", "require_slack"]

Pooling = Literal["sum", "mean", "max"]
Rounding = Literal["nearest", "stochastic"]
_HALFS: Final = ("float16", "bfloat16")
MAX_KEPT_VERSIONS: Final = 1000
MAX_SLACK: Final = 10
_MAX_DIM: Final = 1 << 20
_MAX_NAME: Final = 200
_HIDDEN: Final = "\0"
_DROPPED: Final = "\0dropped "
_IDS: Final = "\0ids "


def require_names(names: object, name: str) -> None:
    """TypeError for a str, which is a sequence of one-letter names."""
    if isinstance(names, str):
        raise TypeError(f"{name} must be a list of names, not the str {excerpt(names)}")


def require_slack(value: object) -> None:
    """TypeError unless a number, ValueError unless above 1, and at most 10."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"slack must be a number, not {type(value).__name__}")
    if not 1 < value <= MAX_SLACK:
        raise ValueError(f"slack={excerpt(value)} must be above 1, and at most {MAX_SLACK}")


def _require_unicode(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={excerpt(text)} is no valid Unicode: {error.reason} at {error.start}") from None


@hinting(
    {
        "data_type": 'dtype="float16" says how rows are stored',
        "init_fn": "Table.write sets rows after create_table; init= takes a tierstore.init.Initializer",
        "weight_init_min": "init=tierstore.init.Uniform(low, high) has both",
        "weight_init_max": "init=tierstore.init.Uniform(low, high) has both",
        "mode": "pooling= says how bags are pooled",
        "lr": "it is the optimizer's, as optimizer=tierstore.optim.SGD(lr=0.1)",
    }
)
@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """One embedding table.

    Attributes:
        name: unique in the store.
        num_embeddings: rows; ids are in [0, num_embeddings).
        embedding_dim: columns.
        dtype: storage type of the weights: "float32", "float16" or "bfloat16", or "int8" or "int4" for quantized rows,
            which ``tierstore.quantize`` makes of trained ones. Arithmetic and pooled results are float32.
        rounding: how training rounds an updated weight to dtype: "nearest", or, of "float16" and "bfloat16" without
            hbm=, "stochastic": up or down by chance, so that on average small steps count in full. The random bits are
            a function of ``init``'s seed, the update, the row and the column; see ``tierstore/kernels/floats.py``.
        feature_names: features looked up in this table by a collection; default: the table's name.
        pooling: how a bag is pooled, in training and in serving: "sum", "mean" or "max". (The default of
            ``nn.EmbeddingBag`` is "mean".)
        init: first value of rows never written; default: Uniform(-0.01, 0.01, seed=0).
        ids: None: ids are [0, num_embeddings). DynamicIds(...): any int64 is an id, and num_embeddings is how many have
            rows at a time.
        optimizer: update rule of the rows, its state stored with each row; default: SGD(lr=0.01). A class is taken with
            its defaults.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: DtypeName = "float32"
    rounding: Rounding = "nearest"
    feature_names: tuple[str, ...] = ()
    pooling: Pooling = "sum"
    init: initializers.Initializer = field(default_factory=initializers.Uniform)
    optimizer: optim.Optimizer = field(default_factory=optim.SGD)
    ids: DynamicIds | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 0 < len(self.name) <= _MAX_NAME:
            raise ValueError(f"name={excerpt(self.name)} must be a str of 1 to {_MAX_NAME} characters")
        _require_unicode(self.name, "name")
        for name, high in (("num_embeddings", MAX_ROWS), ("embedding_dim", _MAX_DIM)):
            object.__setattr__(self, name, require_int(getattr(self, name), name, 1, high))
        require_choice(self.dtype, get_args(DtypeName), "dtype")
        require_choice(self.rounding, get_args(Rounding), "rounding")
        if self.rounding != "nearest" and self.dtype not in _HALFS:
            raise ValueError(
                f"rounding={self.rounding!r} goes with dtype {' or '.join(_HALFS)}, not {self.dtype}; leave it out"
            )
        require_choice(self.pooling, get_args(Pooling), "pooling")
        require_names(self.feature_names, "feature_names")
        names = tuple(self.feature_names) or (self.name,)
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise ValueError(f"feature_names={excerpt(names)} must be distinct strings")
        for name in names:
            _require_unicode(name, "feature_names")
        object.__setattr__(self, "feature_names", names)
        for name, base in (("init", initializers.Initializer), ("optimizer", optim.Optimizer)):
            given = getattr(self, name)
            if isinstance(given, type) and issubclass(given, base):  # the class is taken with its defaults
                object.__setattr__(self, name, given())
        if not isinstance(self.init, initializers.Initializer):
            raise TypeError(f"init must be a tierstore.init.Initializer, not {type(self.init).__name__}")
        if not isinstance(self.optimizer, optim.Optimizer):
            raise TypeError(f"optimizer must be a tierstore.optim.Optimizer, not {type(self.optimizer).__name__}")
        if self.ids is not None:
            if not isinstance(self.ids, DynamicIds):
                raise TypeError(f"ids must be a tierstore.DynamicIds, or None, not {type(self.ids).__name__}")
            require_int(self.num_embeddings, "num_embeddings of a table with dynamic ids", 1, 2**31 - 1)
        if self.dtype in get_args(QuantizedName) and self.optimizer.state_dim(self.embedding_dim):
            raise ValueError(
                f"dtype={self.dtype!r} goes without optimizer state, as such rows are not trained; leave optimizer out"
            )

    @property
    def is_hidden(self) -> bool:
        """Whether it is no table of the user's: one that was dropped, or that holds the ids of another."""
        return self.name.startswith(_HIDDEN)

    def require_fixed_ids(self, what: str) -> None:
        """TableError if the table has dynamic ids, which ``what`` does not know yet."""
        if self.ids is not None:
            raise TableError(f"table {self.name!r} has dynamic ids, which are not supported by {what} yet")

    @property
    def counts_unseen(self) -> bool:
        """Whether an id without a row counts as one, of its first value."""
        return self.ids is not None and self.ids.unseen == "init"

    def table_of_ids(self, place: int) -> "TableConfig":
        """What keeps the ids of this table, which is in that place (``store/stored_ids.py``): for each owner a row for
        what is of all, and one for each of its rows, in turn with the candidates if there are any."""
        assert self.ids is not None
        rows, candidates = map(self.ids.share, (self.num_embeddings, self.ids.num_candidates(self.num_embeddings)))
        rows = self.ids.owners * (1 + (2 * max(rows, candidates) if candidates else rows))
        return TableConfig(name=f"{_IDS}{place}", num_embeddings=rows, embedding_dim=4, init=initializers.Constant(0.0))

    def with_ids(self, place: int) -> tuple["TableConfig", ...]:
        """It, which is in that place, and if its ids are dynamic, what is in the next."""
        return (self,) if self.ids is None or self.is_dropped else (self, self.table_of_ids(place))

    @property
    def is_table_of_ids(self) -> bool:
        """Whether it holds the ids of the table in the place before."""
        return self.name.startswith(_IDS)

    @property
    def num_rows(self) -> int:
        """How many rows are numbered: ``num_embeddings``; of dynamic ids with several owners, what each has."""
        return self.num_embeddings if self.ids is None else self.ids.owners * self.ids.share(self.num_embeddings)

    @property
    def rows(self) -> range:
        """Those that a store uses: all, or of dynamic ids those of the owners that are here; row 0 if none is."""
        if self.ids is None:
            return range(self.num_rows)
        first, stop = (owner * self.ids.share(self.num_embeddings) for owner in self.ids.owned)
        return range(first, stop) or range(1)

    @property
    def is_dropped(self) -> bool:
        """Whether it only keeps the place of a table that was dropped, as a row's key has that place."""
        return self.name.startswith(_DROPPED)

    def dropped(self, place: int) -> "TableConfig":
        """What keeps the place of this table once it is dropped."""
        return replace(self, name=f"{_DROPPED}{place}", feature_names=())

    def keeps_rows_of(self, before: "TableConfig") -> bool:
        """Whether the rows of another table, written or not, are rows of this one, which may have more."""
        page_bytes = 4096  # the same for both
        own, other = ((each.layout(page_bytes), each.init, each.init.place) for each in (self, before))
        is_alike = own == other and self.keeps_ids_of(before)
        return is_alike and self.num_embeddings >= before.num_embeddings and not before.is_dropped

    def keeps_ids_of(self, before: "TableConfig") -> bool:
        """Whether the ids, scores and counts of another table are as of this one, which may have more."""
        rules, other = self.ids, before.ids
        if rules is None or other is None:
            return rules is other
        counts, counted = rules.num_candidates(self.num_embeddings), other.num_candidates(before.num_embeddings)
        is_stored_alike = rules.owners == other.owners and rules.eviction.scores == other.eviction.scores
        return is_stored_alike and counted <= counts and bool(counted) == bool(counts)

    def layout(self, page_bytes: int) -> RowLayout:
        """How this table's rows lie in memory and on disk."""
        return RowLayout(
            dim=self.embedding_dim,
            dtype=self.dtype,
            state_dim=self.optimizer.state_dim(self.embedding_dim),
            page_bytes=page_bytes,
        )

    def size_bytes(self, page_bytes: int) -> int:
        """Bytes of all rows with their state, were they all in memory."""
        return self.num_embeddings * self.layout(page_bytes).row_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form. ``rounding`` is left out where it is "nearest", so that releases that do not know it read
        other tables."""
        rounding = {} if self.rounding == "nearest" else {"rounding": self.rounding}
        return {
            "name": self.name,
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "dtype": self.dtype,
            **rounding,
            "feature_names": list(self.feature_names),
            "pooling": self.pooling,
            "init": self.init.to_dict(),
            "optimizer": self.optimizer.to_dict(),
            **({} if self.ids is None else {"ids": self.ids.to_dict()}),
        }

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "TableConfig":
        """Inverse of ``to_dict``. ValueError, TypeError, KeyError or OverflowError for anything it did not write."""
        rest = dict(fields)
        names, ids = rest.pop("feature_names"), rest.pop("ids", None)
        if not isinstance(names, list):
            raise TypeError(f"feature_names must be a list of names, not {excerpt(names)}")
        return cls(
            init=initializers.from_dict(rest.pop("init")),
            optimizer=optim.from_dict(rest.pop("optimizer")),
            feature_names=tuple(names),
            ids=None if ids is None else DynamicIds.from_dict(ids),
            **rest,
        )
