"""The help of every command is that of ``help.txt``; ``python -m tests.cli.test_help`` writes that file."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from tierstore.cli import entry as cli

SNAPSHOT = Path(__file__).parent / "help.txt"
HEAD = "\n=== "


def commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0] if found else {}


def parsers(*words: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser, and those of the commands in it."""
    parser = cli.build_parser(words)
    for word in words:
        parser = commands(parser)[word]
    yield " ".join(["tierstore", *words]), parser
    for child in commands(parser):
        yield from parsers(*words, child)


def snapshot() -> str:
    return "".join(f"{HEAD}{name}\n{parser.format_help()}" for name, parser in parsers())


def by_command(text: str) -> dict[str, list[str]]:
    """Words only: Python's versions break lines differently."""
    parts = (part.split("\n", 1) for part in text.split(HEAD)[1:])
    return {name: words.split() for name, words in parts}


def test_help_is_that_of_the_snapshot() -> None:
    found, expected = by_command(snapshot()), by_command(SNAPSHOT.read_text())
    assert list(found) == list(expected)
    for name, words in found.items():
        assert words == expected[name], f"{name}; is that meant? python -m tests.cli.test_help"


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 2
    assert "usage: tierstore" in capsys.readouterr().out


if __name__ == "__main__":
    os.environ |= {"COLUMNS": "110", "NO_COLOR": "1"}
    SNAPSHOT.write_text(snapshot())
