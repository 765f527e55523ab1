"""Byte sizes as people write them."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tierstore import sizes
from tierstore.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (123, 123),
        ("123", 123),
        ("1 KiB", 1024),
        ("1kb", 1000),
        ("1.5MiB", 1536 * 1024),
        ("2GiB", 2**31),
        ("1TB", 10**12),
        ("5% of tables", 50),
    ],
)
def test_sizes(value: Any, expected: int) -> None:
    assert parse_size(value, name="ddr", table_bytes=1000) == expected


@pytest.mark.parametrize("value", ["", "GiB", "1 GiBs", "-1MiB", "5% of ram", "1e9", "0x10", "1,000"])
def test_what_is_no_size(value: str) -> None:
    with pytest.raises(ValueError, match=r"ddr=.* is not a size; write bytes"):
        parse_size(value, name="ddr")


@pytest.mark.parametrize("value", [None, 1.5, True])
def test_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="ddr must be an int or a str"):
        parse_size(value, name="ddr")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


def test_a_share_of_memory_is_of_the_machines_or_of_the_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "_CGROUP_LIMITS", (tmp_path / "none",))
    assert parse_size("50%", name="ddr") == psutil.virtual_memory().total // 2
    (tmp_path / "limit").write_text("1000000\n")
    (tmp_path / "max").write_text("max\n")
    monkeypatch.setattr(sizes, "_CGROUP_LIMITS", (tmp_path / "max", tmp_path / "limit"))
    assert parse_size("50%", name="ddr") == 500_000
