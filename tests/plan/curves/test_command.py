"""``tierstore plan curve``: what it prints and writes, and what it says of mistakes."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.plan import commands
from tierstore.plan import MissRatioCurve, once_a_batch
from tierstore.plan.curves import by_table, curve
from tierstore.plan.json_file import plain
from tierstore.plan.traces import read_accesses
from tierstore.trace import TableTrace, Trace, write_trace

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
        assert f"{made.hit_rate(100):.4f}" in said


def test_tables(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accesses, out = read_accesses(path), tmp_path / "out"
    assert run(path, "--by-table", "--policy", "lfu, lru", "--json", out) == 0
    for policy in ("lfu", "lru"):
        made = by_table(accesses, policy)
        assert read_curves(out)[policy].keys() == made.keys()
        assert all(same(each, made[name]) for name, each in read_curves(out)[policy].items())
    said = capsys.readouterr().out
    assert all(f"{policy} {name}" in said for policy in ("lfu", "lru") for name in ("item", "user"))


def test_batches_ahead_are_of_the_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.npz", batch_samples=5)  # so small that caches hold several
    assert run(path, "--once-a-batch", "--policy", "lfu", "--prefetch-depth", 2, "--json", tmp_path / "out") == 0
    accesses = once_a_batch(read_accesses(path))
    made, without = (curve(accesses, "lfu", prefetch_depth=depth) for depth in (2, 0))
    assert same(read_curves(tmp_path / "out")["lfu"]["all"], made)
    assert not same(plain(without), made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "lru,belady"], r"policy='belady': there are lru, lfu"),
        (["--sizes", "10,ten"], r"--sizes ten: write rows, or a share"),
        (["--prefetch-depth=-1"], "prefetch_depth=-1"),
    ],
)
def test_mistakes_are_named_with_the_way_out(path: Path, tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(path, *words, "--json", tmp_path / "out")
    assert not (tmp_path / "out").exists()
