"""Parts: every figure says where it is from, and follows from what it says."""

import re
import tomllib

import pytest

from tests.plan.commands import run
from tierstore.plan.parts import Part, describe_parts, host_names, load_part, parts
from tierstore.plan.parts.catalog import DATA, FIGURES, example_hosts, read_figure

EVERY = parts()
KINDS = ["processors", "memory", "accelerators", "links", "storage", "networks"]


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


@pytest.mark.parametrize("part", EVERY, ids=name_of)
def test_prices_are_assumptions_of_a_year(part: Part) -> None:
    if "usd" in part.figures:
        assert re.search(r"\b20\d\d\b", part.figures["usd"].assumption)
    for table in example_hosts().values():
        assert re.search(r"\b20\d\d\b", read_figure(table["usd"]).assumption)


def test_data_files_hold_no_other_keys() -> None:
    for kind, figures in FIGURES.items():
        for name, entries in tomllib.loads((DATA / f"{kind}.toml").read_text()).items():
            assert set(entries) == {"title", *figures} | ({"link"} if kind == "accelerators" else set()), name
            for figure in figures:
                assert {"value"} < set(entries[figure]) <= {"value", "source", "assumption"}, (name, figure)


UNITS = {
    "MT/s": 1e6,
    "GT/s": 1e9 / 8 * 128 / 130,
    "Gb/s": 1e9 / 8,
    "GHz": 1e9,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "TFLOPS": 1e12,
    "": 1.0,
}


def said(assumption: str) -> float | None:
    """What the words come to, where they are a share of a product, as "80 % of 4,800 MT/s x 8 bytes"."""
    found = re.match(r"(\d+) % of ([^(]+)", assumption)
    if found is None:
        return None
    product = int(found[1]) / 100
    for factor in found[2].split(" x "):
        number = re.search(r"([\d,.]+) ?(\S*)", factor)
        if number is not None and number[1] != "128":
            product *= float(number[1].replace(",", "")) * UNITS.get(number[2], 1.0)
    return product


@pytest.mark.parametrize("part", [part for part in EVERY if part.kind != "costs"], ids=name_of)
def test_figures_follow_from_their_words(part: Part) -> None:
    checked = {}
    for name, figure in part.figures.items():
        expected = said(figure.assumption)
        if expected is not None and "seven" not in figure.assumption:
            checked[name] = expected
            assert figure.value == pytest.approx(expected, rel=0.03), (name, figure.assumption)
    needed = {"processors": 1, "memory": 2, "accelerators": 3, "links": 1, "networks": 1, "storage": 0}
    assert len(checked) >= needed[part.kind]


def test_a_part_is_found_by_its_name() -> None:
    assert load_part("accelerators", "h100-sxm").values()["watts"] == 700
    assert [part.kind for part in parts("links")] == ["links"] * 3
    assert {part.kind for part in EVERY} == set(FIGURES)


def test_the_list_names_every_part_and_host() -> None:
    short, long = describe_parts(), describe_parts(sources=True)
    for name in [*(part.name for part in EVERY), *host_names()]:
        assert re.search(rf"^  {re.escape(name)} ", short, re.MULTILINE)
    for part in EVERY:
        for figure in part.figures.values():
            assert figure.source in long
            assert figure.assumption in long
    assert "All prices are assumptions" in short


def test_the_command_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    for words, sources in (([], False), (["--sources"], True)):
        assert run("parts", *words) == 0
        assert capsys.readouterr().out == describe_parts(sources=sources) + "\n"
