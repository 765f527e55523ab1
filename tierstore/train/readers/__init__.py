"""Readers: rows of click data as batches, from Criteo's text format, Parquet or npy arrays."""

from .base import CRITEO_SCHEMA, Batch, DataError, RawRows, Reader, Schema, dense_features
from .criteo import CriteoReader
from .hashing import FeatureHasher, HashedIds
from .npy import NpyReader
from .open import open_reader
from .parquet import ParquetReader

__all__ = [
    "CRITEO_SCHEMA",
    "Batch",
    "CriteoReader",
    "DataError",
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
