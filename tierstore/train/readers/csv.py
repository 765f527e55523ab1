"""CSV files with a header."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from ...kernels.arrays import Bytes
from ...kernels.jit import kernel
from ...system.checks import excerpt
from .arrow import ArrowReader
from .base import CRITEO_SCHEMA, DataError, Schema

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES: Final = 4 << 20  # text read at a time
_MAX_ROW_BYTES: Final = 16 << 20
_NO_NUMBER: Final = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to double: .*'(.*)'", re.DOTALL)
_OTHER_FIELDS: Final = re.compile(r"CSV parse error: Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", re.DOTALL)
"""Of pyarrow: columns are counted from 0, rows from 1."""
_DELIMITERS: Final = (b",", b"\t", b";", b"|")
_PACKED: Final = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"\x04\x22\x4d\x18", "lz4"), (b"BZh", "bz2"))
"""How compressed files begin."""
_BOM: Final = b"\xef\xbb\xbf"
_NEWLINE: Final = 10
_RETURN: Final = 13
_QUOTE: Final = 34


class CsvReader(ArrowReader):
    """Reads CSV, plain or compressed, with the names of the columns in its first line; an empty field is missing.
    Fields are separated by what the first line has most of: commas, tabs, semicolons or bars. With ``quoting`` a
    field that begins with a double quote ends with one, and may hold delimiters and line ends between. For errors
    see ``ArrowReader``."""

    endings: ClassVar = tuple(
        f".{kind}{packed}" for kind in ("csv", "tsv") for packed in ("", ".gz", ".bz2", ".zst", ".lz4")
    )
    what: ClassVar = "a CSV file with a header"
    reads_floats: ClassVar = True

    def __init__(self, path: str | Path, *, schema: Schema = CRITEO_SCHEMA, quoting: bool = True) -> None:
        self._quoting = quoting
        super().__init__(path, schema=schema)

    def _head(self, file: Path) -> tuple[list[str], None]:
        return _Text(file, quoting=self._quoting).names, None

    def _records(self, file: Path, *_: int) -> Iterator[tuple[int, "pa.RecordBatch"]]:
        """Lines are read to be skipped, and come in blocks of so many bytes."""
        import pyarrow as pa
        import pyarrow.csv

        text = _Text(file, quoting=self._quoting)
        # Texts as bytes: what they stand for is decided by each field, not by the first ones of a column.
        types = dict.fromkeys(self.schema.columns, pa.float64())
        types |= dict.fromkeys((*self.schema.categorical, *self.schema.labels), pa.binary())
        convert = pyarrow.csv.ConvertOptions(
            column_types=types, null_values=[""], strings_can_be_null=True, include_columns=self._columns
        )
        while rows := text.cut():
            try:
                table = text.parse(rows, column_names=text.names, convert=convert)
            except pa.ArrowInvalid as error:
                raise DataError(text.explain(str(error))) from error
            for record in table.to_batches():
                yield text.row, record
                text.row += record.num_rows


class _Text:
    """The text of a file, as blocks of whole rows. pyarrow, which parses them, has no error for a quote that is not
    closed, and loses a character of a line end at the edges of blocks that it cuts itself. ``row``: rows of the
    blocks before the current one."""

    def __init__(self, path: Path, *, quoting: bool) -> None:
        import pyarrow as pa

        self.row, self._path, self._quoting = 0, path, quoting
        with path.open("rb") as file:
            begin = file.read(max(len(magic) for magic, _ in _PACKED))
        packed = next((name for magic, name in _PACKED if begin.startswith(magic)), None)
        self._stream = pa.input_stream(str(path), compression=packed)
        self._rest, self._at_end, self._delimiter = b"", False, b","
        self._read()
        self._rest = self._rest.removeprefix(_BOM)
        self._delimiter = max(_DELIMITERS, key=self._rest.split(b"\n", 1)[0].count)
        self.names: list[str] = self.parse(self.cut(is_header=True)).schema.names

    def parse(self, rows: bytes, *, convert: Any = None, column_names: list[str] | None = None) -> "pa.Table":
        import pyarrow as pa
        import pyarrow.csv

        return pyarrow.csv.read_csv(
            pa.BufferReader(rows),
            read_options=pyarrow.csv.ReadOptions(
                use_threads=False, block_size=2 * _MAX_ROW_BYTES, column_names=column_names
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self._delimiter.decode(), quote_char='"' if self._quoting else False, newlines_in_values=True
            ),
            convert_options=convert,
        )

    def explain(self, reason: str) -> str:
        """The error of rows that pyarrow cannot parse or convert, with their place."""
        if found := _NO_NUMBER.search(reason):
            place = f"{self._path}, row {self.row + int(found[2]) - 1}, column {self.names[int(found[1])]}"
            return f"{place}: {excerpt(found[3])} is no number; leave the field empty where it is missing"
        if found := _OTHER_FIELDS.search(reason):
            place = f"{self._path}, row {self.row + int(found[1]) - 1}"
            return (
                f"{place}: {found[3]} fields, and the header has {found[2]}: {excerpt(found[4])}; a field that holds "
                "the delimiter stands in double quotes"
            )
        return f"{self._path}, row {self.row} or after it: {excerpt(reason)}"

    def cut(self, *, is_header: bool = False) -> bytes:
        """Take whole rows off the text: the header, or as many as are read; b"" at the end."""
        while True:
            letters = np.frombuffer(self._rest, np.uint8)
            end, rows, quote, is_wrong = 0, 0, -1, False
            if is_header or (self._quoting and b'"' in self._rest):
                end, rows, quote, is_wrong = find_rows(letters, ord(self._delimiter), self._quoting, is_header)
            else:
                end = 1 + max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r", 0, len(self._rest) - 1))
            is_long = len(self._rest) > _MAX_ROW_BYTES
            if is_wrong or (quote >= 0 and not end and (self._at_end or is_long)):
                begin = excerpt(self._rest[quote : quote + 80].decode(errors="replace"))
                raise DataError(
                    f"{self._path}, {'the header' if is_header else f'row {self.row + rows}'}: the quoted field "
                    f"{begin} {'goes on behind its closing quote' if is_wrong else 'is not closed'}; write a quote "
                    "within quotes twice, or set data.quoting = false, which takes quotes as characters like others"
                )
            if end or self._at_end:
                break
            if is_long:
                raise DataError(f"{self._path}, row {self.row}: longer than {_MAX_ROW_BYTES} bytes; is it CSV?")
            self._read()
        cut, self._rest = self._rest[:end], self._rest[end:]
        return cut

    def _read(self) -> None:
        more = self._stream.read(_BLOCK_BYTES)
        self._at_end = not more
        self._rest += more
        if self._at_end and self._rest and not self._rest.endswith(b"\n"):
            self._rest += b"\n"


@kernel
def find_rows(text: Bytes, delimiter: int, quoting: bool, one: bool) -> tuple[int, int, int, bool]:
    """The end of the last whole row of the text, or of the first one, and how many rows that are, empty lines aside.
    Then where the quote stands that opened a field that the text does not end, or -1; and whether the field goes
    on behind a closing quote."""
    begin, rows, opened, at = 0, 0, -1, 0
    is_first = True  # of a field
    while at < len(text):
        byte = text[at]
        if opened >= 0:
            if byte == _QUOTE:
                if at + 1 == len(text):
                    break
                follows = text[at + 1]
                if follows == _QUOTE:
                    at += 1
                elif follows in (delimiter, _NEWLINE, _RETURN):
                    opened = -1
                else:
                    return begin, rows, opened, True
        elif byte in (_NEWLINE, _RETURN):
            if byte == _RETURN and at + 1 == len(text):
                break
            rows += at > begin
            if byte == _RETURN and text[at + 1] == _NEWLINE:
                at += 1
            begin = at + 1
            is_first = True
            if one and rows:
                break
        elif quoting and is_first and byte == _QUOTE:
            opened = at
        else:
            is_first = byte == delimiter
        at += 1
    return begin, rows, opened, False
