"""The cold tier: rows on a device. Contract, and its twin in memory: ``base``; on a device: ``lmdb``."""

from .base import ColdCounters, ColdTier, MemoryColdTier, NewerVersion, VerifyReport
from .files import MAX_PAGE_BYTES, ROW_FILE_NAME, require_plain_files
from .lmdb import LmdbColdTier

__all__ = [
    "MAX_PAGE_BYTES",
    "ROW_FILE_NAME",
    "ColdCounters",
    "ColdTier",
    "LmdbColdTier",
    "MemoryColdTier",
    "NewerVersion",
    "VerifyReport",
    "require_plain_files",
]
