"""The rows of a table that were ever written, as a Parquet file: an id and a list of numbers a row."""

from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import torch

from ..errors import TierstoreError
from ..store import Table
from .keys import StateTensor, state_tensors
from .rows import CHUNK_BYTES

if TYPE_CHECKING:
    import pyarrow as pa

_ID, _WEIGHT = "id", "weight"


def write_parquet(
    table: Table, file: IO[bytes], *, state: bool, progress: Callable[[int, int], None] | None
) -> tuple[tuple[str, ...], int]:
    """Write a table's rows to a file; the names of the columns, and how many rows there are. Columns: ``id`` int64,
    ascending; ``weight``, ``embedding_dim`` float32; with ``state``, each state as ``export_store`` names it,
    float32. TierstoreError: there is no pyarrow."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        raise TierstoreError(
            "format=\"parquet\" needs pyarrow; install it with: pip install 'PATH_OF_THE_CHECKOUT[parquet]'"
        ) from None
    dim = table.config.embedding_dim
    states = state_tensors(table.config.optimizer, dim) if state else ()
    lists = [pa.float32() if each.per_row else pa.list_(pa.float32(), each.last - each.first) for each in states]
    columns = [(_ID, pa.int64()), (_WEIGHT, pa.list_(pa.float32(), dim))]
    schema = pa.schema(columns + [(each.name, kind) for each, kind in zip(states, lists, strict=True)])
    count, total = 0, table.size_bytes
    with parquet.ParquetWriter(file, schema) as writer:
        for ids in _some(table):
            writer.write_batch(pa.record_batch(_columns(table, ids, states, schema), schema=schema))
            count += len(ids)
            if progress is not None:
                progress((int(ids[-1]) + 1) * table.layout.row_bytes, total)
    return tuple(schema.names), count


def _some(table: Table) -> Iterator[torch.Tensor]:
    step = max(1, CHUNK_BYTES // (8 * (1 + table.config.embedding_dim + table.layout.state_dim)))
    for part in table.written():
        for first in range(0, len(part), step):
            yield part[first : first + step]


def _columns(table: Table, ids: torch.Tensor, states: tuple[StateTensor, ...], schema: "pa.Schema") -> list[Any]:
    import pyarrow as pa

    parts = [table.read(ids).float().cpu()]
    rest = table.read_state(ids) if states else None
    parts += [rest[:, each.first : each.last] for each in states if rest is not None]
    columns = [pa.array(ids.numpy())]
    for part, field in zip(parts, list(schema)[1:], strict=True):
        flat = pa.array(part.contiguous().reshape(-1).numpy())
        columns.append(
            flat if pa.types.is_float32(field.type) else pa.FixedSizeListArray.from_arrays(flat, type=field.type)
        )
    return columns
