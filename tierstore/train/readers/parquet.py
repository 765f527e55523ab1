"""Parquet files."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from .arrow import ArrowReader, Head

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_RECORD_ROWS: Final = 32768
_RECORD_BYTES: Final = 8 << 20
"""Converted at a time: so many rows, or fewer whose values take so much."""
_VALUE_BYTES: Final = 8
_BUFFER_BYTES: Final = 1 << 20
"""Read at a time of each column."""


class ParquetReader(ArrowReader):
    """Reads Parquet: numbers for dense columns, numbers, strings or lists of them for sparse ones; null is missing.
    Row groups before the first wanted row are not read. For errors see ``ArrowReader``."""

    endings: ClassVar = (".parquet", ".pq")
    what: ClassVar = "a Parquet file"

    def _head(self, file: Path) -> Head:
        with _opened(file) as parquet:
            return Head(parquet.schema_arrow.names, parquet.metadata.num_rows)

    def _records(self, file: Path, skip: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        with _opened(file) as parquet:
            row, groups = 0, list(range(parquet.num_row_groups))
            while groups and row + (rows := parquet.metadata.row_group(groups[0]).num_rows) <= skip:
                row += rows
                groups.pop(0)
            if not groups:
                return  # pyarrow 18 cannot read none
            size = self._record_rows(parquet.metadata, groups)
            for record in parquet.iter_batches(size, row_groups=groups, columns=self._columns, use_threads=False):
                yield row, record
                row += record.num_rows

    def _record_rows(self, metadata: "parquet.FileMetaData", groups: list[int]) -> int:
        """Rows that are converted at once: as many as fit if all are as long as on average in the worst row group."""
        names = set(self._columns)
        paths = [metadata.row_group(groups[0]).column(index).path_in_schema for index in range(metadata.num_columns)]
        wanted = [index for index, path in enumerate(paths) if path.split(".")[0] in names]
        rows = _RECORD_ROWS
        for number in groups:
            group = metadata.row_group(number)
            columns = [group.column(index) for index in wanted]
            size = sum(max(each.total_uncompressed_size, _VALUE_BYTES * each.num_values) for each in columns)
            rows = min(rows, _RECORD_BYTES * group.num_rows // size) if size else rows
        return max(rows, 1)


def _opened(file: Path) -> "parquet.ParquetFile":
    """Pre-buffering would keep every row group read so far, and without a buffer a column's whole part of a group."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
