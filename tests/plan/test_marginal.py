"""Marginal values: differences of predictions, and consistent with the bottleneck."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.plan.hosts import MIB, make_host, make_setup
from tests.plan.test_model import DEMANDS, TRAINED, plan, setups
from tierstore.plan import Setup
from tierstore.plan.what_if import marginal_values


def values(setup: Setup) -> dict[tuple[str, str], float]:
    found = marginal_values(setup, DEMANDS[setup.workload])
    assert [each.samples_per_s for each in found] == sorted((each.samples_per_s for each in found), reverse=True)
    return {(each.resource, each.change): each.samples_per_s for each in found}


def test_each_is_what_that_much_more_brings() -> None:
    setup = make_setup(TRAINED, ddr_bytes=32 * MIB, page_cache_bytes=8 * MIB, hosts=2)
    before = plan(setup).samples_per_s
    found = values(setup)
    more = plan(replace(setup, ddr_bytes=1.1 * setup.ddr_bytes)).samples_per_s
    assert found["ddr", "+10 %"] == pytest.approx(more - before)
    reads = replace(setup.host.storage[0], reads_per_s=1.1e5, read_bytes_per_s=2.2e9)
    faster = plan(replace(setup, host=replace(setup.host, storage=(reads,)))).samples_per_s
    assert found["ssd reads", "+10 %"] == pytest.approx(faster - before)
    five = make_host(cores=5)
    five = replace(five, processor=replace(five.processor, flops=five.processor.flops * 5 / 4))
    cores = plan(replace(setup, host=five)).samples_per_s
    assert found["cores", "+1"] == pytest.approx(cores - before)
    assert ("network", "+10 %") in found
    assert ("pcie", "+10 %") not in found
    assert len({resource for resource, _ in found}) == len(found), "one line a resource"


BOUND_BY = {name: name for name in ("ssd reads", "ssd writes", "pcie", "network", "cores")} | {
    "model": "flops",
    "hbm": "hbm bandwidth",
    "ddr": "ddr bandwidth",
    "lookups": "cores",
}
"""What there would have to be more of where a load is the bottleneck. "cold rows" and "write-back" are one thread each:
nothing but fewer misses helps."""


@settings(max_examples=60, deadline=None)
@given(setups)
def test_more_of_the_bottleneck_helps_and_of_what_is_idle_does_not(setup: Setup) -> None:
    found = values(setup)
    assert all(gain >= -1e-9 * plan(setup).samples_per_s for gain in found.values())
    before = plan(setup)
    idle = {BOUND_BY.get(load.resource) for load in before.loads if not load.seconds} - {
        BOUND_BY.get(load.resource) for load in before.loads if load.seconds
    }
    for resource in idle & {name for name, _ in found}:
        assert all(gain == 0 for (name, _), gain in found.items() if name == resource)
    own = BOUND_BY.get(before.bottleneck)
    uses_more_cores = setup.threads >= setup.host.processor.cores
    if own == "cores" and before.bottleneck == "lookups" and not uses_more_cores:
        return
    speeds = {
        name: gain for (name, change), gain in found.items() if change == "+10 %" and name not in ("ddr", "page cache")
    }
    if own is not None and own != "cores":
        assert found[own, "+10 %"] > 0
        if before.step_s == pytest.approx(max(load.seconds for load in before.loads)):
            assert found[own, "+10 %"] == max(speeds.values())
