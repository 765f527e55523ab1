"""Readers: rows of click data as batches, from Criteo's text format, Parquet, CSV or npy arrays."""

from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from ...ids.texts import CategoryRule
from ...system.checks import excerpt_names as _excerpt_names
from ...system.places import near as _near
from .arrow import ParquetReader
from .arrow import is_data as _is_data
from .arrow import names_below as _names_below
from .base import CRITEO_SCHEMA, Batch, DataError, DataFile, Reader, Schema, dense_features
from .categories import Categories, FeatureHasher
from .criteo import CriteoReader
from .csv import CsvReader
from .following import FollowingReader
from .npy import NpyReader

__all__ = [
    "CRITEO_SCHEMA", "Batch", "Categories", "CategoryRule", "CriteoReader", "CsvReader", "DataError", "DataFile",
    "DataFormat", "FeatureHasher", "FollowingReader", "NpyReader", "ParquetReader", "Reader", "Schema",
    "dense_features", "open_reader",
]  # fmt: skip

DataFormat = Literal["auto", "criteo", "parquet", "csv", "npy"]


_ONE_FILE: Final = "Criteo's text format is one file: name one of the days, or join them with cat"


def open_reader(
    path: str | Path, *, data_format: DataFormat = "auto", schema: Schema = CRITEO_SCHEMA, quoting: bool = True
) -> Reader:
    """Open the data at ``path``.

    Args:
        data_format: "auto" takes a folder with label.npy as npy, ``*.csv`` and ``*.tsv``, plain or compressed, and a
            folder of such files as CSV, ``*.parquet``, ``*.pq`` and a folder of such files as Parquet. With Criteo's
            own columns it takes ``*.tsv`` and all other files as Criteo's text format.
        schema: the columns to read, of which Criteo's text format knows only its own, and what categories are.
        quoting: whether a field of CSV may stand in double quotes; False takes them as any other character.

    Raises:
        DataError: there is nothing at the path, or what is there is not in the format. TierstoreError: of a URL.
        ValueError: an unknown format, another schema with Criteo's text format, or a name that tells no format.
    """
    path = _near(str(path))
    if not path.exists():
        raise DataError(f"{path} does not exist; give the data's path with --data PATH or the key data.path")
    own = {name: getattr(schema, name) for name in ("rule", "longest", "group", "segment")}
    is_criteo = schema == replace(CRITEO_SCHEMA, **own) and schema.categorical == schema.sparse
    if data_format == "auto":
        data_format = _guess(path, is_criteo=is_criteo)
    if schema.times and data_format not in ("parquet", "npy"):
        raise ValueError(f"times of lists are for Parquet and npy; {path} is read as {data_format}: leave them out")
    if data_format == "csv":
        return CsvReader(path, schema=schema, quoting=quoting)
    if not quoting:
        raise ValueError(f"data.quoting = false is for CSV; {path} is read as {data_format}: leave the key out")
    if data_format in ("parquet", "npy"):
        return (ParquetReader if data_format == "parquet" else NpyReader)(path, schema=schema)
    if data_format != "criteo":
        raise ValueError(f'data_format={data_format!r}: expected "auto", "criteo", "parquet", "csv" or "npy"')
    if path.is_dir():
        raise DataError(f"{path} is a folder; {_ONE_FILE}")
    if not is_criteo:
        raise ValueError("columns can be chosen for Parquet, CSV and npy; Criteo's text format has fixed ones")
    return CriteoReader(path, schema=schema)


def _guess(path: Path, *, is_criteo: bool) -> DataFormat:
    if (path / "label.npy").exists():
        return "npy"
    names = _names_below(path) if path.is_dir() else [path.name]
    csv = tuple(each for each in CsvReader.endings if "tsv" not in each) if is_criteo else CsvReader.endings
    is_parquet = any(_is_data(name, ParquetReader.endings) for name in names)
    is_csv = any(_is_data(name, csv) for name in names)
    if is_parquet and is_csv:
        raise DataError(f"{path} holds both Parquet and CSV files; set data.format to that of the files to read")
    if is_parquet or is_csv:
        return "parquet" if is_parquet else "csv"
    if path.is_dir():
        raise DataError(
            f"{path} holds neither a Parquet file (*{', *'.join(ParquetReader.endings)}) nor a CSV file "
            f"(*{', *'.join(csv)}) nor label.npy, but {_excerpt_names(names) or 'nothing'}; {_ONE_FILE}"
        )
    if not is_criteo:
        raise DataError(
            f"cannot tell the format of {path} by its name; set data.format to parquet, csv or npy, or leave out "
            "data.label_column, dense_columns and sparse_columns if it is Criteo's text"
        )
    return "criteo"
