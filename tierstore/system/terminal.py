"""What commands share: their description, groups of them, tables, progress bars."""

import argparse
import contextlib
import functools
import html
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple


class Command(NamedTuple):
    """One command of ``tierstore``; ``run`` returns the exit status."""

    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str
    description: str
    examples: str = ""
    commands: "Callable[[], Mapping[str, Command]] | None" = None
    """Of a group, which runs nothing itself: gives those in it, and loads what they need only then."""
    of_file: str = ""
    """Of a group: the command that is meant where a file's name stands in place of one."""


_PAUSE_SECONDS: Final = 10.0  # between lines of progress where there is no terminal
Argument = tuple[tuple[str, ...], dict[str, Any], tuple[str, str] | None]
"""What ``ArgumentParser.add_argument`` is given; title and description of those that the help shows together."""


def arg(*names: str, group: tuple[str, str] | None = None, **settings: Any) -> Argument:
    """An argument; a word with dashes that has no metavar is a flag."""
    is_flag = names[0].startswith("-") and "metavar" not in settings and "choices" not in settings
    return names, ({"action": "store_true"} if is_flag else {}) | settings, group


KeyFlags = Mapping[str, tuple[str, Callable[[str], object], Any, str]]
"""Flags that stand for one key of a settings file: key, type, metavar or choices, help."""


def key_arguments(flags: KeyFlags) -> Iterator[Argument]:
    for flag, (key, kind, what, text) in flags.items():
        shown = {"metavar" if type(what) is str else "choices": what}
        yield arg(flag, dest=key, type=kind, help=f"{text} ({key})", **shown)


def command(
    run: Callable[[argparse.Namespace], int], arguments: Sequence[Argument], text: str, *description: str
) -> Command:
    """``description``: sentences, and examples after them, or ""."""
    *sentences, examples = description

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        groups: dict[Any, Any] = {None: parser}
        for names, settings, title in arguments:
            if title is not None and title not in groups:
                groups[title] = parser.add_argument_group(*title)
            groups[title].add_argument(*names, **settings)

    return Command(run, add_arguments, text, " ".join(sentences), examples)


def show_help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 2


def group(
    commands: Callable[[], Mapping[str, Command]], help_text: str, description: str, examples: str = "", *,
    of_file: str = "",
) -> Command:  # fmt: skip
    return Command(show_help, lambda _: None, help_text, description, examples, commands, of_file)


def columns_of(rows: Sequence[Sequence[str]], *, is_last_text: bool = True) -> list[str]:
    """Lines: the first column to the left, those between to the right; the last to the left if it is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *">" * (len(widths) - 2), "<" if is_last_text else ">"][: len(widths)]
    forms = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def html_table(*rows: Sequence[object]) -> str:
    """A table for notebooks; the first row is its head."""
    head, *body = ("".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head.replace('td>', 'th>')}</tr>{''.join(f'<tr>{row}</tr>' for row in body)}</table>"


@contextlib.contextmanager
def progress_bar(what: str, **look: Any) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, or a line every 10 s, to give as ``progress=``. ``look`` is tqdm's. It is called with
    what is done and the total, and what the bar is to be called from then on, if it changes."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield _lines(what)
        return
    from tqdm import tqdm

    with tqdm(desc=what, leave=False, **look) as bar:

        def show(done: int, total: int, what: str | None = None) -> None:
            bar.total = total
            if what is not None:
                bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield show


def _lines(what: str) -> Callable[..., None]:
    shown = time.monotonic()

    def show(done: int, total: int, now: str | None = None) -> None:
        nonlocal shown, what
        what = now or what
        if time.monotonic() >= shown + _PAUSE_SECONDS and sys.stderr is not None:
            shown = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr)

    return show


byte_bar: Final = functools.partial(progress_bar, unit="B", unit_scale=True, unit_divisor=1024)
