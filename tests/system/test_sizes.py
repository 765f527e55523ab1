"""Byte sizes as people write them; what error messages show of a value; plain files; processes of the package."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tierstore.errors import BudgetError, FormatError, TierstoreError, TruncatedError
from tierstore.system import processes, sizes
from tierstore.system.checks import excerpt, excerpt_names
from tierstore.system.files import read_plain_file, require_plain_file
from tierstore.system.sizes import format_size, machine_memory_bytes, parse_size, require_memory


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
        ("9007199254740993", 9007199254740993),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_are_exact_to_the_byte(value: Any, expected: int) -> None:
    assert parse_size(value, name="ddr", table_bytes=1000) == expected


VAST = [-1, 2**63, 10**5000, "9" * 30, "9" * 5000, "9" * 400 + "%", "9" * 30 + "TiB", "0" * 41]


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        (["", "GiB", "1 GiBs", "-1MiB", "5% of ram", "1e9", "0x10", "1,000"], ValueError, "is not a size; write bytes"),
        ([None, 1.5, True], TypeError, "ddr must be an int or a str"),
        (VAST, ValueError, "ddr="),
    ],
)
def test_what_is_no_size_is_refused_in_short(values: list[Any], error: type[Exception], said: str) -> None:
    for value in values:
        with pytest.raises(error, match=said) as raised:
            parse_size(value, name="ddr", table_bytes=1000)
        assert len(str(raised.value)) < 300


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**52, "4096.0 TiB")]
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file system of control groups; ``tmp_path / "self"`` says which ones the process is in."""
    monkeypatch.setattr(sizes, "_CGROUP", tmp_path / "self")
    monkeypatch.setattr(sizes, "_CGROUP_ROOT", tmp_path / "groups")
    return tmp_path / "groups"


def write_limit(path: Path, text: str = "1000000") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_a_share_of_memory_is_of_the_machines_or_of_the_containers(groups: Path) -> None:
    assert parse_size("50%", name="ddr") == psutil.virtual_memory().total // 2
    write_limit(groups / "memory.max", "max")
    assert parse_size("50%", name="ddr") == psutil.virtual_memory().total // 2
    write_limit(groups / "memory" / "memory.limit_in_bytes")
    assert parse_size("50%", name="ddr") == 500_000


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/box/job", "box/job/memory.max"),
        ("0::/box/job", "box/memory.max"),
        ("7:cpu,memory:/box/job", "memory/box/job/memory.limit_in_bytes"),
        ("7:memory:/box/job", "memory/box/memory.limit_in_bytes"),
        ("0::/../../box", "memory.max"),
    ],
)
def test_the_limit_of_any_group_around_the_process_counts_and_no_other(groups: Path, line: str, file: str) -> None:
    (groups.parent / "self").write_text(f"3:cpuset:/elsewhere\n{line}\n")
    write_limit(groups / file)
    for outside in (groups / "elsewhere", groups.parent.parent / "box"):
        write_limit(outside / "memory.max", "10")
    assert machine_memory_bytes() == 1_000_000


def test_more_than_the_machine_has_is_refused_with_both_sizes(groups: Path) -> None:
    write_limit(groups / "memory.max", str(2 * 2**20))
    require_memory(2 * 2**20, "ddr='2MiB'")
    refusal = r"ddr='3MiB' would take 3\.0 MiB and this machine, .* has 2\.0 MiB; give less"
    with pytest.raises(BudgetError, match=refusal):
        require_memory(3 * 2**20, "ddr='3MiB'")


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"box/cpu.max": "400000 100000", "cpu.max": "max 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ({"cpu/box/cpu.cfs_quota_us": "50000", "cpu/box/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_quotas_bound_cpus(files: dict[str, str], limit: float, groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files.items():
        write_limit(groups / name, text)
    (groups.parent / "self").write_text("0::/box\n4:cpu,cpuacct:/box\n")
    monkeypatch.setattr(sizes.os, "sched_getaffinity", lambda _: range(64))
    assert sizes.cpu_limit() == limit


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


PACKAGE = Path(processes.__file__).parents[1]
STARTED = """
import os, subprocess, sys, tempfile
os.chdir(folder := tempfile.mkdtemp())
from tierstore.system.processes import child_options
os.rmdir(folder)
code = "import os, sys, numpy, tierstore.system.processes as found; print(os.getcwd(), found.__file__, '' in sys.path)"
print(subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, **child_options()).stdout)
"""


def test_a_child_runs_this_package_though_the_folder_of_the_start_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, **{
        **processes.child_options(), "cwd": None,
    })  # fmt: skip
    assert done.stdout.split() == ["/", processes.__file__, "False"], done.stderr


def test_all_children_are_started_so() -> None:
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        started = re.findall(r"subprocess\.(?:Popen|run|call|check_\w+)\(", text)
        assert len(started) == text.count("**child_options("), path
