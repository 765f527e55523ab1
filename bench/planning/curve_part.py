"""Part "curves": are miss-ratio curves right, how far is a sample's from them, and what do they take?"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tierstore.plan import Accesses
from tierstore.plan.traces.zipf import draw_zipf

from ..common import Goal, Run, Table
from ..data import criteo_keys, find_criteo
from ..parts import Part, Told
from .curves import curve_speeds, exact_hit_rates, one_batch, sampled_errors

__all__ = ["PART"]


def _workloads(request: Run) -> Iterator[tuple[str, Accesses]]:
    config = request.config
    criteo = find_criteo()
    if criteo is not None:
        yield "Criteo's lookups", one_batch(criteo_keys(criteo))
    ids = draw_zipf(config["zipf_rows"], config["exponent"], config["zipf_accesses"], seed=config["seed"])
    yield f"Zipf {config['exponent']}", one_batch(ids)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, criteo = request.config, find_criteo()
    exact = [] if criteo is None or request.quick else exact_hit_rates(criteo_keys(criteo))
    sampled, speeds = [], []
    for name, accesses in _workloads(request):
        if request.quick:
            accesses = one_batch(accesses.keys[:20_000])
        rate, seeds = config["sampling_rate"], config["sampling_seeds"]
        for error in sampled_errors(name, accesses, rate=rate, num_seeds=seeds):
            print(f"  {name}, {error.policy}: {error.mean_points:.2f} points off from a sample", flush=True)
            sampled.append(dataclasses.asdict(error) | {"mean_points": error.mean_points})
        for speed in curve_speeds(name, accesses.keys, peer_rows=config["peer_rows"]):
            print(f"  {name}, {speed.policy}: {speed.curve_per_s / 1e6:.1f} M accesses/s", flush=True)
            speeds.append(dataclasses.asdict(speed))
    equal = [dataclasses.asdict(each) | {"is_equal": each.is_equal} for each in exact]
    return {"exact": equal, "sampled": sampled, "speeds": speeds}


def _tell(figures: dict[str, Any]) -> Told:
    goals = [
        Goal(
            name="hit rates on Criteo's lookups that are those of independent programs, to four places",
            value=sum(each["is_equal"] for each in figures["exact"]),
            exactly=len(figures["exact"]),
        )
    ]
    goals += [
        Goal(
            name=f"{each['workload']}, {each['policy']}: points that a sample's curve is off, on average",
            value=round(each["mean_points"], 3),
            at_most=1,
        )
        for each in figures["sampled"]
    ]
    goals += [
        Goal(
            name=f"{each['workload']}: millions of accesses/s of the whole LRU curve, one thread",
            value=round(each["curve_per_s"] / 1e6, 2),
            at_least=10,
        )
        for each in figures["speeds"]
        if each["policy"] == "lru"
    ]
    return Told(
        tables=[_exact_table(figures), _sampled_table(figures), _speed_table(figures)], goals=goals, notes=[_NOTE]
    )


def _exact_table(figures: dict[str, Any]) -> Table:
    rows = [
        [each["policy"], f"{each['rows']:,}", f"{each['hit_rate']:.4f}", f"{each['expected']:.4f}"]
        for each in figures["exact"]
    ]
    columns = ["policy", "rows", "hit rate", "independent"]
    return Table(title="Criteo's lookups, 26 tables in one cache", columns=columns, rows=rows)


def _sampled_table(figures: dict[str, Any]) -> Table:
    rows = [
        [
            f"{each['workload']}, {each['policy']}", f"{each['sampled_rows']:,}", f"{each['mean_points']:.2f}",
            f"{max(each['points']):.2f}", f"{np.mean(each['plain_points']):.2f}",
            f"{each['sampled_s'] / each['exact_s']:.1%}",
        ]
        for each in figures["sampled"]
    ]  # fmt: skip
    columns = ["of", "rows", "points off", "worst seed", "by hash alone", "of the exact curve's time"]
    return Table(title="curves from 1 % of the rows, over 20 sizes", columns=columns, rows=rows)


def _speed_table(figures: dict[str, Any]) -> Table:
    rows = [
        [
            f"{each['workload']}, {each['policy']}", str(each["num_sizes"]), f"{each['curve_per_s'] / 1e6:.2f}",
            f"{each['replay_per_s'] / 1e6:.1f}", each["peer"], f"{each['peer_per_s'] / 1e6:.2f}",
        ]
        for each in figures["speeds"]
    ]  # fmt: skip
    columns = ["of", "sizes", "curve, M accesses/s", "one size", "peer", "one size of it"]
    return Table(title="accesses a second of one thread", columns=columns, rows=rows)


_NOTE: Final = (
    "Curves: every lookup an access. Points off: of the hit rate, mean over 20 sizes from 0.1 % of the rows to all, "
    "and over seeds that choose other rows; by hash alone: as SHARDS with its correction. Times are of the processor. "
    "A whole curve is one pass for LRU; for the others a replay for each size, each access counted once."
)

PART: Final = Part(_measure, _tell)
