"""What each command takes, frozen in ``arguments.txt``; ``python -m tests.cli.test_help`` writes that file."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from tierstore.cli.entry import build_parser

FROZEN = Path(__file__).with_name("arguments.txt")


def parsers(*words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser, and those of the commands in it."""
    parser = build_parser(words)
    for word in words:
        parser = commands(parser)[word]
    yield " ".join(words), parser
    for child in commands(parser):
        yield from parsers(*words, child)


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((each.choices for each in parser._actions if isinstance(each, argparse._SubParsersAction)), {})


def shown(action: argparse.Action) -> str:
    """A name, how often it may stand, what it may be, and its default."""
    name = "/".join(action.option_strings) or f"{action.metavar}"
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    default = "" if action.default in (None, False, argparse.SUPPRESS, []) else f"={action.default}"
    return f"{name}{action.nargs if isinstance(action.nargs, str) else ''}{choices}{default}"


def arguments() -> str:
    lines = []
    for name, parser in parsers():
        actions = [each for each in parser._actions if not isinstance(each, argparse._SubParsersAction)]
        lines.append(" ".join([f"{name}:", *map(shown, actions)]))
    return "\n".join(lines) + "\n"


def test_commands_take_what_they_took() -> None:
    assert arguments() == FROZEN.read_text(), "is that meant? python -m tests.cli.test_help"


def test_every_command_and_argument_says_what_it_is() -> None:
    for name, parser in parsers():
        assert parser.description, name
        assert parser.format_help().startswith(f"usage: {' '.join(['tierstore', *name.split()])}")
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (name, action)


if __name__ == "__main__":
    FROZEN.write_text(arguments())
