"""The cold tier: rows on a device. Contract: ``base``; on a device: ``lmdb``; in memory: ``memory``."""

from .base import ColdCounters, ColdTier, NewerVersion, VerifyReport
from .files import MAX_PAGE_BYTES, ROW_FILE_NAME, require_plain_files
from .lmdb import LmdbColdTier
from .memory import MemoryColdTier

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
