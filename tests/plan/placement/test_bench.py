"""The sharding benchmark, quickly: that it measures what it says."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.planning.sharding import measure_sharding, rmc_mix


def test_plans_are_run_device_by_device(tmp_path: Path) -> None:
    found = measure_sharding(tmp_path, quick=True)
    assert set(found.held_out) == {"bytes moved", "linear", "learned"}
    assert [(plan.model, plan.num_devices) for plan in found.plans] == [
        (model, devices) for devices in (2, 3) for model in ("bytes moved", "linear", "learned", "timed")
    ]
    for plan in found.plans:
        assert len(plan.predicted_s) == len(plan.measured_s) == plan.num_devices
        assert all(seconds > 0 for seconds in plan.measured_s)
        assert plan.slowest_s == max(plan.measured_s)
        assert plan.balance == pytest.approx(plan.slowest_s * plan.num_devices / plan.total_s)
        assert plan.balance >= 1
    assert not list(tmp_path.iterdir())
    json.dumps(asdict(found), allow_nan=False)


def test_the_mix_is_the_same_each_time() -> None:
    assert rmc_mix(40, seed=1, quick=False) == rmc_mix(40, seed=1, quick=False)
    assert rmc_mix(40, seed=1, quick=False) != rmc_mix(40, seed=2, quick=False)
