"""The table of README: what a newcomer asks first, each answer beside the system it is compared with."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["headline"]

_Figures = dict[str, Any]
_OURS: Final = "tierstore"


class _Line(NamedTuple):
    question: str
    benchmark: str
    ours: Callable[[_Figures], float]
    peer: str
    theirs: Callable[[_Figures], float]
    unit: str


def _cold(way: str) -> Callable[[_Figures], float]:
    return lambda figures: float(figures["cases"][0]["rates"][way]["median"])


def _trained(system: str) -> Callable[[_Figures], float]:
    return lambda figures: float(figures["train"]["lookups_per_s"]["row-wise Adagrad"][system]["median"])


def _criteo(run: str) -> Callable[[_Figures], float]:
    return lambda figures: float(figures[run]["samples_per_s"])


def _sharded(system: str) -> Callable[[_Figures], float]:
    """Steps/s of a DLRM over 2 ranks, row-wise, dim 64."""

    def rate(figures: _Figures) -> float:
        wanted = {"sharding_type": "row_wise", "dim": 64, "what": "DLRM", "ranks": 2}
        (point,) = [each for each in figures["steps"]["points"] if wanted.items() <= each.items()]
        return 1 / float(point["seconds"][system]["median"])

    return rate


_BAG: Final = "torch.nn.EmbeddingBag, sparse"
_FBGEMM: Final = "FBGEMM, table-batched"
_ROCKSDB: Final = "RocksDB MultiGet, one key a row, 32 threads"
_VERIFIED: Final = "tierstore, every row verified"
_IN_MEMORY: Final = "everything in memory"
_LINES: Final = (
    _Line("Training rows in memory", "overhead", _trained(_OURS), _BAG, _trained(_BAG), "lookups/s"),
    _Line("Training rows in memory", "overhead", _trained(_OURS), _FBGEMM, _trained(_FBGEMM), "lookups/s"),
    _Line("Reading rows from SSD", "cold", _cold(_VERIFIED), _ROCKSDB, _cold(_ROCKSDB), "rows/s"),
    _Line(
        "A DLRM on Criteo, 5 % of the tables in memory, the same bits",
        *("criteo", _criteo("DDR 5 % of tables"), f"tierstore, {_IN_MEMORY}", _criteo(_IN_MEMORY), "samples/s"),
    ),
    _Line("A DLRM over 2 processes, row-wise", "dist", _sharded(_OURS), "TorchRec", _sharded("TorchRec"), "steps/s"),
)


def _shown(value: float) -> str:
    return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def headline(results: dict[str, dict[str, Any]]) -> Sequence[Sequence[str]]:
    """Rows of cells, the columns' names first; without the benchmarks that have no results."""
    rows = [["", "tierstore", "compared with", "", "times"]]
    for line in _LINES:
        if line.benchmark in results:
            figures = results[line.benchmark]["figures"]
            ours, theirs = line.ours(figures), line.theirs(figures)
            question = f"[{line.question}](docs/benchmarks.md#{line.benchmark})"
            rows.append([question, f"{_shown(ours)} {line.unit}", line.peer, _shown(theirs), f"{ours / theirs:.2f}"])
    return rows
