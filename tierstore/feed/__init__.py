"""What each commit changed, put into a sink: Parquet files, Redis, or one of your own. See docs/online.md."""

import re
from typing import Any

from .base import Feed, Position, Sink

__all__ = ["Feed", "Position", "Sink", "open_sink"]


def open_sink(place: str, **settings: Any) -> Sink:
    """The sink of a folder; or of ``redis://``, ``rediss://`` or ``unix://``, with ``settings`` of ``RedisSink``.
    ValueError, ImportError, TierstoreError, OSError: it cannot be opened."""
    if re.match("(rediss?|unix)://", place):
        from .redis import RedisSink

        return RedisSink(place, **settings)
    if settings:
        raise ValueError(f"--{min(settings)} goes with --to redis://HOST:PORT/DB, not with {place}; leave it out")
    from .parquet import ParquetSink

    return ParquetSink(place)
