"""Money, power and wear, by hand."""

import math
from dataclasses import replace

import pytest

from tests.plan.hosts import DRIVE, GIB, flat_demand, make_host, make_setup, make_workload
from tierstore.plan.model import predict
from tierstore.plan.price import Pricing, drive_writes_a_day, price_of, years_of_life

PRICING = Pricing(usd_per_kwh=0.1, pue=1.5, years=5.0, hours_a_day=12.0)


def test_a_month_is_a_part_of_the_price_and_power_of_all_parts() -> None:
    found = price_of(make_host(drives=3, gpus=2), 4, PRICING)
    assert found.watts == 4 * (50 + 100 + 20 + 3 * 10 + 2 * 300)
    assert found.usd == 4 * (500 + 1000 + 640 + 3 * 100 + 2 * 10_000)
    hours = 12 * 365.25 / 12
    assert found.usd_a_month == pytest.approx(found.usd / 60 + found.watts / 1000 * 1.5 * hours * 0.1)


def test_drives_are_worn_by_what_is_written_to_them() -> None:
    host = make_host(drives=2)
    assert drive_writes_a_day(host, 1e7, PRICING) == pytest.approx(1e7 * 43_200 / 2 / 1e12)
    small = replace(DRIVE, capacity_bytes=1e11)
    uneven = replace(host, storage=(DRIVE, small))
    assert drive_writes_a_day(uneven, 1e7, PRICING) == pytest.approx(1e7 * 43_200 / 2 / 1e11)
    assert drive_writes_a_day(host, 0.0, PRICING) == 0
    assert drive_writes_a_day(make_host(drives=0), 0.0, PRICING) == 0


def test_years_of_life_are_the_warranty_over_the_wear() -> None:
    setup = make_setup()
    found = predict(setup, flat_demand(setup.workload, unique=2000, miss_ratio=0.25), pricing=PRICING)
    written = next(load for load in found.loads if load.resource == "ssd writes").amount
    a_day = written / found.step_s * 43_200 / 1e12
    assert found.drive_writes_a_day == pytest.approx(a_day)
    assert years_of_life(found, PRICING) == pytest.approx(5 / a_day)
    served = make_workload(training=False)
    reading = predict(make_setup(served, ddr_bytes=GIB), flat_demand(served, unique=2000, miss_ratio=0.25))
    assert reading.drive_writes_a_day == 0
    assert years_of_life(reading, PRICING) == math.inf
