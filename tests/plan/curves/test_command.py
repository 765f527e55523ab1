"""``tierstore plan curve``: what it prints and writes, and what it says of mistakes."""

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plan import commands
from tierstore.plan import MissRatioCurve, once_a_batch
from tierstore.plan.curves import by_table, curve
from tierstore.plan.json_file import plain
from tierstore.plan.traces import read_accesses
from tierstore.trace import TableTrace, Trace, read_trace, write_trace

SAMPLES = 500


def write_run(path: Path, *, batch_samples: int) -> Path:
    rng = np.random.default_rng(1)
    offsets = np.arange(0, 2 * SAMPLES + 1, 2)
    tables = {
        "item": TableTrace(rng.zipf(1.3, 2 * SAMPLES) % 300, offsets),
        "user": TableTrace(rng.integers(0, 50, 2 * SAMPLES), offsets),
    }
    write_trace(Trace(tables=tables, batch_samples=batch_samples), path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run.npz", batch_samples=20)


run = functools.partial(commands.run, "curve")


def read_curves(path: Path) -> Any:
    return json.loads(path.read_text())


def same(written: Any, made: MissRatioCurve) -> bool:
    return bool(written == plain(made))


def test_policies_side_by_side(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "curves.json"
    assert run(path, "--policy", "lru,lfu", "--sizes", "10,100,10%", "--json", out) == 0
    accesses = read_accesses(path)
    num_rows = len(np.unique(accesses.keys))
    sizes = sorted([10, 100, round(num_rows / 10)])
    written, said = read_curves(out), capsys.readouterr().out
    assert f"{path}: 2,000 lookups of 2 tables\n" in said
    assert said.endswith(f"Written: {out}\n")
    for policy in ("lru", "lfu"):
        made = curve(accesses, policy, sizes=sizes)
        assert same(written[policy]["all"], made)
        assert f"{made.hit_rate(100):.4f}" in next(line for line in said.splitlines() if line.split()[:1] == ["100"])


def test_as_the_tiers_of_a_store_count(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(path, "--once-a-batch", "--json", tmp_path / "out") == 0
    accesses = once_a_batch(read_accesses(path))
    assert f"{len(accesses.keys):,} distinct rows of batches of 2 tables" in capsys.readouterr().out
    assert same(read_curves(tmp_path / "out")["lru"]["all"], curve(accesses, "lru"))


def test_tables(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accesses, out = read_accesses(path), tmp_path / "out"
    assert run(path, "--by-table", "--policy", "lfu, lru", "--json", out) == 0
    for policy in ("lfu", "lru"):
        made = by_table(accesses, policy)
        assert read_curves(out)[policy].keys() == made.keys()
        assert all(same(each, made[name]) for name, each in read_curves(out)[policy].items())
    said = capsys.readouterr().out.split("\n\n")
    assert [part.splitlines()[0] for part in said[1:5:2]] == ["lfu:", "lru:"]
    assert said[1].splitlines()[1].split()[2:4] == ["item", "user"]


def test_a_sample_says_so(path: Path, tmp_path: Path) -> None:
    assert run(path, "--sampling-rate", 0.25, "--json", tmp_path / "out") == 0
    assert same(read_curves(tmp_path / "out")["lru"]["all"], curve(read_accesses(path), "lru", sampling_rate=0.25))


def test_few_sampled_rows_are_a_warning_in_text_and_json(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(path, "--sampling-rate", 0.5, "--policy", "lru,lfu", "--json", tmp_path / "out") == 0
    warning = read_curves(tmp_path / "out")["lfu"]["all"]["warning"]
    assert re.fullmatch(
        r"\d+ sampled rows say little: hit rates may be off by 1\.\d points, \d at worst; take every row", warning
    )
    assert capsys.readouterr().out.count(f"! {warning}\n") == 1
    assert run(path, "--json", tmp_path / "out", "--force") == 0
    assert read_curves(tmp_path / "out")["lru"]["all"]["warning"] == ""
    assert "!" not in capsys.readouterr().out


def test_batches_ahead_are_of_the_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.npz", batch_samples=5)  # so small that caches hold several
    assert run(path, "--once-a-batch", "--policy", "lfu", "--prefetch-depth", 2, "--json", tmp_path / "out") == 0
    accesses = once_a_batch(read_accesses(path))
    made, without = (curve(accesses, "lfu", prefetch_depth=depth) for depth in (2, 0))
    assert same(read_curves(tmp_path / "out")["lfu"]["all"], made)
    assert not same(plain(without), made)


def test_a_recorded_sample_is_better_read_once_a_batch(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(path)
    half = Trace(tables=trace.tables, batch_samples=20, sampling_rate=0.5)
    write_trace(half, path, force=True)
    assert run(path) == 0
    said = capsys.readouterr().out
    assert "a sample of 0.5 of the rows" in said
    assert "use --once-a-batch" in said
    assert run(path, "--once-a-batch") == 0
    assert "use --once-a-batch" not in capsys.readouterr().out
    write_trace(replace(half, all_lookups=(4000, 1500)), path, force=True)
    assert run(path) == 0
    said = capsys.readouterr().out
    assert "2,000 of 5,500 lookups of 2 tables, a sample of 0.5 of the rows" in said
    assert "use --once-a-batch" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "lru,belady"], r"--policy belady: there are lru, lfu"),
        (["--policy", "tinylf"], r"--policy tinylf: did you mean 'tinylfu'\?"),
        (["--policy", ""], r"--policy : there are"),
        (["--sizes", "10,ten"], r"--sizes ten: write rows, 1 or more, or a share"),
        (["--sizes", "0"], "--sizes 0: write rows"),
        (["--sizes=-5%"], "--sizes -5%: write rows"),
        (["--sizes", "nan%"], "--sizes nan%: write rows"),
        (["--sizes", "inf%"], "--sizes inf%: write rows"),
        (["--sizes", "99999999999999999999"], "--sizes 99999999999999999999: write rows"),
        (["--sampling-rate", "2"], "sampling_rate=2.0: expected a number above 0, and at most 1"),
        (["--prefetch-depth=-1"], "prefetch_depth=-1"),
    ],
)
def test_mistakes_are_named_with_the_way_out(path: Path, tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(path, *words, "--json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "none.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"bad\.npz"):
        run(tmp_path / "bad.npz")


def test_curves_are_written_whole_or_not_at_all(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        run(path, "--json", tmp_path / "none" / "out")
    with pytest.raises(FileExistsError, match="is a directory; choose"):
        run(path, "--json", tmp_path)
    (tmp_path / "out").write_text("before")
    with pytest.raises(FileExistsError, match="overwrite it with --force"):
        run(path, "--json", tmp_path / "out")
    assert run(path, "--json", tmp_path / "out", "--force") == 0
    assert set(read_curves(tmp_path / "out")) == {"lru"}
