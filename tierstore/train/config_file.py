"""TOML to a ``RunConfig`` and back, with errors that name the file, the key and the nearest valid one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..settings import sections
from ..settings.sections import Override, to_dict, to_toml
from .config import RunConfig

__all__ = ["Override", "from_dict", "load", "parse_override", "to_dict", "to_toml"]


def parse_override(text: str) -> Override:
    """``section.key=value``, the value in TOML or a bare word.

    Raises:
        ConfigError: the text is not of this form.
    """
    return sections.parse_override(text, example="train.batch_size=512")


def load(path: str | Path, overrides: Iterable[Override] = ()) -> RunConfig:
    """Read a run file, then set what ``overrides`` say; of two for one key the later one wins.

    Raises:
        ConfigError: for a file that is not TOML, an unknown section or key, a value of the wrong type or range.
    """
    return sections.load_sections(RunConfig, path, overrides, what="run file")


def from_dict(document: Mapping[str, Mapping[str, Any]], origin: str) -> RunConfig:
    """What ``to_dict`` gave, as a configuration; ConfigError names ``origin`` where it is of another release."""
    return sections.sections_of(RunConfig, document, origin)
