"""A file of settings in TOML, read whole: of bounded size, and with errors that name the file."""

import tomllib
from pathlib import Path
from typing import Any, Final

__all__ = ["parse_toml", "read_toml"]

_MAX_BYTES: Final = 1 << 18
_MAX_DOTS: Final = 200
_MAX_REASON: Final = 200


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The file's content.

    Args:
        what: the file is, for errors: "workload file".

    Raises:
        ValueError: it is missing, cannot be read, is too large or is no TOML; names the file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such {what}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; give a {what}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES} bytes, which no {what} has")
    try:
        return parse_toml(content.decode())
    except RecursionError:
        raise ValueError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, or of an integer with too many digits
        raise ValueError(f"{path} is not valid TOML: {str(error)[:_MAX_REASON]}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads``, which takes memory by the square of a dotted key's parts. ValueError or RecursionError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots; break it")
    return tomllib.loads(text)
