"""What commands share: their description, groups of them, progress bars."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

__all__ = ["Command", "byte_bar", "group", "progress_bar", "show_help"]


class Command(NamedTuple):
    """One command of ``tierstore``; ``run`` returns the exit status.

    Attributes:
        commands: of a group, which runs nothing itself: gives those in it, and loads what they need only then.
        of_file: of a group: the command that is meant where a file's name stands in place of one.
    """

    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str
    description: str
    examples: str = ""
    commands: "Callable[[], Mapping[str, Command]] | None" = None
    of_file: str = ""


def show_help(options: argparse.Namespace) -> int:
    """What runs where a command is missing."""
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
    """A command that is a group of commands."""
    return Command(show_help, lambda _: None, help_text, description, examples, commands, of_file)


@contextlib.contextmanager
def byte_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes; see ``progress_bar``."""
    with progress_bar(what, unit="B", unit_scale=True, unit_divisor=1024) as show:
        yield show


@contextlib.contextmanager
def progress_bar(what: str, **look: Any) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, if that is a terminal; give it to a ``progress=``.

    Args:
        look: of tqdm: unit, bar_format and the like.

    Returns:
        called with what is done and the total, and what the bar is to be called from then on, if it changes.
    """
    from tqdm import tqdm

    with tqdm(desc=what, disable=None, leave=False, **look) as bar:

        def show(done: int, total: int, what: str | None = None) -> None:
            bar.total = total
            if what is not None:
                bar.set_description_str(what, refresh=False)
            bar.update(done - bar.n)

        yield show
