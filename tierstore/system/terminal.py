"""What commands share: their description, groups of them, tables, progress bars."""

import argparse
import contextlib
import functools
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


class Argument(NamedTuple):
    """What ``ArgumentParser.add_argument`` is given."""

    names: tuple[str, ...]
    settings: dict[str, Any]
    group: tuple[str, str] | None
    """Title and description of those that the help shows together."""


def arg(*names: str, group: tuple[str, str] | None = None, **settings: Any) -> Argument:
    """An argument; a word with dashes that has no metavar is a flag."""
    is_flag = names[0].startswith("-") and "metavar" not in settings and "choices" not in settings
    return Argument(names, settings | ({"action": "store_true"} if is_flag else {}), group)


def command(
    run: Callable[[argparse.Namespace], int], arguments: Sequence[Argument], text: str, *description: str
) -> Command:
    """``description``: sentences, and examples after them, or ""."""
    *sentences, examples = description

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        titles = dict.fromkeys(each.group for each in arguments if each.group is not None)
        groups = {title: parser.add_argument_group(*title) for title in titles}
        for each in arguments:
            to = parser if each.group is None else groups[each.group]
            to.add_argument(*each.names, **each.settings)

    return Command(run, add_arguments, text, " ".join(sentences), examples)


def show_help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 2


def group(
    commands: Callable[[], Mapping[str, Command]],
    help_text: str,
    description: str,
    examples: str = "",
    *,
    of_file: str = "",
) -> Command:
    return Command(show_help, lambda _: None, help_text, description, examples, commands, of_file)


def columns_of(rows: Sequence[Sequence[str]], *, is_last_text: bool = True) -> list[str]:
    """Lines: the first column to the left, those between to the right; the last to the left if it is text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = (0, len(widths) - 1) if is_last_text else (0,)
    return [
        "  ".join(
            text.ljust(width) if index in left else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@contextlib.contextmanager
def progress_bar(what: str, **look: Any) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, if that is a terminal; give it to a ``progress=``. ``look`` is tqdm's. It is called
    with what is done and the total, and what the bar is to be called from then on, if it changes."""
    from tqdm import tqdm

    with tqdm(desc=what, disable=None, leave=False, **look) as bar:

        def show(done: int, total: int, what: str | None = None) -> None:
            bar.total = total
            if what is not None:
                bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield show


byte_bar: Final = functools.partial(progress_bar, unit="B", unit_scale=True, unit_divisor=1024)
