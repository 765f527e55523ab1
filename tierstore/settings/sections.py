"""TOML to a frozen description made of sections and back, with errors that name the file, the key and the nearest
valid one. Run files and plan files are such."""

import contextlib
import dataclasses
import difflib
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ..system.checks import excerpt

_MAX_COUNT: Final = 1 << 31  # a bound far above any use, so that a typing error is reported at once
_MAX_CHARACTERS: Final = 100
_MAX_NAMES: Final = 20


def nearest(name: str, known: Iterable[str], *, all_are: str = "there are", otherwise: str = "") -> str:
    """The nearest of the known names; if none is near, ``otherwise``, or some of them, which ``all_are``."""
    names = list(known)
    close = difflib.get_close_matches(name[:_MAX_CHARACTERS], names, 1)
    if close or otherwise:
        return f"did you mean {close[0]!r}?" if close else otherwise
    return f"{all_are} {', '.join(names[:_MAX_NAMES]) or 'none'}{', ...' if len(names) > _MAX_NAMES else ''}"


def option(default: Any, text: str, *, low: float | None = None, high: float = _MAX_COUNT) -> Any:
    """A dataclass's field; ``check_ranges`` looks at it if it has a ``low``."""
    return field(default=default, metadata={"help": text, "low": low, "high": high})


def table_option(text: str) -> Any:
    """A dataclass's field that is a table of any keys, empty by default."""
    return field(default_factory=dict, hash=False, metadata={"help": text})


def check_ranges(description: Any) -> None:
    """ValueError, which names the field, its value and what is accepted, unless each field with a ``low`` is of its
    default's type and in [low, high]; an int may stand for a float, and for a word that is the default."""
    for each in fields(description):
        low, high = each.metadata.get("low"), each.metadata.get("high", _MAX_COUNT)
        value, word = getattr(description, each.name), isinstance(each.default, str)
        if low is None or (word and value == each.default):
            continue
        kind = int if word else type(each.default)
        if type(value) not in (int, kind) or not low <= value <= high:
            what, other = "number" if kind is float else "whole number", f' or "{each.default}"' * word
            raise ValueError(f"{each.name}={excerpt(value)}: expected a {what} from {low:,} to {high:,}{other}")


class Checked:
    """Base of a dataclass: its fields are in their ranges (``check_ranges``)."""

    def __post_init__(self) -> None:
        check_ranges(self)


_MAX_BYTES: Final = 1 << 18
_MAX_DOTS: Final = 200
_MAX_REASON: Final = 200
_BARE: Final = re.compile(r"[\w-]+", re.ASCII)  # a key that TOML takes without quotes
_TYPE_NAMES: Final = {
    int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"
}  # fmt: skip
_Description = TypeVar("_Description")


class ConfigError(ValueError):
    """A file of settings or an override that cannot be used; names the file, the key and what is accepted."""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The file's content; ConfigError, which names the file, if it is missing, too large or no TOML."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such {what}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a {what}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes, which no {what} has")
    try:
        return _parse_toml(content.decode())
    except (RecursionError, ValueError) as error:  # of TOML, of UTF-8, or of an integer with too many digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:_MAX_REASON]
        raise ConfigError(f"{path} is not valid TOML: {reason}") from None


def _parse_toml(text: str) -> dict[str, Any]:
    """``tomllib.loads``, which takes memory by the square of a dotted key's parts. ValueError or RecursionError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS:
            raise ValueError(f"line {number} has more than {_MAX_DOTS} dots; break it")
    return tomllib.loads(text)


class Override(NamedTuple):
    """One key set from outside the file."""

    section: str
    key: str
    value: Any
    origin: str  # what set it, for errors: a flag with its value


def parse_override(text: str, *, example: str) -> Override:
    """``section.key=value``, the value in TOML or a bare word; ConfigError, with the example, for another form."""
    name, equals, value_text = text.partition("=")
    section, dot, key = name.strip().partition(".")
    origin = f"--set {text}" if len(text) <= _MAX_REASON else f"--set {text[:_MAX_REASON]}..."
    if not equals or not dot or not key:
        raise ConfigError(f"{origin}: expected section.key=value, as in {example}")
    try:
        value = _parse_toml(f"value = {value_text}")["value"]
    except (ValueError, RecursionError):
        value = value_text.strip()
    return Override(section, key, value, origin)


def load_sections(
    cls: type[_Description], path: str | Path | None, overrides: Iterable[Override] = (), *, what: str
) -> _Description:
    """Read a file, if any, then set what ``overrides`` say; of two for one key the later one wins. ConfigError: no
    TOML, an unknown section or key, a value of the wrong type or range.

    Args:
        cls: a dataclass of dataclasses, the sections; a list of tables becomes a tuple of dataclasses. Their checks
            raise a ValueError that begins with the key, as ``check_ranges`` does, or a ConfigError with section and
            key.
        what: the file is, for errors: "run file".
    """
    tables = {} if path is None else read_toml(Path(path), what)
    for name, keys in tables.items():
        if not isinstance(keys, dict):
            known = ", ".join(get_type_hints(cls))
            raise ConfigError(f"{path}: key {excerpt(name)} stands outside a section; sections are {known}")
    origins = {}
    for section, key, value, origin in overrides:
        *names, last = key.split(".")
        origins[section, key.partition(".")[0]] = origin
        table = tables.setdefault(section, {})
        for name in names:
            inner = table.get(name)
            table[name] = inner if isinstance(inner, dict) else {}
            table = table[name]
        table[last] = value
    return sections_of(cls, tables, str(path), origins)


def sections_of(
    cls: type[_Description], document: Mapping[str, Mapping[str, Any]], file: str,
    origins: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> _Description:  # fmt: skip
    """What ``to_dict`` gave, as a description; a ConfigError names the origin of the section and key, or the file."""
    known, sections = get_type_hints(cls), {}
    for name, keys in document.items():
        sources = {key: origins.get((name, key), file) for key in keys}
        if name not in known:
            origin = next(iter(sources.values()), file)
            raise ConfigError(f"{origin}: unknown section [{_plain(name)}]; {nearest(name, known)}")
        sections[name] = _section(known, name, keys, sources)
    try:
        return cls(**sections)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def to_dict(description: Any) -> dict[str, dict[str, Any]]:
    """Sections of plain JSON-able values; tables within have no keys of None, which TOML has not."""

    def listed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: listed(item) for key, item in value.items() if item is not None}
        return [listed(item) for item in value] if isinstance(value, tuple) else value

    sections = dataclasses.asdict(description)
    return {name: {key.rstrip("_"): listed(value) for key, value in keys.items()} for name, keys in sections.items()}


def to_toml(description: Any, *, with_help: bool = False) -> str:
    """A file that is read back as ``description``; with help, a comment above each key says what it is."""
    known = get_type_hints(type(description))
    lines: list[str] = []
    for section, keys in to_dict(description).items():
        lines.append(f"[{section}]")
        for option in dataclasses.fields(known[section]):
            if with_help:
                lines.append(f"# {option.metadata['help']}")
            lines.append(f"{(name := option.name.rstrip('_'))} = {toml_value(keys[name])}")
        lines.append("")
    return "\n".join(lines)


def _section(known: Mapping[str, type], name: str, keys: Mapping[str, Any], source: Mapping[str, str]) -> Any:
    cls = known[name]
    hints = get_type_hints(cls)
    attributes = {attribute.rstrip("_"): attribute for attribute in hints}  # "class_" of the key "class"
    values = {}
    for key, value in keys.items():
        if key not in attributes:
            elsewhere = [f"it belongs to [{other}]" for other, kind in known.items() if key in get_type_hints(kind)]
            hint = nearest(key, attributes, otherwise=next(iter(elsewhere), ""))
            raise ConfigError(f'{source[key]}: unknown key "{_plain(key)}" in [{name}]; {hint}')
        try:
            values[attributes[key]] = converted(value, hints[attributes[key]], f"{name}.{key}")
        except ConfigError as error:
            raise ConfigError(f"{source[key]}: {error}") from None
    try:
        return cls(**values)
    except ValueError as error:
        # The message begins with the key at fault; a value that is not at its default came from somewhere.
        said = str(error) if isinstance(error, ConfigError) else f"{name}.{error}"
        key = re.split("[ =]", said, maxsplit=1)[0].removeprefix(f"{name}.")
        raise ConfigError(f"{source[key]}: {said}" if key in source else said) from None


def _plain(name: str) -> str:
    return excerpt(name).replace("'", "")


def converted(value: Any, annotation: Any, key: str, *, is_whole: bool = False) -> Any:
    """What a file has as the annotated type: a number, text or truth value, one of some literals, a tuple of a list, a
    dataclass of a table, ``is_whole`` as of ``described``. ConfigError, which begins with ``key``: it is something
    else.
    """
    origin, is_number = get_origin(annotation), isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        for option in get_args(annotation):
            with contextlib.suppress(ConfigError):
                return converted(value, option, key)
    elif origin is Literal:
        if value in get_args(annotation):
            return value
    elif origin is tuple:
        if isinstance(value, Sequence) and not isinstance(value, str):
            (each, *_), items = get_args(annotation), enumerate(value)
            return tuple(converted(item, each, f"{key}[{index}]", is_whole=is_whole) for index, item in items)
    elif origin is dict:
        if isinstance(value, Mapping):
            each = get_args(annotation)[1]
            return {k: item if each is Any else converted(item, each, f"{key}.{k}") for k, item in value.items()}
    elif dataclasses.is_dataclass(annotation):
        if isinstance(value, Mapping):
            return described(cast(type[Any], annotation), value, key, is_whole=is_whole)
    elif annotation is float and is_number:
        with contextlib.suppress(OverflowError):
            return float(value)
    elif type(value) is annotation:
        return value
    raise ConfigError(f"{key} = {excerpt(value)}: expected {_describe(annotation)}")


def described(
    cls: type[_Description], table: Mapping[str, Any], where: str = "", *, is_whole: bool = False
) -> _Description:
    """A dataclass of a file's table. ConfigError, which begins with ``where`` the table is: a key is unknown or
    missing (with ``is_whole``, of any field but texts that are empty by default), or its value cannot be."""
    hints, begin = get_type_hints(cls), f"{where}: " if where else ""
    for key in table:
        if key not in hints:
            raise ConfigError(f'{begin}unknown key "{_plain(key)}"; {nearest(key, hints)}')
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        has_default = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
        if each.name not in table and ((is_whole and each.default != "") or not has_default):
            raise ConfigError(f'{begin}key "{each.name}" is missing')
    name = f"{where}." if where else ""
    values = {key: converted(value, hints[key], f"{name}{key}", is_whole=is_whole) for key, value in table.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{begin}{error}") from None


def _describe(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{option}"' for option in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(map(_describe, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"a list, each {_describe(get_args(annotation)[0])}"
    if dataclasses.is_dataclass(annotation):
        return f"a table with {', '.join(each.name for each in dataclasses.fields(annotation))}"
    return _TYPE_NAMES.get(annotation, "a table")


def toml_value(value: Any) -> str:
    """A string, number, boolean, list or dict, as TOML has it on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML's basic strings escape what JSON's do, and may hold any other character.
        escaped = "".join(f"\\u{ord(c):04x}" if c < " " or c in '"\\\x7f' else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, list):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        items = {key if _BARE.fullmatch(key) else toml_value(key): toml_value(item) for key, item in value.items()}
        return f"{{{', '.join(f'{key} = {item}' for key, item in items.items())}}}"
    return repr(value)
