"""Hosts: sums of their parts, files that give back what was written, errors that name the key; sources of figures."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.plan.asking import run
from tierstore.plan import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage
from tierstore.plan.host import with_accelerators
from tierstore.plan.parts import host_names, load_host, load_part, write_host
from tierstore.plan.parts.catalog import DATA, FIGURES, Part, catalog

PARTS = """
[host]
name = "shelf"
processor = { part = "epyc-9354", count = 2, usd = 2500 }
memory = { part = "ddr5-4800-64gb", count = 24, channels = 12 }
storage = [{ part = "samsung-pm9a3-7680gb", count = 2 }, { part = "intel-p5800x-1600gb" }]
accelerators = [{ part = "l4", count = 3, link = "pcie3-x16", flops = 5e13 }]
network = { part = "ethernet-25gb", count = 2 }
costs = { part = "epyc-2-cores", id_ns = 25 }
watts = 150
usd = 4000.5
"""


def made(tmp_path: Path, text: str, name: str = "host.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def whole_host() -> Host:
    """One with a different number everywhere."""
    memory = Memory(capacity_bytes=1e9, bytes_per_s=2.5, row_bytes_per_s=3, watts=4, usd=5)
    gpu = Accelerator(hbm=memory, pcie=Link(bytes_per_s=6, latency_us=7), flops=9, watts=10, usd=11)
    return Host(
        name='a "name" with \\ and \x7f and é\n',
        processor=Processor(cores=12, flops=13, watts=14, usd=15),
        ddr=dataclasses.replace(memory, usd=16.25),
        network=Link(bytes_per_s=17, latency_us=18),
        costs=SoftwareCosts(batch_us=19, append_ns_per_byte=20.125),
        storage=(Storage(capacity_bytes=21), Storage(capacity_bytes=22, reads_per_s=1e-300 + 23)),
        accelerators=(gpu, dataclasses.replace(gpu, flops=24)),
        watts=25,
        usd=26,
        source="measured",
    )


HOSTS = [*map(load_host, host_names()), whole_host(), dataclasses.replace(whole_host(), storage=(), accelerators=())]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
def test_files_give_back_what_was_written(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    write_host(host, path)
    assert host == load_host(str(path)) == load_host(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert host.costs != SoftwareCosts()


def test_a_host_is_the_sum_of_its_parts(tmp_path: Path) -> None:
    host = load_host(made(tmp_path, PARTS))
    cpu, dimm = load_part("processors", "epyc-9354").values(), load_part("memory", "ddr5-4800-64gb").values()
    assert host.processor == Processor(
        part="2 x epyc-9354", cores=64, flops=2 * cpu["flops"], watts=2 * cpu["watts"], usd=5000
    )
    assert host.ddr == Memory(
        part="ddr5-4800-64gb",
        capacity_bytes=24 * dimm["capacity_bytes"],
        bytes_per_s=12 * dimm["bytes_per_s"],
        row_bytes_per_s=12 * dimm["row_bytes_per_s"],
        watts=24 * dimm["watts"],
        usd=24 * dimm["usd"],
    )
    pm9a3, optane = (
        Storage(part=name, **load_part("storage", name).values())
        for name in ("samsung-pm9a3-7680gb", "intel-p5800x-1600gb")
    )
    assert host.storage == (pm9a3, pm9a3, optane)
    assert len(host.accelerators) == 3
    assert host.accelerators[0].flops == 5e13
    assert host.accelerators[0].watts == 72
    assert host.accelerators[0].pcie == Link(part="pcie3-x16", **load_part("links", "pcie3-x16").values())
    assert host.network.bytes_per_s == 2 * load_part("networks", "ethernet-25gb").values()["bytes_per_s"]
    assert host.costs == dataclasses.replace(load_host("workstation").costs, id_ns=25)
    assert (host.watts, host.usd) == (150, 4000.5)
    assert "24 x ddr5-4800-64gb" in host.source
    assert with_accelerators(host, ()).name == f"{host.name} without GPUs"


def test_costs_may_be_those_of_a_measured_host(tmp_path: Path) -> None:
    write_host(whole_host(), tmp_path / "measured.json")
    text = PARTS.replace('{ part = "epyc-2-cores", id_ns = 25 }', '"measured.json"')
    assert load_host(made(tmp_path, text)).costs == whole_host().costs
    for other, message in (
        ("host.toml", "host as tierstore plan measure writes it"),
        ("none.json", "cannot be read: No such"),
    ):
        path = made(tmp_path, text.replace("measured.json", other))
        with pytest.raises(ValueError, match=rf"host.toml: host: costs: .*{other}: .*{message}"):
            load_host(path)


def changed(*keys: str, value: Any = None) -> str:
    """The file of a host with one value that is another, or none."""
    document = inner = json.loads(json.dumps(dataclasses.asdict(whole_host())))
    for key in keys[:-1]:
        inner = inner[int(key) if key.isdigit() else key]
    inner.pop(keys[-1], None)
    inner |= {} if value is None else {keys[-1]: value}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        (" " * (2 << 20), "more than"),
        (changed("processor", "flops"), 'processor: key "flops" is missing'),
        (changed("costs", "write_ns", value=9), 'unknown key "write_ns".*run tierstore plan measure again'),
        (
            changed("storage", "0", "reads_per_s", value=0),
            r"storage\[0\]: reads_per_s=0.0: expected a number from 1 to",
        ),
        (PARTS.replace("9354", "9355"), "host: there is no part .* 'epyc-9355'; did you mean 'epyc-9354'"),
        (PARTS.replace("count = 24", "count = 0"), "host.memory: count=0: expected a whole number from 1 to 4,096"),
        (PARTS.replace('part = "l4", ', ""), r'host.accelerators\[0\]: key "part" is missing'),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, message: str, tmp_path: Path) -> None:
    path = made(tmp_path, text, "host.toml" if "[host]" in text else "host.json")
    with pytest.raises(ValueError, match=message) as caught:
        load_host(path)
    assert str(caught.value).startswith(f"{path}: ")


# The parts that ship

EVERY = [part for named in catalog().values() for part in named.values()]


@pytest.mark.parametrize("part", EVERY, ids=lambda part: f"{part.kind}-{part.name}")
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
