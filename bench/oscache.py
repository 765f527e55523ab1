"""The operating system's page cache, as ``tierstore plan measure`` handles it."""

from tierstore.plan.measure.page_cache import drop, resident_share, warm, zap_maps

__all__ = ["drop", "resident_share", "warm", "zap_maps"]
