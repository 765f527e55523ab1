"""A plan's result with figures made up, none of the planner's: what a report shows is compared with these."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.plan.hosts import SHOP_HOST, shop_workload
from tierstore.plan import MissRatioCurve
from tierstore.plan.assumptions import Assumption, Fleet, WhatIf
from tierstore.plan.plan_file import PlanFile, TargetSection
from tierstore.plan.prediction import Lane, Latency, Prediction, Price, ResourceLoad, Setup, TierLoad
from tierstore.plan.result import Alternative, Grid, Line, Marginal, PlanResult, PricePart, ShownCurve

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


def _assumption(name: str) -> Assumption:
    what_if = (
        WhatIf(0.5, 0.525, None, f"no setup of {name}"),
        WhatIf(2.0, 2.1, Fleet(f"3 x {name}", 3, 3900.0, 145.5, 570.0, 51_000.0, None, "model")),
    )
    return Assumption(
        "exponent", 1.05, f"skew: Zipf's law of exponent 1.05, in {name}", "exponent, or a trace", what_if
    )


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
    sizes = tuple(2.0**power for power in range(20, 27))
    speeds = tuple(64_000.0 * min(2.0, size / 2**23) for size in sizes)
    found = PlanResult(
        assumptions=(_assumption(name),),
        asked=PlanFile(target=TargetSection(samples_per_s=50_000.0)),
        prediction=prediction,
        hosts=(name,),
        searched=True,
        num_setups=120,
        curves=(
            ShownCurve("pool", "lru", made_curve(), 125_000.0),
            ShownCurve("policy", "opt", made_curve("opt", power=0.3)),
            ShownCurve("table", name, made_curve(top=400_000)),
            ShownCurve("table", "user", made_curve(top=100_000)),
            ShownCurve("window", "part 1 of 2", made_curve(), 125_000.0),
            ShownCurve("window", "part 2 of 2", made_curve(power=0.4), 125_000.0),
        ),
        gains=(
            Marginal("ssd reads", "+10 %", 6_400.0, 40.0),
            Marginal("ddr", "+10 %", 1_280.0, 0.5),
            Marginal("ddr", "+1 GiB", 32_000.0, 6.25),
            Marginal("flops", "+10 %", 0.0, None),
        ),
        lines=(
            Line(
                "DDR for rows",
                "bytes",
                sizes,
                tuple(256 / speed for speed in speeds),
                speeds,
                {"model": (0.002,) * 7, "ssd reads": tuple(0.004 * 2**23 / size for size in sizes)},
                2.0**23,
            ),
            Line("batch", "samples", (128.0, 256.0, 512.0), (0.003, 0.004, 0.006), (42e3, 64e3, 85e3), {}, 256.0),
            Line("change of all exponents", "", (-0.1, 0.0, 0.1), (0.005, 0.004, 0.003), (51e3, 64e3, 85e3), {}, 0.0),
        ),
        grid=Grid(
            sizes, (1e5, 2e5, 4e5), tuple(tuple(speed * k for speed in speeds) for k in (0.5, 1, 2)), 2.0**23, 2e5
        ),
        alternatives=(
            Alternative(setup, replace(prediction, price=Price(250.0, 2600.0, 97.0), samples_per_s=90e3), ""),
            Alternative(setup, replace(prediction, samples_per_s=20e3), f"too slow by 2.5 on {name}"),
            Alternative(replace(setup, ddr_bytes=2.0**40), None, "does not fit: memory"),
        ),
        price_parts=(
            PricePart("processors", 1, 500.0, 100.0),
            PricePart("memory", 1, 100.0, 20.0),
            PricePart("SSD", 2, 400.0, 20.0),
            PricePart("board, case, power supply", 1, 300.0, 50.0),
        ),
        warnings=("drives wear out: the most written one lasts 7 months",),
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
        found, assumptions=(), asked=asked, prediction=prediction, lines=(), grid=None, alternatives=(), warnings=()
    )
