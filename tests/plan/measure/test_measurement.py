"""A whole measurement, small: complete, saved, and nothing left behind."""

import errno
from dataclasses import fields
from pathlib import Path

import pytest

from tests.plan.commands import run
from tests.plan.hosts import SHOP_HOST
from tierstore.plan import SoftwareCosts
from tierstore.plan.measure import measure, measurement
from tierstore.plan.measure.loops import Lab
from tierstore.plan.measure.machine import Sizes
from tierstore.plan.parts import read_host


def test_a_whole_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small loops, and little memory."""
    told = list[float]()
    monkeypatch.setattr(measurement, "HOST_SIZES", Sizes(1 << 20, 64, rows=256))
    monkeypatch.setattr(measurement, "Lab", lambda folder, processor, **_: Lab(folder, processor, 6000, 256, 64, 1))
    try:
        host = measure(tmp_path, seconds=1.0, progress=lambda _, share: told.append(share))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        pytest.skip("the file system has no direct reads")
    except ValueError as error:
        pytest.skip(str(error))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"seconds=nan: expected a number from 1 to 3,600"):
        measure(tmp_path, seconds=float("nan"))
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0, 1)
    assert (host.accelerators, len(host.storage), host.watts, host.usd, host.processor.usd) == ((), 1, 0, 0, 0)
    assert "were not measured" in host.source
    costs = host.costs
    assert 1 < costs.batch_us < 1e6
    assert costs.append_ns + costs.append_ns_per_byte + costs.transaction_us > 0
    assert all(0 <= value < 1e9 for value in vars(costs).values())


def test_nothing_is_left_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, **_: object) -> None:
        (folder / "half").write_bytes(b"of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "measure_storage", fail)
    monkeypatch.setattr(measurement, "measure_host", lambda **_: (None, None))
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, seconds=1)
    assert not list(tmp_path.iterdir())


def test_the_command_shows_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tierstore.plan.measure.measure", lambda *_, **__: SHOP_HOST)
    path = tmp_path / "host.json"
    assert run("measure", "--dir", str(tmp_path), "--out", str(path)) == 0
    assert read_host(path) == SHOP_HOST
    shown = capsys.readouterr().out
    assert f"Saved as {tmp_path / 'host.json'}" in shown
    for each in fields(SoftwareCosts):
        assert each.name in shown
        assert each.metadata["help"] in shown


def test_the_command_looks_first_where_it_will_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.plan.measure.measure", lambda *_, **__: pytest.fail("a minute for nothing"))
    taken = tmp_path / "host.json"
    taken.write_text("precious")
    for name, error in (
        ("host.json", FileExistsError),
        ("host.toml", ValueError),
        ("none/host.json", FileNotFoundError),
    ):
        with pytest.raises(error):
            run("measure", "--out", str(tmp_path / name))
    assert taken.read_text() == "precious"
