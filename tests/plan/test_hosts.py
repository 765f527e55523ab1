"""Hosts: those that ship, files that give back what was written, errors that name the key."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.asking import run
from tierstore.plan import Accelerator, Host, Link, Memory, Processor, SoftwareCosts, Storage
from tierstore.plan.host import example_hosts, load_host, with_accelerators, write_host


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


def test_files_give_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    for host in (*example_hosts().values(), whole_host(), dataclasses.replace(whole_host(), storage=())):
        write_host(host, path, force=True)
        assert host == load_host(str(path)) == load_host(path)
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        assert host.costs != SoftwareCosts()


def test_examples_have_every_figure_and_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hosts") == 0
    said = capsys.readouterr().out
    for name, host in example_hosts().items():
        assert load_host(name) == host
        for part in (host.processor, host.ddr, host.network, *host.storage, *host.accelerators):
            assert part.part in said
            assert all(value or figure == "watts" for figure, value in vars(part).items()), (name, part)
        assert f"\n{name} " in f"\n{said}"
    assert run("hosts", "node-1xh100") == 0
    (tmp_path / "mine.json").write_text(capsys.readouterr().out)
    assert load_host(tmp_path / "mine.json") == load_host("node-1xh100")
    host = load_host("server-2s")
    assert (host.processor.cores, len(host.storage), host.usd + host.ddr.usd) == (64, 2, 7360)
    assert "$14,960, 828 W" in said
    assert "All prices are assumptions" in said
    assert with_accelerators(load_host("node-1xh100"), ()).name == "node-1xh100 without its GPU"


def changed(part: str, key: str, value: Any = None) -> str:
    """The file of a host with one figure of a part that is another, or none."""
    document = json.loads(json.dumps(dataclasses.asdict(whole_host())))
    inner = document[part][0] if isinstance(document[part], list) else document[part]
    inner.pop(key, None)
    inner |= {} if value is None else {key: value}
    return json.dumps(document)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("host.json", "{", "is not valid JSON"),
        ("host.toml", "[host", "is not valid TOML"),
        ("host.json", " " * (2 << 20), "more than"),
        ("host.json", changed("processor", "flops"), 'processor: key "flops" is missing'),
        ("host.json", changed("costs", "write_ns", 9), 'unknown key "write_ns".*tierstore plan measure'),
        ("host.json", changed("storage", "reads_per_s", 0), r"storage\[0\]: reads_per_s=0.0: expected"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_host(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_there_must_be_such_a_host(tmp_path: Path) -> None:
    for source, reason in (
        ("server-2", "there is no host named 'server-2'; did you mean 'server-2s'"),
        (tmp_path / "none.json", "cannot be read: No such"),
        (tmp_path / "host.txt", "ends in .json or .toml"),
    ):
        with pytest.raises(ValueError, match=reason):
            load_host(source)
