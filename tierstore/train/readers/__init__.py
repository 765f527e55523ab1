"""Readers: rows of click data as batches, from Criteo's text format, Parquet, CSV or npy arrays."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from .base import CRITEO_SCHEMA, Batch, DataError, RawRows, Reader, Schema, dense_features
from .categories import Categories
from .criteo import CriteoReader
from .csv import CsvReader
from .hashing import FeatureHasher, HashedIds
from .npy import NpyReader
from .parquet import ParquetReader

__all__ = [
    "CRITEO_SCHEMA",
    "Batch",
    "Categories",
    "CriteoReader",
    "CsvReader",
    "DataError",
    "DataFormat",
    "FeatureHasher",
    "HashedIds",
    "NpyReader",
    "ParquetReader",
    "RawRows",
    "Reader",
    "Schema",
    "dense_features",
    "open_reader",
]

DataFormat = Literal["auto", "criteo", "parquet", "csv", "npy"]


def open_reader(path: str | Path, *, data_format: DataFormat = "auto", schema: Schema = CRITEO_SCHEMA) -> Reader:
    """Open the data at ``path``.

    Args:
        data_format: "auto" takes a folder with label.npy as npy, ``*.csv`` and ``*.tsv``, plain or compressed, and a
            folder of such files as CSV, ``*.parquet``, ``*.pq`` and other folders as Parquet. With Criteo's own columns
            it takes ``*.tsv`` and all other files as Criteo's text format.
        schema: the columns to read; Criteo's text format knows only its own.

    Raises:
        DataError: if there is nothing at the path, or what is there is not in the format.
        ValueError: for an unknown format, another schema with Criteo's text format, or a name that tells no format.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the data's path with --data PATH or the key data.path")
    if data_format == "auto":
        data_format = _guess(path, is_criteo=schema == CRITEO_SCHEMA)
    readers: dict[str, Callable[..., Reader]] = {"npy": NpyReader, "parquet": ParquetReader, "csv": CsvReader}
    if data_format in readers:
        return readers[data_format](path, schema=schema)
    if data_format != "criteo":
        raise ValueError(f'data_format={data_format!r}: expected "auto", "criteo", "parquet", "csv" or "npy"')
    if path.is_dir():
        raise DataError(f"{path} is a folder; Criteo's text format is one file")
    if schema != CRITEO_SCHEMA:
        raise ValueError("columns can be chosen for Parquet, CSV and npy; Criteo's text format has fixed ones")
    return CriteoReader(path)


def _guess(path: Path, *, is_criteo: bool) -> DataFormat:
    if (path / "label.npy").exists():
        return "npy"
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    if any(name.endswith(ParquetReader.endings) for name in names):
        return "parquet"
    endings = tuple(each for each in CsvReader.endings if "tsv" not in each) if is_criteo else CsvReader.endings
    if any(name.endswith(endings) for name in names):
        return "csv"
    if path.is_dir():
        return "parquet"
    if not is_criteo:
        raise DataError(
            f"cannot tell the format of {path} by its name; set data.format to parquet, csv or npy, or leave out "
            "data.label_column, dense_columns and sparse_columns if it is Criteo's text"
        )
    return "criteo"
