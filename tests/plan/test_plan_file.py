"""Plan files: what is read, what is refused, and what the errors say."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest

from tierstore.plan.plan_file import PlanFile, load
from tierstore.plan.workload import TableSpec
from tierstore.settings.sections import ConfigError, to_toml

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return write_file


def test_an_empty_file_is_all_defaults_and_keys_print_one(write: Write) -> None:
    assert load(write("")) == PlanFile()
    assert load(write(to_toml(PlanFile(), with_help=True))) == PlanFile()


def test_keys_reach_their_fields(write: Write) -> None:
    found = load(
        write(
            '[setup]\nddr = "64GiB"\nhbm = 1024\nhosts = 2\n[target]\nsamples_per_s = 5\n[pricing]\npue = 2\n'
            '[search]\ndtypes = ["float16"]\nhosts = [1, 2]\n[[workload.tables]]\nname = "item"\nexponent = 1\n'
        )
    )
    assert (found.setup.ddr, found.setup.hbm, found.setup.hosts) == ("64GiB", 1024, 2)
    assert (found.target.samples_per_s, found.pricing.pue) == (5.0, 2.0)
    assert (found.search.dtypes, found.search.hosts) == (("float16",), (1, 2))
    assert found.workload.tables == (TableSpec(name="item", exponent=1.0),)
    assert load(write(to_toml(found))) == found
    assert found.is_fixed
    assert not load(write("[setup]\nhosts = 2\n")).is_fixed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[setup]\ndrd = 1", r'plan\.toml: unknown key "drd" in \[setup\]; did you mean \'ddr\'\?'),
        ("[setup]\nddr = '64 GG'", r"plan\.toml: setup\.ddr = '64 GG': expected a size, as \"512MiB\""),
        ("[workload]\npreset = 'a'\nfile = 'b'", r"workload\.file = 'b': preset is given too"),
        ("[search]\ndrives = [-1]", r"search\.drives=\(-1,\): expected counts from 0 on"),
    ],
)
def test_errors_name_the_file_the_key_and_the_nearest(write: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write(text))


def test_every_field_has_help_and_every_section_is_frozen() -> None:
    for name, section in get_type_hints(PlanFile).items():
        for field in dataclasses.fields(section):
            assert field.metadata["help"], f"{name}.{field.name}"
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section(), dataclasses.fields(section)[0].name, None)
