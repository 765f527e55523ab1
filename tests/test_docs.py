"""The figures in the documentation are those of the committed results."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common import Goal, Spread, Table, aligned, per_second
from bench.data import ROOT, examples
from docs import reference
from docs.generate import load_results, pages, stale_plots
from docs.headline import headline


@pytest.mark.parametrize("path", list(pages()), ids=lambda path: path.name)
def test_pages_match_the_committed_results(path: Path) -> None:
    assert path.read_text() == pages()[path], "run make docs and commit what it writes"


def test_plots_are_of_the_committed_results() -> None:
    assert [path.name for path, _, _ in stale_plots()] == [], "run make docs and commit what it draws"


def test_committed_results_name_their_machine_and_configuration() -> None:
    for name, found in load_results().items():
        assert found["benchmark"] == name
        assert found["machine"]["cpu"]
        assert (ROOT / "bench" / f"{name}.toml").is_file()


def test_goals_rates_and_tables() -> None:
    for bound, value, met in (("at_least", 0.9, True), ("at_least", 0.89, False), ("at_most", 1.1, False)):
        assert Goal(name="g", value=value, **{bound: 0.9 if bound == "at_least" else 1.0}).met is met
    assert [Goal(name="g", value=value, exactly=0.6033).met for value in (0.6033, 0.6034)] == [True, False]
    assert per_second(10, [1.0, 2.0, 5.0]) == Spread(median=5.0, lowest=2.0, highest=10.0, count=3)
    shown = aligned(Table(title="T", columns=["name", "n"], rows=[["a", "100"]]))
    assert shown.splitlines() == ["T", "name    n", "---------", "a     100"]


def test_the_readme_is_short_and_opens_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 120
    assert [line.split()[:2] for line in lines[2:4]] == [["make", "demo"], ["make", "test"]]


def test_the_table_of_the_readme_is_of_the_figures() -> None:
    columns, *rows = headline(load_results())
    assert len(rows) == 5
    for row in rows:
        ours, theirs = (float(cell.split()[0].replace(",", "")) for cell in (row[1], row[3]))
        assert float(row[4]) == pytest.approx(ours / theirs, rel=0.03)
    assert headline({}) == [columns]


def test_the_reference_is_built_without_warnings_and_describes_all_that_is_public(tmp_path: Path) -> None:
    reference.build(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")} >= {
        "index.html",
        "tierstore.html",
        "tierstore/optim.html",
        "tierstore/train/readers.html",
    }
    assert "TieredEmbeddingBagCollection" in (tmp_path / "tierstore.html").read_text()
    assert reference.undocumented() == []


def test_example_in_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = examples("README.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    with names["tierstore"].open("shop", mode="r", ddr="64MiB") as store:
        assert store.extra == {"step": 1}
        furthest = store["item"].read(torch.tensor([3, 17, 999_999_999, 5])).abs().amax(dim=1)
        # Rows begin within 0.01 of zero. Row 5 was never looked up; the first step moves the others by more.
        assert (furthest > 0.01).tolist() == [True, True, True, False]


PAGES = [
    *(path.name for path in ROOT.glob("*.md")),
    "examples/README.md",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]


def test_the_first_examples_of_pages_may_be_run_in_one_folder() -> None:
    """Each makes a store of a name of its own."""
    firsts = {page: found[0] for page in PAGES if (found := examples(page))}
    names = {page: set(re.findall(r'(?:open|open_sharded|path)[(=]"([^"]+)"', each)) for page, each in firsts.items()}
    every = [name for each in names.values() for name in each]
    assert len(every) > 10
    assert not {name: [page for page in names if name in names[page]] for name in every if every.count(name) > 1}


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    path = ROOT / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing
