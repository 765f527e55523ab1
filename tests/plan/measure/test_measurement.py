"""A whole measurement, small: complete, saved, and nothing left behind."""

import dataclasses
import errno
from pathlib import Path

import pytest

from tests.plan.commands import run
from tierstore.kernels.threads import default_threads
from tierstore.plan import SoftwareCosts
from tierstore.plan.measure import machine, measurement
from tierstore.plan.measure.fit import STAGES, fit_costs
from tierstore.plan.measure.loops import LoopSizes
from tierstore.plan.measure.measurement import Measurement, measure, sizes_for
from tierstore.plan.parts import read_host

TINY = LoopSizes(rows=6_000, samples=64, pooling_factor=4, miss_rows=256, passes=1, cold_rows=64)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """Of small loops, and little memory."""
    folder, told = tmp_path_factory.mktemp("disk"), list[float]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "sizes_for", lambda *_: TINY)
        patch.setattr(machine, "_array_bytes", lambda: 1 << 20)
        try:
            made = measure(folder, seconds=1.0, progress=lambda _, share: told.append(share))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            pytest.skip("the file system has no direct reads")
        except ValueError as error:
            pytest.skip(str(error))
    assert not list(folder.iterdir())
    assert told == sorted(told)
    assert (told[0], told[-1]) == (0, 1)
    return made


def test_every_cost_was_measured(found: Measurement) -> None:
    assert {loop.stage for loop in found.loops} == set(STAGES)
    costs = found.host.costs
    assert fit_costs(found.loops) == (costs, found.fitted_ns)
    assert 1 < costs.batch_us < 1e6
    assert costs.read_ns > 0
    assert costs.append_ns + 264 * costs.append_ns_per_byte > 0
    assert costs.miss_ns + 264 * costs.miss_ns_per_byte > 0


def test_the_host_has_what_is_known_of_it(found: Measurement) -> None:
    host = found.host
    assert host.accelerators == ()
    assert len(host.storage) == 1
    assert "were not measured" in host.source
    assert (host.watts, host.usd, host.processor.usd) == (0, 0, 0)


def test_loops_do_the_work_that_they_say(found: Measurement) -> None:
    loops = found.loops
    assert all(loop.ns > 0 for loop in loops)
    assert all(set(loop.work) <= {field.name for field in dataclasses.fields(SoftwareCosts)} for loop in loops)
    named = {loop.name: loop.work for loop in loops}
    assert len(named) == len(loops)
    lookup = named["lookup, rows of 264 bytes, 4 a bag, popular rows"]
    assert (lookup["pool_ns"], lookup["pool_bag_ns"]) == (256, 64)
    assert 10 < lookup["pool_row_ns"] < 256
    assert lookup["pool_row_ns_per_byte"] == 256 * lookup["pool_row_ns"]
    single = named["lookup, rows of 264 bytes, 1 a bag, popular rows"]
    assert single["pool_bag_ns"] == 256
    assert single["pool_row_ns"] == lookup["pool_row_ns"], "the same ids"
    assert named["lookup, rows of 264 bytes, 1 a bag, any rows"]["pool_row_ns"] > 250
    assert 200 < named["missed lookup, rows of 72 bytes"]["miss_ns"] <= 256, "an eighth of the rows is cached"
    assert 1 <= named["reads beyond misses, rows of 520 bytes"]["read_ns"] <= 64
    assert named["steps whose batches are brought in ahead"]["hand_over_us"] == 1000
    assert sum("share_us" in work for work in named.values()) == (2 if default_threads() > 1 else 0)
    for loop in loops:
        if loop.stage in ("write-back", "cleaning"):
            assert loop.work["transaction_us"] > 0
            assert loop.work["append_ns"] >= 1
            assert round(loop.work["append_ns_per_byte"] / loop.work["append_ns"], 3) in (72, 264, 4104)
            assert (loop.work["move_ns"] > 0.1 * loop.work["append_ns"]) == (loop.stage == "cleaning")


def test_sizes_follow_the_time_and_the_device() -> None:
    assert sizes_for(50, 1e6) == dataclasses.replace(LoopSizes(), cold_rows=250_000)
    assert sizes_for(100, 3000).cold_rows == 750
    small = sizes_for(1, 100)
    assert small.rows == 20_000
    assert small.cold_rows == 64
    assert small.miss_rows % small.pooling_factor == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e9])
def test_time_that_is_none(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seconds=.*expected a number from 1 to 3,600"):
        measure(tmp_path, seconds=seconds)


def test_nothing_is_left_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, **_: object) -> None:
        (folder / "half").write_bytes(b"of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "measure_storage", fail)
    monkeypatch.setattr(measurement, "measure_memory", lambda **_: None)
    monkeypatch.setattr(measurement, "measure_processor", lambda **_: None)
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, seconds=1)
    assert not list(tmp_path.iterdir())


def test_the_command_shows_and_saves(
    found: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tierstore.plan.measure.measure", lambda *_, **__: found)
    for suffix in ("json", "toml"):
        path = tmp_path / f"host.{suffix}"
        assert run("measure", "--dir", str(tmp_path), "--json", str(path)) == 0
        assert read_host(path) == found.host
    shown = capsys.readouterr().out
    assert f"Saved as {tmp_path / 'host.json'}" in shown
    assert f"{found.host.storage[0].reads_per_s:,.0f} /s" in shown
    for loop in found.loops:
        assert loop.name in shown


def test_the_command_looks_first_where_it_will_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.plan.measure.measure", lambda *_, **__: pytest.fail("a minute for nothing"))
    taken = tmp_path / "host.json"
    taken.write_text("precious")
    with pytest.raises(FileExistsError, match="--force"):
        run("measure", "--json", str(taken))
    with pytest.raises(ValueError, match=r"ends in .json or .toml"):
        run("measure", "--json", str(tmp_path / "host.txt"))
    with pytest.raises(FileNotFoundError, match="is not a directory; make it first"):
        run("measure", "--json", str(tmp_path / "none" / "host.json"))
    assert taken.read_text() == "precious"
