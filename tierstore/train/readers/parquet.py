"""Parquet files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from .arrow import ArrowReader, Head

if TYPE_CHECKING:
    import pyarrow as pa

_RECORD_ROWS: Final = 8192
"""Rows converted at a time."""


class ParquetReader(ArrowReader):
    """Reads Parquet: numbers for dense columns, numbers, strings or lists of them for sparse ones; null is missing.

    Row groups before the first wanted row are not read. For errors see ``ArrowReader``.
    """

    endings: ClassVar = (".parquet", ".pq")
    what: ClassVar = "a Parquet file"

    def _head(self, file: Path) -> Head:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as parquet:
            return Head(parquet.schema_arrow.names, parquet.metadata.num_rows)

    def _records(self, file: Path, skip: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as parquet:
            row, groups = 0, list(range(parquet.num_row_groups))
            while groups and row + (rows := parquet.metadata.row_group(groups[0]).num_rows) <= skip:
                row += rows
                groups.pop(0)
            for record in parquet.iter_batches(
                _RECORD_ROWS, row_groups=groups, columns=self._columns, use_threads=False
            ):
                yield row, record
                row += record.num_rows
