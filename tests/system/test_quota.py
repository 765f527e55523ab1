"""CPUs that a container may use."""

from pathlib import Path

import pytest

from tierstore.system import sizes


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
def test_a_quota_bounds_the_cpus(
    files: dict[str, str], limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    groups = tmp_path / "groups"
    groups.write_text("0::/box\n4:cpu,cpuacct:/box\n")
    monkeypatch.setattr(sizes, "_CGROUP", groups)
    monkeypatch.setattr(sizes, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(sizes.os, "sched_getaffinity", lambda _: range(64))
    assert sizes.cpu_limit() == limit
