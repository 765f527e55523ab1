"""What a step takes, by hand.

Of a table of ``workload_of``, in a step: 16 ids are 128 bytes; reading their rows 16 * 16 = 256, writing 8 bags
8 * 16 = 128, so 384 bytes by rows forward; training reads 256 of gradients, and reads and writes 10 rows: 320.
"""

import pytest

from tests.plan.placement.support import ALL, demand_of, host_of, workload_of
from tierstore.plan import SoftwareCosts
from tierstore.plan.placement import PlacementPlan, place

FORWARD, TRAINING = 384, 960
ALL_REDUCED = 200
"""Bytes of dense gradients with 100 flops a sample: 50 weights."""


def plan_of(strategy: str, *, accelerators: int = 2, **settings: object) -> PlacementPlan:
    workload = workload_of(
        tables=settings.pop("tables", 2),  # type: ignore[arg-type]
        optimizer=settings.pop("optimizer", "sgd"),  # type: ignore[arg-type]
        dense_flops=settings.pop("dense_flops", 0.0),  # type: ignore[arg-type]
    )
    host = host_of(accelerators, **settings.pop("host", {}))  # type: ignore[arg-type]
    given = {"room": ALL, "demand": demand_of(workload), **settings}
    return place(workload, host, strategy=strategy, **given)  # type: ignore[arg-type]


def amounts(plan: PlacementPlan) -> dict[str, float]:
    assert plan.step is not None
    return {load.resource: load.amount for load in plan.step.loads}


def seconds(plan: PlacementPlan) -> dict[str, float]:
    assert plan.step is not None
    return {load.resource: load.seconds for load in plan.step.loads}


def test_one_device_moves_rows_and_ids_only() -> None:
    plan = plan_of("gpu", accelerators=1, tables=1, optimizer="none")
    assert amounts(plan) == {"hbm": FORWARD, "pcie": 128}
    assert seconds(plan) == {"hbm": FORWARD / 1e3, "pcie": 128 / 1e2 + 1e-6}
    assert plan.step is not None
    assert plan.step.step_s == pytest.approx(FORWARD / 1e3 + 128 / 1e2 + 1e-6)
    assert plan.step.overlapped_s == 128 / 1e2 + 1e-6
    assert plan.step.bottleneck == "pcie"
    assert plan.step.samples_per_s == pytest.approx(8 / plan.step.step_s)


def test_two_devices_exchange_half() -> None:
    """Ids 128, results 128 and gradients 128 of a device, half of them for samples of the other."""
    assert amounts(plan_of("gpu")) == {"hbm": TRAINING, "pcie": 128, "peer": 192}
    assert seconds(plan_of("gpu"))["peer"] == pytest.approx(192 / 1e4 + 3 * 1e-3)
    assert amounts(plan_of("gpu", optimizer="none")) == {"hbm": FORWARD, "pcie": 128, "peer": 128}


def test_devices_of_two_hosts_use_the_network() -> None:
    """Four devices, a table each: of 384 bytes a quarter to the neighbour, and of a host's 768 half to the other."""
    plan = plan_of("gpu", tables=4, hosts=2)
    assert amounts(plan) == {"hbm": TRAINING, "pcie": 128, "peer": 96, "network": 384}
    assert seconds(plan)["network"] == pytest.approx(384 / 10 + 3)


def test_the_model_is_shared_by_the_devices() -> None:
    """8 samples of 100 flops, three times that in training; gradients go around a ring of two."""
    plan = plan_of("gpu", dense_flops=100.0)
    assert amounts(plan) == {"hbm": TRAINING, "pcie": 128, "peer": 192 + ALL_REDUCED, "model": 1200}
    assert seconds(plan)["model"] == 1200 / 1e5
    assert amounts(plan_of("gpu", dense_flops=100.0, optimizer="none"))["model"] == 400
    on_cores = plan_of("host", accelerators=0, dense_flops=100.0)
    assert seconds(on_cores)["model"] == 2400 / 1e6


def test_a_host_sends_results_to_its_accelerators() -> None:
    """256 bytes of bags, and as much of gradients, for two accelerators."""
    assert amounts(plan_of("host")) == {"ddr": 2 * TRAINING, "pcie": 256}
    assert seconds(plan_of("host")) == {"ddr": 2 * TRAINING / 1e5, "pcie": 256 / 1e2 + 2e-6}
    assert amounts(plan_of("host", accelerators=0)) == {"ddr": 2 * TRAINING}


def test_cores_look_up_at_their_measured_cost() -> None:
    """32 ids: 100 + 16 * 10 ns of pooling, 200 + 16 * 5 of updating, 4 us for the batch; two cores."""
    costs = SoftwareCosts(batch_us=4.0, pool_ns=100.0, pool_ns_per_byte=10.0, update_ns=200.0, update_ns_per_byte=5.0)
    plan = plan_of("host", host={"costs": costs})
    assert amounts(plan)["cores"] == 32
    assert seconds(plan)["cores"] == pytest.approx((32 * (260 + 280) * 1e-9 + 4e-6) / 2)
    looked_up = plan_of("host", host={"costs": costs}, optimizer="none")
    assert seconds(looked_up)["cores"] == pytest.approx((32 * 260 * 1e-9 + 4e-6) / 2)


def test_lookups_wait_for_the_slower_of_memory_and_cores() -> None:
    fast, slow = (plan_of("host", accelerators=0, host={"costs": SoftwareCosts(pool_ns=ns)}) for ns in (1.0, 1e9))
    assert fast.step is not None
    assert slow.step is not None
    assert fast.step.step_s == pytest.approx(2 * TRAINING / 1e5)
    assert slow.step.step_s == pytest.approx(32 / 2)
    assert (fast.step.bottleneck, slow.step.bottleneck) == ("ddr", "cores")


def test_two_hosts_exchange_half() -> None:
    plan = plan_of("host", hosts=2, dense_flops=100.0)
    assert amounts(plan) == {
        "ddr": TRAINING, "network": 192 + ALL_REDUCED, "pcie": 128, "peer": ALL_REDUCED, "model": 600,
    }  # fmt: skip


def test_servers_send_everything_over_the_network() -> None:
    """One host takes what two servers send, two hosts half each of what one server sends."""
    one = plan_of("remote", servers=2)
    assert amounts(one) == {"ddr": TRAINING, "network": 768, "pcie": 256}
    assert seconds(one)["network"] == pytest.approx(768 / 10 + 3)
    two = plan_of("remote", servers=1, hosts=2)
    assert amounts(two) == {"ddr": 2 * TRAINING, "network": 768, "pcie": 128}


def test_hybrid_looks_up_side_by_side() -> None:
    """Room for one of three tables in the accelerator: links add up, lookups do not."""
    plan = plan_of("hybrid", accelerators=1, tables=3)
    assert amounts(plan) == {"hbm": TRAINING, "ddr": 2 * TRAINING, "pcie": 128 + 2 * 256}
    assert plan.step is not None
    assert plan.step.step_s == pytest.approx(TRAINING / 1e3 + (128 + 512) / 1e2 + 3e-6)


def test_rows_in_parts_send_partial_sums() -> None:
    """One table too large for a device: each half sends all eight bags, and takes half of the ids."""
    small = host_of(2).accelerators[0]
    hbm = small.hbm.__class__(capacity_bytes=800.0, row_bytes_per_s=1e3)
    halves = (small.__class__(hbm=hbm, pcie=small.pcie, peer=small.peer, flops=small.flops),) * 2
    plan = plan_of("gpu", tables=1, optimizer="none", host={"accelerators": halves})
    assert plan.fits
    assert amounts(plan) == {"hbm": 128 + 128, "pcie": 64, "peer": (64 + 128) / 2}
