"""What a step moves: bytes by formula, for pieces of tables. docs/planning/placement.md draws it together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..accesses import Accesses, of_table, once_a_batch
from ..analytic import expected_distinct
from ..host import Host, Memory
from ..workload import Workload
from .costs import ID_BYTES
from .shapes import Piece, Shapes

__all__ = [
    "TableDemand",
    "Traffic",
    "core_seconds",
    "dense_bytes",
    "dense_flops",
    "expected_demand",
    "measured_demand",
    "row_rate",
    "traffic",
]

_FLOAT_BYTES = 4


class TableDemand(NamedTuple):
    """Of one table in a step.

    Attributes:
        lookups: ids.
        distinct: rows that they name.
    """

    lookups: float
    distinct: float


class Traffic(NamedTuple):
    """Of some pieces in a step.

    Attributes:
        row_bytes: read and written by rows, in the memory where the pieces are.
        id_bytes: of the ids that are sent to them.
        output_bytes: of the pooled rows that they send, in float32; as much again comes back as gradients in training.
    """

    row_bytes: float
    id_bytes: float
    output_bytes: float

    def __add__(self, other: "Traffic") -> "Traffic":  # type: ignore[override]
        return Traffic(*(ours + theirs for ours, theirs in zip(self, other, strict=True)))


def expected_demand(workload: Workload) -> dict[str, TableDemand]:
    """By each table's pooling factor and Zipf's law of its exponent."""
    found = {}
    for table in workload.tables:
        lookups = workload.batch_samples * table.pooling_factor
        found[table.name] = TableDemand(lookups, expected_distinct(table.num_embeddings, lookups, table.exponent))
    return found


def measured_demand(workload: Workload, accesses: Accesses) -> dict[str, TableDemand]:
    """Means over the batches of accesses, which are taken to be of the workload's size.

    Raises:
        ValueError: no batch, or a table of the workload is not in them.
    """
    if not accesses.num_batches:
        raise ValueError("the accesses have no batch")
    missing = next((table.name for table in workload.tables if table.name not in accesses.tables), None)
    if missing is not None:
        raise ValueError(f"the accesses have no table {missing!r}; they have {', '.join(accesses.tables)}")
    batches, rate = accesses.all_batches, accesses.sampling_rate
    found = {}
    for table in workload.tables:
        own = of_table(accesses, accesses.tables.index(table.name))
        lookups = len(own.keys) / rate if own.all_lookups is None else sum(own.all_lookups)
        distinct = min(lookups, len(once_a_batch(own).keys) / rate)
        found[table.name] = TableDemand(lookups / batches, distinct / batches)
    return found


def traffic(shapes: Shapes, pieces: Sequence[Piece], demand: Mapping[str, TableDemand]) -> Traffic:
    """Of these pieces together.

    Rows: each id's weights are read and each bag written; in training each id's gradient is read, and each distinct
    row with its state is read and written. Ids go to each piece that has columns of their rows, results come from each
    piece: of a table divided by rows every part sends partial sums of all its bags.
    """
    found = Traffic(0.0, 0.0, 0.0)
    for piece in pieces:
        found += _of_piece(shapes, piece, demand[shapes.table(piece).name])
    return found


def _of_piece(shapes: Shapes, piece: Piece, demand: TableDemand) -> Traffic:
    workload, shape = shapes.workload, shapes.lookup(piece)
    lookups, distinct = (amount * shapes.row_share(piece) for amount in demand)
    output = float(shape.output_bytes)
    rows = lookups * shape.weight_bytes + output
    if workload.is_training:
        rows += lookups * _FLOAT_BYTES * piece.num_columns + 2 * distinct * shapes.row_bytes(piece)
    return Traffic(rows, ID_BYTES * lookups, output)


def core_seconds(host: Host, shapes: Shapes, pieces: Sequence[Piece], demand: Mapping[str, TableDemand]) -> float:
    """Of all cores of a host, for lookups in these pieces and, in training, their updates: ``host.costs`` over its
    cores."""
    costs, nanoseconds = host.costs, 0.0
    for piece in pieces:
        lookups = demand[shapes.table(piece).name].lookups * shapes.row_share(piece)
        size = shapes.lookup(piece).weight_bytes
        nanoseconds += lookups * (costs.pool_ns + costs.pool_ns_per_byte * size)
        if shapes.workload.is_training:
            nanoseconds += lookups * (costs.update_ns + costs.update_ns_per_byte * size)
    return (nanoseconds * 1e-9 + costs.batch_us * 1e-6) / host.processor.cores


def row_rate(memory: Memory, name: str) -> float:
    """Bytes a second by rows at random, or in order where that is all that is known.

    Raises:
        ValueError: neither is.
    """
    rate = memory.row_bytes_per_s or memory.bytes_per_s
    if not rate:
        raise ValueError(f"{name} has no row_bytes_per_s and no bytes_per_s; give one")
    return rate


def dense_flops(workload: Workload) -> float:
    """Of a step's batch beside the tables; training takes twice as many again for the gradients."""
    return workload.batch_samples * workload.dense_flops * (3 if workload.is_training else 1)


def dense_bytes(workload: Workload) -> float:
    """Of the dense gradients, at most: two flops a sample and weight, four bytes a weight."""
    return 4 * workload.dense_flops / 2
