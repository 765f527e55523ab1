"""The examples, run as a newcomer does, but in this process: importing torch takes longer than most of them."""

import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import tierstore
from tests.train.readers.rows import category_of, some_rows, to_text
from tierstore.plan import planning
from tierstore.train import train
from tierstore.train.config import load, parse_override
from tierstore.train.summary import Summary

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example in an empty directory, with parts of its text replaced, and returns the lines that it prints."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *changes: tuple[str, str]) -> list[str]:
        source = (EXAMPLES / name).read_text()
        for old, new in changes:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        exec(compile(source, name, "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out.splitlines()

    return run


def test_what_the_programs_leave_is_ignored_and_removed_by_make_clean() -> None:
    leave = set(
        re.findall(r"`([a-z.-]+)/?`", " ".join(re.findall("; leaves (.*) \\|", (EXAMPLES / "README.md").read_text())))
    )
    assert {"bag.pt", "vectors.hot"} < leave
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    (recipe,) = re.findall(r"^\trm -rf (.*)  # of examples", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert leave <= set(recipe.split()) <= ignored


def numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*\.?\d*(?:e-?\d+)?", line)]


def test_dlrm_learns_beyond_its_budget_and_a_second_run_ends_in_the_bits_of_one_long_run(run: Run) -> None:
    told, tiers = run("dlrm.py")
    first, steps, before, after = numbers(told)
    assert (first, steps) == (0, 120)
    assert after < 0.9 * before
    memory, tables, share = numbers(tiers)
    assert memory < 0.2 * tables
    assert 0 < share < 100

    def short(steps: int, directory: str) -> str:
        change = ("= 120, 512,", f"= {steps}, 512,"), ("dlrm-store", directory)
        return run("dlrm.py", *change)[0]

    short(10, "parts")
    assert short(10, "parts").startswith("steps 10 to 20: ")
    short(20, "whole")
    require_same_bits("parts", "whole")


def require_same_bits(*directories: str) -> None:
    """Of all rows, and of what a checkpoint has besides."""
    with ExitStack() as stack:
        one, other = (stack.enter_context(tierstore.open(directory, mode="r")) for directory in directories)
        for name, table in one.tables.items():
            ids = torch.arange(table.config.num_embeddings)
            assert torch.equal(table.read(ids), other[name].read(ids))
            assert torch.equal(table.read_state(ids), other[name].read_state(ids))
        assert torch.equal(*(store.tensors()["tierstore.checkpoint"] for store in (one, other)))


def test_an_embedding_bag_that_moved_has_the_losses_that_it_would_have_had(run: Run) -> None:
    *steps, difference = map(numbers, run("from_embedding_bag.py"))
    assert [step[0] for step in steps] == [20, 30, 39]
    assert all(before == after for _, before, after in steps)
    assert difference[0] < 1e-5


def test_code_of_torchrec_trains(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TorchRec, whose import warns; tests/peers/test_frameworks.py runs it in a process that has it."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith(".peers")])
    before, after = numbers(run("from_torchrec.py")[0])
    assert after < 0.95 * before


def test_a_sequence_model_has_its_twins_losses_and_goes_on_after_a_kill_to_the_bits_of_one_run(run: Run) -> None:
    (first, stop, _, before, after), (theirs, ours) = map(numbers, run("sasrec.py"))
    assert (first, stop) == (0, 120)
    assert before < 10
    assert after > 50
    assert ours == pytest.approx(theirs, rel=1e-5)

    def short(steps: int, directory: str, *change: tuple[str, str]) -> str:
        return run("sasrec.py", ("= 128, 120, 40", f"= 128, {steps}, 10"), ("sasrec-store", directory), *change)[0]

    with pytest.raises(ZeroDivisionError):
        short(20, "parts", ("losses.append(loss)", "losses.append(loss / (len(losses) != 14))"))
    assert short(10, "parts").startswith("steps 10 to 20: ")
    short(20, "whole")
    require_same_bits("parts", "whole")


def test_fine_tuning_follows_its_schedule_and_leaves_the_frozen_table_alone(run: Run) -> None:
    *steps, rows = map(numbers, run("fine_tuning.py"))
    assert [step[0] for step in steps] == [0, 10, 20, 29]
    losses, norms, rates = zip(*(step[1:] for step in steps), strict=True)
    assert losses[-1] < 0.8 * losses[0]
    assert max(norms) > 0.05
    assert rates[0] == 0.1
    assert list(rates) == sorted(rates, reverse=True)
    frozen, trained = rows
    assert frozen == 0
    assert trained > 1000


def test_a_server_gives_the_rows_that_were_written_and_follows_a_commit(run: Run) -> None:
    first, second, third, end = map(numbers, run("serving.py"))
    assert first == [1, 3, 9999, *range(12, 16), *range(39_996, 40_000)]
    assert second == [1, 2, 3, 12, 14, 16, 18, *range(12, 16)]
    assert third == [2, 3, -1, -1, -1, -1]
    assert end == [0]


def test_a_model_of_ones_own_is_served_with_its_own_bits(run: Run) -> None:
    (told,) = run("own_model.py")
    assert told.endswith("the server's bits are the same: True")
    assert all(0 < score < 1 for score in numbers(told)[:2])


def test_two_towers_learn_which_items_are_near_to_a_user(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)  # a run file names the class
    (auc, _), (_, _, near) = map(numbers, run("two_tower.py"))
    assert (auc > 0.8, near >= 6) == (True, True)


def test_a_plan_meets_its_target_and_more_memory_is_never_slower(run: Run) -> None:
    lines = run("plan.py")
    assert numbers(lines[2])[0] >= 250_000
    budgets = [numbers(line) for line in lines if line.lstrip()[0].isdigit() and "for rows" in line]
    assert [budget for budget, _ in budgets] == [8, 16, 32, 64]
    rates = [rate for _, rate in budgets]
    assert rates == sorted(rates)


@pytest.mark.slow
def test_a_first_day_ends_well(tmp_path: Path) -> None:
    own = {"DAY_BIN": sysconfig.get_path("scripts"), "DAY_ROWS": "2000", "TMPDIR": str(tmp_path)}
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["sh", EXAMPLES / "day.sh"], capture_output=True, text=True, env=os.environ | own)
    assert not done.returncode, done.stdout + done.stderr
    parts = re.findall(r"^([a-z]+): \d+ s$", done.stdout, re.MULTILINE)
    assert parts == ["demo", "convert", "parquet", "serve", "curl", "publish", "torchrun", "plan"]


def test_the_table_names_every_example_and_their_files_are_valid() -> None:
    named = re.findall(r"^\| \[(.*?)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    found = [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sorted([*named, "README.md"]) == sorted(map(str, found))
    asked = planning.load(EXAMPLES / "plan.toml")
    assert asked.target.samples_per_s > 0
    assert not asked.is_fixed
    for path in EXAMPLES.glob("criteo*.toml"):
        assert load(path).data.train_rows > 0


def test_criteo_with_dynamic_ids_has_rows_for_the_categories_seen_twice(tmp_path: Path) -> None:
    rows = [(label, dense, [x and x % 9 for x in categories]) for label, dense, categories in some_rows(120)]
    (tmp_path / "rows.tsv").write_text(to_text(rows))
    given = {"data.path": tmp_path / "rows.tsv", "store.path": tmp_path / "store"}
    texts = [*(f'{key}="{value}"' for key, value in given.items()), "data.train_rows=96", "data.test_rows=24"]
    config = load(EXAMPLES / "criteo-dynamic.toml", map(parse_override, texts))
    assert train(config).test is not None
    with tierstore.open(config.store.path, mode="r") as store:
        for column in range(26):
            seen = Counter(f"{row[2][column]:08x}" for row in rows[:96] if row[2][column] is not None)
            twice = sorted(category_of(text, rule=config.data.rule) for text, count in seen.items() if count > 1)
            assert torch.cat(list(store[f"C{column + 1}"].written())).tolist() == twice


@pytest.mark.parametrize(
    ("rows", "least"), [(12_000, 0.71), pytest.param(64_000, 0.770, marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_criteo_with_five_percent_in_memory_reaches_its_auc_in_the_bits_of_the_in_memory_run(
    criteo_path: Path, tmp_path: Path, rows: int, least: float
) -> None:
    def run(name: str, *more: str) -> Summary:
        given = [f'data.path="{criteo_path}"', f'store.path="{tmp_path / name}"', f"data.train_rows={rows}", *more]
        return train(load(EXAMPLES / "criteo.toml", map(parse_override, given)), bits=True)

    tiered = run("tiered")
    assert tiered.test.auc >= least
    assert tiered.tiers.ddr.bytes < 0.05 * 630_200 * 128
    assert tiered.tiers.ddr.evictions > 0
    in_memory = run("in memory", 'store.ddr="256MiB"')
    assert in_memory.tiers.ddr.evictions == 0
    assert tiered.bits == in_memory.bits
