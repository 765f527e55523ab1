"""TOML to a ``RunConfig`` and back, with errors that name the file, the key and the nearest valid one."""

import dataclasses
import difflib
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..excerpt import excerpt
from .config import ConfigError, RunConfig

__all__ = ["Override", "from_dict", "load", "parse_override", "to_dict", "to_toml"]

_MAX_BYTES: Final = 1 << 18
_MAX_DOTS: Final = 200
_MAX_REASON: Final = 200
_MAX_NAME: Final = 100
_SECTIONS: Final[dict[str, type]] = get_type_hints(RunConfig)
_TYPE_NAMES: Final = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


class Override(NamedTuple):
    """One key set from outside the run file."""

    section: str
    key: str
    value: Any
    origin: str
    """What set it, for errors: a flag with its value."""


def parse_override(text: str) -> Override:
    """``section.key=value``, the value in TOML or a bare word.

    Raises:
        ConfigError: the text is not of this form.
    """
    name, equals, value_text = text.partition("=")
    section, dot, key = name.strip().partition(".")
    origin = f"--set {text}" if len(text) <= _MAX_REASON else f"--set {text[:_MAX_REASON]}..."
    if not equals or not dot or not key:
        raise ConfigError(f"{origin}: expected section.key=value, as in train.batch_size=512")
    try:
        value = _loads(f"value = {value_text}")["value"]
    except (ValueError, RecursionError):
        value = value_text.strip()
    return Override(section, key, value, origin)


def load(path: str | Path, overrides: Iterable[Override] = ()) -> RunConfig:
    """Read a run file, then set what ``overrides`` say; of two for one key the later one wins.

    Raises:
        ConfigError: for a file that is not TOML, an unknown section or key, a value of the wrong type or range.
    """
    tables = _parse(Path(path))
    source = {section: {key: str(path) for key in keys} for section, keys in tables.items()}
    for section, key, value, origin in overrides:
        tables.setdefault(section, {})[key] = value
        source.setdefault(section, {})[key] = origin
    sections = {}
    for name, keys in tables.items():
        if name not in _SECTIONS:
            origin = next(iter(source[name].values()), str(path))
            raise ConfigError(f"{origin}: unknown section [{_plain(name)}]{_nearest(name, _SECTIONS)}")
        sections[name] = _section(name, keys, source[name])
    try:
        return RunConfig(**sections)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_dict(document: Mapping[str, Mapping[str, Any]], origin: str) -> RunConfig:
    """What ``to_dict`` gave, as a configuration; ConfigError names ``origin`` where it is of another release."""
    sections = {}
    for name, keys in document.items():
        if name not in _SECTIONS:
            raise ConfigError(f"{origin}: unknown section [{_plain(name)}]{_nearest(name, _SECTIONS)}")
        sections[name] = _section(name, keys, dict.fromkeys(keys, origin))
    return RunConfig(**sections)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Sections of plain JSON-able values."""
    return {
        section: {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()}
        for section, keys in dataclasses.asdict(config).items()
    }


def to_toml(config: RunConfig, *, with_help: bool = False) -> str:
    """A run file that ``load`` reads back as ``config``; with help, a comment above each key says what it is."""
    lines: list[str] = []
    for section, keys in to_dict(config).items():
        lines.append(f"[{section}]")
        for option in dataclasses.fields(_SECTIONS[section]):
            if with_help:
                lines.append(f"# {option.metadata['help']}")
            lines.append(f"{option.name} = {_toml_value(keys[option.name])}")
        lines.append("")
    return "\n".join(lines)


def _parse(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such run file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a run file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes, which no run file has")
    try:
        document = _loads(content.decode())
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from None
    except ValueError as error:  # of TOML, of UTF-8, or of an integer with too many digits
        raise ConfigError(f"{path} is not valid TOML: {str(error)[:_MAX_REASON]}") from None
    for name, keys in document.items():
        if not isinstance(keys, dict):
            raise ConfigError(
                f"{path}: key {excerpt(name)} stands outside a section; sections are {', '.join(_SECTIONS)}"
            )
    return document


def _loads(text: str) -> dict[str, Any]:
    """``tomllib.loads``, which takes memory by the square of a dotted key's parts. ValueError or RecursionError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots; break it")
    return tomllib.loads(text)


def _section(name: str, keys: Mapping[str, Any], source: Mapping[str, str]) -> Any:
    cls = _SECTIONS[name]
    hints = get_type_hints(cls)
    values = {}
    for key, value in keys.items():
        if key not in hints:
            raise ConfigError(f'{source[key]}: unknown key "{_plain(key)}" in [{name}]{_nearest(key, hints, name)}')
        try:
            values[key] = _convert(value, hints[key])
        except TypeError as error:
            raise ConfigError(f"{source[key]}: {name}.{key} = {excerpt(value)}: expected {error}") from None
    try:
        return cls(**values)
    except ConfigError as error:
        # The message begins with the key at fault; a value that is not at its default came from somewhere.
        key = str(error).split(" ", 1)[0].removeprefix(f"{name}.")
        raise ConfigError(f"{source[key]}: {error}" if key in source else str(error)) from None


def _plain(name: str) -> str:
    return excerpt(name).replace("'", "")


def _nearest(name: str, valid: Iterable[str], section: str | None = None) -> str:
    """What to say after an unknown name."""
    names = list(valid)
    close = difflib.get_close_matches(name[:_MAX_NAME], names, n=1)
    if close:
        return f'; did you mean "{close[0]}"?'
    elsewhere = [s for s, cls in _SECTIONS.items() if section and name in get_type_hints(cls)]
    if elsewhere:
        return f"; it belongs to [{elsewhere[0]}]"
    return f"; expected one of {', '.join(names)}"


def _convert(value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type; TypeError says what was expected."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        options = get_args(annotation)
        for option in options:
            try:
                return _convert(value, option)
            except TypeError:
                continue
        raise TypeError(" or ".join(_describe(option) for option in options))
    if origin is Literal:
        matches = value in get_args(annotation)
    elif origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(_convert(item, get_args(annotation)[0]) for item in value)
        matches = False
    elif annotation is float:
        matches = isinstance(value, int | float) and not isinstance(value, bool)
        try:
            value = float(value) if matches else value
        except OverflowError:
            matches = False
    else:
        matches = type(value) is annotation
    if not matches:
        raise TypeError(_describe(annotation))
    return value


def _describe(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{option}"' for option in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"a list, each {_describe(get_args(annotation)[0])}"
    return _TYPE_NAMES[annotation]


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings escape what JSON's do, and may hold any other character.
        escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return repr(value)
