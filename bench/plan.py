"""Are the planner's predictions of training right?

Hit rates and step times, predicted and measured, of whole models at several budgets. Parts, each for itself with
``--only``: "unseen" (workloads that were chosen before they were run, and that nothing was fitted to) and "known"
(those that were unseen once; dense layers, ranks and threads are modelled since).

On few cores run it with OMP_WAIT_POLICY=PASSIVE: else OpenMP's threads spin between two kernels, which is no work that
a planner could know of.
"""

import functools
import shutil
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

from tierstore.dist.placement import RankCosts
from tierstore.plan import Host, MissRatioCurve, Prediction, Setup, TableShape, Workload, accesses_of
from tierstore.plan.accesses import Accesses
from tierstore.plan.curves import curve
from tierstore.plan.demand import Demand
from tierstore.plan.loads import in_words
from tierstore.plan.measure import measure
from tierstore.plan.model import predict
from tierstore.plan.tiers import pool_loads

from .common import Goal, Part, Report, Run, Table, Told, program, run_parts
from .planned import Case, Measured, PlannedRun

__all__ = ["PARTS", "run"]


def _workload(case: Case) -> Workload:
    """The same, as the planner has it."""
    shape = {"num_embeddings": case.rows, "embedding_dim": case.dim, "pooling_factor": float(case.pooling_factor)}
    return Workload(
        name=case.name,
        tables=tuple(TableShape(name=name, exponent=case.exponent, **shape) for name in case.table_names),  # type: ignore[arg-type]
        batch_samples=case.batch * case.ranks,
        optimizer=case.optimizer,
        **case.dense._asdict(),
    )


def _second_half(accesses: Accesses, policy: str) -> MissRatioCurve:
    """The curve of the batches that are measured, the cache being warm from those before."""
    return curve(accesses, policy, skip=accesses.num_batches // 2)


class _Subject:
    """A workload, ready to be run again and again."""

    def __init__(self, case: Case, run: PlannedRun, config: dict[str, Any]) -> None:
        self.case, self._run, self._config = case, run, config
        self.shape = _workload(case)
        self._demand = Demand.from_accesses(
            self.shape, accesses_of(run.trace), config["policy"], make_curve=_second_half
        )

    def round(self, host: Host) -> list[tuple[Measured, Prediction]]:
        """A run of each budget, and what is predicted of it."""
        budgets = [int(self.shape.table_bytes * percent / 100) for percent in self.case.budgets]
        measured, rank_costs = self._run.at(budgets)
        found = [
            (each, self._predicted(host, rank_costs, budget, each.rows_moved))
            for budget, each in zip(budgets, measured, strict=True)
        ]
        for percent, (each, prediction) in zip(self.case.budgets, found, strict=True):
            print(
                f"  {self.case.name}, {percent:g} %: hits {each.hit_rate:.4f}, predicted {_hit_rate(prediction):.4f}; "
                f"step {1e3 * each.step_s:.2f} ms, predicted {1e3 * prediction.step_s:.2f}",
                flush=True,
            )
        return found

    def _predicted(self, host: Host, rank_costs: RankCosts | None, budget: int, rows_moved: float) -> Prediction:
        """With as much cleaning as was measured: a run is too short for it to be steady."""
        config, shape = self._config, self.shape
        fields: dict[str, Any] = {
            "workload": shape, "host": host, "ddr_bytes": budget, "page_cache_bytes": config["page_cache_gib"] * 2**30,
            "policy": config["policy"], "prefetch_depth": config["depth"], "threads": config["threads"],
            "rank_costs": rank_costs,
        }  # fmt: skip
        steady = sum(pool.rows_moved for pool in pool_loads(Setup(**fields).of_a_rank, self._demand.laid_out(shape)))
        cleaning = rows_moved / steady if steady else 0.0
        return predict(Setup(**fields, cleaning=cleaning), self._demand)


def _hit_rate(prediction: Prediction) -> float:
    """Of host memory."""
    return next(tier.hit_rate for tier in prediction.tiers if tier.tier == "ddr")


def _measure(request: Run, _figures: dict[str, Any], *, key: str) -> dict[str, Any]:
    config = request.config
    folder = request.folder / f"plan_{key}"
    folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(**(fields | config["changes"])) for fields in config[key]]
    subjects = [
        _Subject(case, PlannedRun(case, folder / f"{number}", config), config) for number, case in enumerate(cases)
    ]
    rounds: list[list[list[tuple[Measured, Prediction]]]] = []
    hosts: list[dict[str, float]] = []
    for _ in range(config[f"{key}_rounds"]):
        # Before each round, as others use the machine too.
        host = measure(request.folder, seconds=config["machine_seconds"])
        hosts.append({"flops": host.processor.flops, **vars(host.costs)})
        rounds.append([subject.round(host) for subject in subjects])
    shutil.rmtree(folder)
    points = [
        _point(subject, percent, [of_round[number][place] for of_round in rounds])
        for number, subject in enumerate(subjects)
        for place, percent in enumerate(subject.case.budgets)
    ]
    return {"points": points, "cases": [case._asdict() for case in cases], "hosts": hosts}


def _point(subject: _Subject, percent: float, of_rounds: Sequence[tuple[Measured, Prediction]]) -> dict[str, Any]:
    """Medians of the rounds, of what was measured and of what was predicted."""
    measured = sorted((each for each, _ in of_rounds), key=lambda each: each.step_s)[len(of_rounds) // 2]
    found = sorted((each for _, each in of_rounds), key=lambda each: each.step_s)[len(of_rounds) // 2]
    loads = {load.resource: load for load in found.loads}
    ring = 2 * (subject.case.ranks - 1) / subject.case.ranks * subject.shape.dense_flops / 2 * 4
    return {
        "workload": subject.case.name,
        "budget_percent": percent,
        **measured._asdict(),
        "step_s_of_rounds": [each.step_s for each, _ in of_rounds],
        "predicted_hit_rate": _hit_rate(found),
        "predicted_step_s": found.step_s,
        "predicted_step_s_of_rounds": [each.step_s for _, each in of_rounds],
        "predicted_sent_bytes": loads["network"].amount - ring + loads["id exchange"].amount,
        "bottleneck": found.bottleneck,
        "loads": {name: load.seconds for name, load in loads.items()},
    }


def _tell(figures: dict[str, Any], *, key: str, title: str, note: str) -> Told:
    rows, hits, times = [], list[float](), list[float]()
    for each in figures["points"]:
        sent, error = each["sent_bytes"], each["predicted_step_s"] / each["step_s"] - 1
        hits.append(100 * abs(each["predicted_hit_rate"] - each["hit_rate"]))
        times.append(100 * abs(error))
        rows.append(
            [
                each["workload"], f"{each['budget_percent']:g} %", f"{each['hit_rate']:.2%}",
                f"{each['predicted_hit_rate']:.2%}", f"{1e3 * each['step_s']:.1f}",
                f"{1e3 * each['predicted_step_s']:.1f}", f"{error:+.0%}", in_words(each["bottleneck"]),
                "" if sent is None else f"{sent / 2**20:.2f}, {each['predicted_sent_bytes'] / 2**20:.2f}",
            ]
        )  # fmt: skip
    columns = [
        "workload", "DDR", "hits measured", "predicted", "step ms measured", "predicted", "off", "bottleneck",
        "MiB a rank sends for tables, measured and predicted",
    ]  # fmt: skip
    wanted = (("points the predicted hit rate is off", hits, 1), ("% the predicted step time is off", times, 15))
    goals = [
        Goal(name=f"{key}: {what}, on average", value=round(statistics.mean(errors), 3), at_most=most)
        for what, errors, most in wanted
    ]
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], goals=goals, notes=[note])


_WORDS: Final = {
    "known": (
        "whole models that were looked at",
        "Known: these were the unseen workloads before; dense layers, ranks and threads are modelled since.",
    ),
    "unseen": (
        "workloads that nothing was fitted to",
        "Unseen: the workloads were fixed before they were first run, and bench/plan.toml has them.",
    ),
}
PARTS: Final[dict[str, Part]] = {
    key: Part(functools.partial(_measure, key=key), functools.partial(_tell, key=key, title=title, note=note))
    for key, (title, note) in _WORDS.items()
}


def run(request: Run) -> Report:
    return run_parts(request, "Are the planner's predictions of training right?", PARTS)


if __name__ == "__main__":
    sys.exit(program("plan", run, parts=tuple(PARTS)))
