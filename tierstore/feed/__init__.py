"""What each commit changed, put into a sink: Parquet files, Redis, or one of your own. See docs/online.md."""

import os
import re
import zlib
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..system import places
from . import parquet, redis
from .base import Feed, Position, Sink

__all__ = ["Feed", "Position", "Sink", "consumer_of", "open_sink"]


def consumer_of(place: str, prefix: str) -> str:
    """A consumer's name for a sink, without secrets: its readable part, and a checksum of all that tells it apart."""
    name = places.shown(place if ":" in place else os.path.abspath(place))
    key = repr((name, parse_qs(urlsplit(place).query).get("db"), prefix))
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{name[-80:]}-{zlib.crc32(key.encode()):08x}").strip("-")


def open_sink(place: str, **settings: Any) -> Sink:
    """The sink of a folder; or of ``redis://``, ``rediss://`` or ``unix://``, with ``settings`` of ``RedisSink``.
    ValueError, ImportError, TierstoreError, OSError: it cannot be opened."""
    if re.match("(rediss?|unix)://", place):
        return redis.RedisSink(place, **settings)
    if settings:
        raise ValueError(f"--{min(settings)} goes with --to redis://HOST:PORT/DB, not with {place}; leave it out")
    return parquet.ParquetSink(place)
