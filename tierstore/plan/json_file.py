"""Descriptions as JSON has them, and files of it, written whole or not at all."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..system.files import write_text


def plain(value: Any) -> Any:
    """Dicts, lists, texts, numbers and None in place of dataclasses, named tuples and arrays; None for infinities."""
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(content: Any, path: str | os.PathLike[str], *, force: bool = False, indent: int | None = 2) -> None:
    """Write what ``plain`` makes of it. FileExistsError without ``force``; others as of ``partial_file``."""
    write_text(Path(path), json.dumps(plain(content), indent=indent, allow_nan=False) + "\n", force=force)
