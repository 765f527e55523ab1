"""Files in JSON: written whole or not at all, and read where they say what they hold."""

import json
import os
from pathlib import Path
from typing import Any

from ..system.excerpt import excerpt
from ..system.output import write_text

__all__ = ["read_json", "write_json"]


def write_json(content: Any, path: str | os.PathLike[str], *, force: bool = False, indent: int | None = 2) -> None:
    """Write it.

    Raises:
        FileExistsError: there is such a file, and ``force`` is not given. Else as of ``partial_file``.
        ValueError: a number is not finite, which JSON has no word for.
    """
    write_text(Path(path), json.dumps(content, indent=indent, allow_nan=False) + "\n", force=force)


def read_json(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """A file whose ``kind`` is the given one.

    Raises:
        ValueError: it is not; names the file. FileNotFoundError.
    """
    name = os.fspath(path)
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON: {excerpt(str(error))}") from error
    if not isinstance(found, dict) or found.get("kind") != kind:
        given = found.get("kind") if isinstance(found, dict) else found
        raise ValueError(f"{name} does not hold {kind}, but {excerpt(given)}")
    return found
