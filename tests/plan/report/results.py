"""A plan's result with figures made up, none of the planner's: what a report shows is compared with these."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.plan import MissRatioCurve
from tierstore.plan.assumptions import Assumption, Instead
from tierstore.plan.marginal import Marginal
from tierstore.plan.plan_file import PlanFile, TargetSection
from tierstore.plan.prediction import Lane, Latency, Prediction, Price, ResourceLoad, Setup, TierLoad
from tierstore.plan.result import PlanResult, ShownCurve
from tierstore.plan.search import Attempt

__all__ = ["HOSTILE", "made_curve", "made_result", "served_result"]

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def made_curve(policy: str = "lru", top: int = 500_000, power: float = 0.5) -> MissRatioCurve:
    sizes = np.unique(np.geomspace(1, top, 300).astype(np.int64))
    return MissRatioCurve(
        policy=policy, sizes=sizes, miss_ratios=1 - (sizes / top) ** power, num_accesses=1_000_000, num_rows=top
    )


def _prediction(setup: Setup) -> Prediction:
    return Prediction(
        setup=setup,
        step_s=0.004,
        samples_per_s=64_000.0,
        tiers=(
            TierLoad("ddr", setup.ddr_bytes, 125_000.0, 2000.0, 0.5),
            TierLoad("ssd", 2e12, 500_000.0, 1000.0, 0.25),
        ),
        loads=(
            ResourceLoad("lookups", 0.001, 2048.0, "ids"),
            ResourceLoad("ssd reads", 0.004, 800.0, "reads"),
            ResourceLoad("model", 0.002, 2e8, "flops"),
            ResourceLoad("network", 0.0, 0.0, "bytes"),
        ),
        lanes=(
            Lane("drives", 0.004, ("ssd reads", "ssd writes")),
            Lane("computing", 0.003, ("lookups", "model", "network")),
        ),
        bottleneck="ssd reads",
        drive_writes_a_day=0.5,
        price=Price(190.0, 1300.0, 48.5),
    )


def _other(found: Prediction, hosts: int, price: Price, rate: float) -> Instead:
    """Of so many hosts, bound by the model."""
    setup = replace(found.setup, hosts=hosts)
    return Instead(replace(found, setup=setup, price=price, samples_per_s=rate, bottleneck="model"))


def made_result(name: str = "shop", **changes: Any) -> PlanResult:
    """Of training; the plan file asked for a target that it reaches."""
    tables = shop_workload().tables
    named = (replace(tables[0], name=name), *tables[1:])
    setup = Setup(
        workload=shop_workload(name=name, tables=named),
        host=replace(SHOP_HOST, name=name),
        ddr_bytes=2.0**23,
        threads=4,
    )
    prediction = _prediction(setup)
    found = PlanResult(
        assumptions=(
            Assumption(
                "exponent",
                1.05,
                f"skew: Zipf's law of exponent 1.05, in {name}",
                (Instead(None, f"no setup of {name}"), _other(prediction, 3, Price(570.0, 3900.0, 145.5), 51_000.0)),
            ),
        ),
        asked=PlanFile(target=TargetSection(samples_per_s=50_000.0)),
        prediction=prediction,
        hosts=(name,),
        searched=True,
        num_setups=120,
        in_memory=_other(prediction, 2, Price(380.0, 4800.0, 97.0), 51_000.0),
        in_memory_if_off=(
            Assumption(
                "exponent",
                1.05,
                "",
                tuple(_other(prediction, 4, Price(760.0, 9600.0, usd), 51_000.0) for usd in (90.0, 160.5)),
            ),
        ),
        curves=(ShownCurve(f"lru of {name}", made_curve(), 125_000.0),),
        marginals=(
            Marginal("ssd reads", "+10 %", 6_400.0, 40.0),
            Marginal("ddr", "+10 %", 1_280.0, 0.5),
            Marginal("flops", "+10 %", 0.0, None),
        ),
        alternatives=(
            Attempt(setup, replace(prediction, price=Price(250.0, 2600.0, 97.0), samples_per_s=90e3)),
            Attempt(setup, replace(prediction, samples_per_s=20e3), f"too slow by 2.5 on {name}"),
            Attempt(replace(setup, ddr_bytes=2.0**40), None, "does not fit: memory"),
        ),
        marks=("its drives are written 2 times a day",),
        warnings=("the target is missed: 7 of 9",),
        sources=(f"host: {name}",),
    )
    return replace(found, **changes)


def served_result() -> PlanResult:
    """Of serving, at a rate."""
    found = made_result()
    setup = replace(found.prediction.setup, workload=shop_workload(optimizer="none"))
    latency = Latency(500.0, 0.002, 0.004, 0.006)
    prediction = replace(found.prediction, setup=setup, latency=latency, drive_writes_a_day=0.0)
    asked = PlanFile(target=TargetSection(queries_per_s=500.0, p99_ms=10.0))
    return replace(
        found,
        assumptions=(),
        asked=asked,
        prediction=prediction,
        in_memory=None,
        in_memory_if_off=(),
        alternatives=(),
        marks=(),
        warnings=(),
    )
