"""Parts: every figure says where it is from, and follows from what it says."""

import re
import tomllib

import pytest

from tests.plan.commands import run
from tierstore.plan.parts import Part, host_names, parts
from tierstore.plan.parts.catalog import DATA, FIGURES

EVERY = parts()


def name_of(part: Part) -> str:
    return f"{part.kind}-{part.name}"


@pytest.mark.parametrize("part", EVERY, ids=name_of)
def test_every_figure_is_known_and_has_its_source(part: Part) -> None:
    assert list(part.figures) == [name for name in FIGURES[part.kind] if name in part.figures]
    assert set(part.figures) == set(FIGURES[part.kind])
    for name, figure in part.figures.items():
        assert figure.source or figure.assumption, name
        assert not figure.source or re.search(r"\S, https://\S+$", figure.source), name
        assert figure.value > 0 or figure.assumption or part.kind == "costs", name


def test_data_files_hold_no_other_keys() -> None:
    for kind, figures in FIGURES.items():
        for name, entries in tomllib.loads((DATA / f"{kind}.toml").read_text()).items():
            assert set(entries) == {"title", *figures} | ({"link"} if kind == "accelerators" else set()), name
            for figure in figures:
                assert {"value"} < set(entries[figure]) <= {"value", "source", "assumption"}, (name, figure)


def test_the_list_names_every_part_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parts") == 0
    short = capsys.readouterr().out
    assert run("parts", "--sources") == 0
    long = capsys.readouterr().out
    for name in [*(part.name for part in EVERY), *host_names()]:
        assert re.search(rf"^  {re.escape(name)} ", short, re.MULTILINE)
    for figure in (figure for part in EVERY for figure in part.figures.values()):
        assert figure.source in long
        assert figure.assumption in long
    assert "All prices are assumptions" in short
