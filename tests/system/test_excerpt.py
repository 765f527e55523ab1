"""What error messages show of a value, and what plain files are."""

import os
from pathlib import Path

import pytest

from tierstore.errors import FormatError, TierstoreError, TruncatedError
from tierstore.system.checks import excerpt, excerpt_names
from tierstore.system.files import read_plain_file, require_plain_file


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("abc", "'abc'"),
        ("x" * 81, f"'{'x' * 80}'..."),
        (b"y" * 10**6, f"b'{'y' * 80}'..."),
        ("\x1b[2J\n", r"'\x1b[2J\n'"),
        (10**5000, "an integer of 16610 bits"),
        (["x" * 100], "['" + "x" * 78 + "..."),
        ([10**5000], "a list that cannot be printed"),
    ],
    ids=range(7),
)
def test_excerpts(value: object, expected: str) -> None:
    assert excerpt(value) == expected


def test_names() -> None:
    assert excerpt_names(["b", "a"]) == "b, a"
    many = excerpt_names([f"c{i}" for i in range(10**5)])
    assert many.startswith("c0, c1, ")
    assert many.endswith("c39 and 99960 more")


def test_plain_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    require_plain_file(path)
    with pytest.raises(FileNotFoundError):
        read_plain_file(path, 10)
    with pytest.raises(FileNotFoundError):
        read_plain_file(path / "below", 10)
    path.write_bytes(b"")
    with pytest.raises(TruncatedError, match="file is empty"):
        read_plain_file(path, 10)
    path.write_bytes(bytes(10))
    assert read_plain_file(path, 10) == bytes(10)
    with pytest.raises(FormatError, match="has 10 bytes and may have 9"):
        read_plain_file(path, 9)
    os.truncate(path, 1 << 40)
    with pytest.raises(FormatError, match="has 1099511627776 bytes"):
        read_plain_file(path, 10)


def test_a_name_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(TierstoreError, match="File name too long"):
        require_plain_file(tmp_path / ("x" * 5000))
