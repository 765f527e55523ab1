"""Readers: rows of click data as batches, from Criteo's text format, Parquet or npy arrays."""

from pathlib import Path
from typing import Literal

from .base import CRITEO_SCHEMA, Batch, DataError, RawRows, Reader, Schema, dense_features
from .criteo import CriteoReader
from .hashing import FeatureHasher, HashedIds
from .npy import NpyReader
from .parquet import ParquetReader

__all__ = [
    "CRITEO_SCHEMA",
    "Batch",
    "CriteoReader",
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

DataFormat = Literal["auto", "criteo", "parquet", "npy"]


def open_reader(path: str | Path, *, data_format: DataFormat = "auto", schema: Schema = CRITEO_SCHEMA) -> Reader:
    """Open the data at ``path``.

    Args:
        data_format: "auto" takes a folder with dense.npy as npy, any other folder and ``*.parquet`` as Parquet, the
            rest as Criteo's text format.
        schema: the columns to read; Criteo's text format knows only its own.

    Raises:
        DataError: if there is nothing at the path, or what is there is not in the format.
        ValueError: for an unknown format, or another schema with Criteo's text format.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path} does not exist; give the data's path with --data PATH or the key data.path")
    if data_format == "auto":
        if path.is_dir():
            data_format = "npy" if (path / "dense.npy").exists() else "parquet"
        else:
            data_format = "parquet" if path.suffix == ".parquet" else "criteo"
    if data_format == "npy":
        return NpyReader(path, schema=schema)
    if data_format == "parquet":
        return ParquetReader(path, schema=schema)
    if data_format != "criteo":
        raise ValueError(f'data_format={data_format!r}: expected "auto", "criteo", "parquet" or "npy"')
    if path.is_dir():
        raise DataError(f"{path} is a folder; Criteo's text format is one file")
    if schema != CRITEO_SCHEMA:
        raise ValueError("columns can be chosen for Parquet and npy; Criteo's text format has fixed ones")
    return CriteoReader(path)
