"""What tiers save: both fleets are the cheapest of their kind, as planned and with an input off."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.plan import plan_file
from tierstore.plan.assumptions import Assumption, Fleet, WhatIf
from tierstore.plan.gain import Span, gain_of
from tierstore.plan.parts import write_host
from tierstore.plan.plan_file import PlanFile
from tierstore.plan.planning import plan
from tierstore.plan.workload import Assumed, Workload

TABLES = '[[table]]\nname = "item"\nnum_embeddings = 4_000_000\nembedding_dim = 64\npooling_factor = 4\n'
Asked = Callable[..., PlanFile]


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """A host of 512 MiB at most, 1 GiB of rows; its cheapest part is its memory."""
    folder = tmp_path_factory.mktemp("gain")
    write_host(replace(SHOP_HOST, ddr=replace(SHOP_HOST.ddr, capacity_bytes=2.0**29)), folder / "box.json")
    (folder / "shop.toml").write_text('[workload]\nbatch_samples = 256\noptimizer = "sgd"\ndense_flops = 1\n' + TABLES)

    def ask(*overrides: str) -> PlanFile:
        path = folder / "plan.toml"
        path.write_text(
            f'[workload]\nfile = "{folder}/shop.toml"\n[host]\nfile = "{folder}/box.json"\n[target]\n'
            "samples_per_s = 5000\n"
        )
        return plan_file.load(path, [plan_file.parse_override(text) for text in overrides])

    return ask


def test_it_is_between_two_plans_and_its_range_over_plans_of_each_input_that_is_off(asked: Asked) -> None:
    found = plan(asked())
    assert found.gain is not None
    memory, month, power = found.gain.memory, found.gain.usd_a_month, found.gain.watts
    assert memory is not None
    assert month is not None
    assert power is not None

    def saved(*overrides: str) -> float:
        prices = [
            plan(asked(f"search.in_memory={each}", *overrides)).prediction.price.usd_a_month
            for each in ("true", "false")
        ]
        return prices[0] - prices[1]

    own = plan(asked("search.in_memory=true")).prediction
    assert (memory.usd_a_month, memory.watts) == (own.price.usd_a_month, own.price.watts)
    assert own.is_in_memory
    assert month.own == pytest.approx(saved())
    assert month.own > 0, "rows decide the number of hosts"
    assert power.own == memory.watts - found.prediction.price.watts
    assert month.low < month.own < month.high, "skew, which nobody gave, at half and twice of it"
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "overrides",
    [
        ("setup.ddr=64MiB",),
        ("search.in_memory=true",),
        ("target.samples_per_s=0", "target.usd=1e5", "search.hosts=[1,4]"),
    ],
)
def test_there_is_none_without_a_search_at_a_rate(asked: Asked, overrides: tuple[str, ...]) -> None:
    assert plan(asked(*overrides)).gain is None


def test_rows_that_no_fleet_has_memory_for_are_told(asked: Asked) -> None:
    gain = plan(asked("search.hosts=[1]", "pricing.years=1")).gain
    assert gain is not None
    assert (gain.memory, gain.usd_a_month) == (None, None)
    assert "rows of a host are wanted in it" in gain.reason


def fleet(usd: float) -> Fleet:
    return Fleet("1 x box", 1, 0.0, usd, 10 * usd, 1.0, None, "model")


def test_a_range_is_over_cases_that_have_both_fleets() -> None:
    workload = shop_workload(assumed=(Assumed("exponent", ("item",)),))
    what_if = (WhatIf(0.5, 0.5, fleet(10.0)), WhatIf(2.0, 2.0, None, "no fleet"))
    assumptions = (Assumption("exponent", 1.05, "", "", what_if),)

    def in_memory(other: Workload) -> Fleet:
        return fleet(20.0 if other == workload else 40.0)

    found = gain_of(workload, fleet(15.0), assumptions, in_memory)
    assert found.usd_a_month == Span(5.0, 5.0, 30.0)
    assert found.watts == Span(50.0, 50.0, 300.0)
