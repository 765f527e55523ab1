"""The sharding benchmark, quickly: that it measures what it says."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.planning import sharding
from bench.planning.sharding import measure_sharding, rmc_mix
from tierstore.plan.placement import Measurement, measure_costs


def timed_by_bytes(*arguments: Any, **named: Any) -> tuple[Measurement, ...]:
    """What was measured, with other seconds: of tables as small as these noise may decide which takes longer."""
    return tuple(
        each._replace(forward_s=each.call_s + 1e-9 * each.shape.lookups * each.shape.weight_bytes, backward_s=1e-6)
        for each in measure_costs(*arguments, **named)
    )


def test_plans_are_run_device_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "measure_costs", timed_by_bytes)
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
