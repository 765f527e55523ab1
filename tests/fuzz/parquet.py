"""A Parquet file. What pyarrow makes of it is its business; no error but ours may come of it."""

import io

from tierstore.train.readers import DataError, ParquetReader, Schema

from .target import FindingError, Target, scratch_folder

_PATH = scratch_folder() / "x.parquet"
_SCHEMA = Schema(label="y", dense=("a",), sparse=("c", "d", "e"))


def run(data: bytes) -> None:
    _PATH.write_bytes(data)
    try:
        list(ParquetReader(_PATH, schema=_SCHEMA).read_chunks(1, None, 2))
    except DataError as error:
        if len(str(error)) > 1000:
            raise FindingError("an error without bound") from error


def seeds() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"y": [0, 1, 1, 0], "a": [1.5, None, 3.0, 4.0], "c": ["ff", "", None, "1"], "d": [1, 2, None, 4]}
    columns["e"] = [[1, 2], None, [], [3, None]]
    found = []
    for options in ({"compression": "none"}, {"compression": "snappy", "data_page_version": "2.0"}):
        file = io.BytesIO()
        pq.write_table(pa.table(columns), file, row_group_size=2, **options)
        found.append(file.getvalue())
    return found


TARGET = Target(run=run, seeds=seeds, dictionary=(b"PAR1", b"\x15\x00", b"\x15\xff\xff\xff\xff\x0f", b"\x19\xfc"))
