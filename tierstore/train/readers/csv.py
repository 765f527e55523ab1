"""CSV files with a header."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ...system.excerpt import excerpt
from .arrow import ArrowReader, Head

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES: Final = 4 << 20
"""Text parsed at a time."""
_NO_NUMBER: Final = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to double: invalid value '(.*)'", re.DOTALL
)
"""Of pyarrow: columns are counted from 0, rows from 1, and the header is one."""
_DELIMITERS: Final = (b",", b"\t", b";", b"|")


class CsvReader(ArrowReader):
    """Reads CSV, plain or compressed, with the names of the columns in its first line; an empty field is missing.

    Fields are separated by what the first line has most of: commas, tabs, semicolons or bars. For errors see
    ``ArrowReader``.
    """

    endings: ClassVar = tuple(f".{kind}{packed}" for kind in ("csv", "tsv") for packed in ("", ".gz", ".bz2", ".zst"))
    what: ClassVar = "a CSV file with a header"
    reads_floats: ClassVar = True

    def _head(self, file: Path) -> Head:
        with self._opened(file, column_types={}) as records:
            return Head(records.schema.names)

    def _explain(self, file: Path, error: Exception) -> str:
        found = _NO_NUMBER.search(str(error))
        if found is None:
            return super()._explain(file, error)
        place = f"row {int(found[2]) - 2}, column {self._head(file).names[int(found[1])]}"
        return f"{file}, {place}: {excerpt(found[3])} is no number; leave the field empty where it is missing"

    def _records(self, file: Path, skip: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:  # noqa: ARG002 (lines are read to be skipped)
        row = 0
        with self._opened(file, include_columns=self._columns) as records:
            for record in records:
                yield row, record
                row += record.num_rows

    def _opened(self, file: Path, **options: Any) -> Any:
        import pyarrow as pa
        import pyarrow.csv

        with pa.input_stream(str(file), compression="detect") as stream:
            header = stream.read(_BLOCK_BYTES).split(b"\n", 1)[0]
        # Texts as bytes: what they stand for is decided by each field, not by the first ones of a column.
        types = {name: pa.binary() for name in (*self.schema.sparse, self.schema.label)}
        types |= {name: pa.float64() for name in self.schema.dense}
        return pyarrow.csv.open_csv(
            pa.input_stream(str(file), compression="detect"),
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=max(_DELIMITERS, key=header.count).decode(), newlines_in_values=True
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                **{"column_types": types, "null_values": [""], "strings_can_be_null": True} | options
            ),
        )
