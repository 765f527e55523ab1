"""Part "load": latencies by load, and the highest load that is carried, of each protocol by turns."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from .. import device
from ..common import Goal, Part, Report, Run, Table, median_of
from .load import Load, Quantiles, closed_loop, open_loop
from .rig import Rig, ServerProcess

Step = dict[str, Any]
Rates = Mapping[str, float]
_BOTH: Final = ("rest", "grpc")
_GRPC_SHARE: Final = 0.9
_BELOW: Final = 0.95
_SLICES: Final = 5
"""Of a step: short beside what a busy machine does for some seconds, long beside a queue's filling."""
_GAIN: Final = -0.5
_FACTOR: Final = 1.25
"""From one rate to the next at most: a stall of the machine must not send the search far off."""
NUM_FIRST: Final = 2
"""Rates on the way to the highest load, which do not count."""
_COLUMNS: Final = [
    "protocol", "queries/s", "samples/s", "p50 ms", "p95 ms", "p99 ms", "hits", "server cores", "server ms a query",
    "generator cores",
]  # fmt: skip


def _step(rig: Rig, server: ServerProcess, rates: Rates, number: int) -> list[Step]:
    """The protocols at their loads for some seconds, by turns slice by slice, with queries of the same sizes at the
    same times."""
    seconds = rig.config["lead_seconds"] + rig.config["slice_seconds"]
    loads: dict[str, list[Load]] = {protocol: [] for protocol in rates}
    used = {protocol: np.zeros(3) for protocol in rates}
    for turn, (protocol, rate) in itertools.product(range(_SLICES), rates.items()):
        stream = rig.stream(server, protocol, rate, seconds, pattern=(rig.config["seed"], number, turn))
        before = server.used()
        loads[protocol].append(open_loop(*stream))
        used[protocol] += server.used() - before
    return [_told(protocol, rates[protocol], loads[protocol], used[protocol], rig) for protocol in rates]


def _told(protocol: str, rate: float, loads: Sequence[Load], used: Any, rig: Rig) -> Step:
    seconds = sum(load.seconds for load in loads)
    quantiles = Quantiles.of(np.concatenate([load.since(rig.config["lead_seconds"]) for load in loads]))
    failed, (cpu, hits, unique) = sum(load.num_failed for load in loads), used.tolist()
    return {
        "protocol": protocol,
        "rate": rate,
        "failed": failed,
        **quantiles._asdict(),
        "late_p99": 1e3 * float(np.quantile(np.concatenate([load.late for load in loads]), 0.99)),
        "generator_cores": sum(load.cores * load.seconds for load in loads) / seconds,
        "server_cores": cpu / seconds,
        "hit_rate": hits / max(1, unique),
    }


def around_highest(
    names: Iterable[str], first: float, ceiling: float, measure: Callable[[Rates], Mapping[str, float]], *, steps: int
) -> dict[str, list[float]]:
    """By name the rates around the highest load; none if latency was far above its bound at every rate.

    Each rate follows from the latency at the one before, by its root: Robbins and Monro's stochastic approximation. A
    bisection asks for yes or no, and keeps an error for good. All are measured together step by step: what differs is
    not what the machine did meanwhile. ``measure`` gives latencies over their bounds, inf where requests failed.
    """
    visited, is_near = {name: [min(first, ceiling)] for name in names}, dict.fromkeys(names, False)
    for _ in range(steps):
        for name, excess in measure({name: rates[-1] for name, rates in visited.items()}).items():
            factor = max(excess**_GAIN, 1 / _FACTOR)
            is_near[name] |= factor > 1 / _FACTOR
            visited[name].append(min(visited[name][-1] * min(factor, _FACTOR), ceiling))
    return {name: rates[min(NUM_FIRST, steps) :] if is_near[name] else [] for name, rates in visited.items()}


def _search(rig: Rig, server: ServerProcess) -> dict[str, Any]:
    """Of each protocol the highest load and the medians of the steps around it."""
    config = rig.config
    steps: list[list[Step]] = []

    def measure(rates: Rates) -> dict[str, float]:
        """Latency over its bound, the larger of two."""
        steps.append(_step(rig, server, rates, len(steps)))
        excess = {}
        for each in steps[-1]:
            over = max(each["p95"] / config["p95_ms"], each["p99"] / config["p99_ms"])
            excess[each["protocol"]] = float("inf") if each["failed"] else over
        return excess

    # From half of what the server answers when it is never idle.
    seconds = config["slice_seconds"]
    load = closed_loop(server.client("rest", 8), rig.requests(1000, "rest"), at_once=8, seconds=seconds)
    first = 0.5 * len(load.since(0)) / load.seconds
    visited = around_highest(_BOTH, first, config["rate_ceiling"], measure, steps=config["search_steps"])
    rates = {protocol: statistics.median(each) if each else 0.0 for protocol, each in visited.items()}
    near = list(itertools.chain(*steps[min(NUM_FIRST, len(steps) - 1) :]))
    for share in config["shares"]:
        measure({protocol: share * rate for protocol, rate in rates.items() if rate})
    # What both met at a step cancels in the steps' ratios.
    ratios = [grpc / rest for grpc, rest in zip(visited["grpc"], visited["rest"], strict=False)]
    return {
        "highest": [
            {"protocol": protocol, "rate": rate} | _medians([step for step in near if step["protocol"] == protocol])
            for protocol, rate in rates.items()
        ],
        "steps": list(itertools.chain(*steps)),
        "grpc_over_rest": {"value": statistics.median(ratios)} if ratios else None,
    }


def _by_turns(rig: Rig, server: ServerProcess, rate: float) -> list[Step]:
    """Each protocol at one load."""
    turns = [_step(rig, server, dict.fromkeys(_BOTH, rate), turn) for turn in range(rig.config["turns"])]
    return [
        {"protocol": protocol, "rate": rate} | _medians(steps)
        for protocol, steps in zip(_BOTH, zip(*turns, strict=True), strict=True)
    ]


def _medians(steps: Sequence[Step]) -> dict[str, float]:
    names = ("p50", "p95", "p99", "generator_cores", "server_cores", "hit_rate")
    return median_of([{name: step[name] for name in names} for step in steps])


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    reads_per_s = device.reads_per_s(rig.rows_file)
    with rig.server() as server:
        rig.warm(server)
        found = _search(rig, server)
        common = rig.config["turns_share"] * min(each["rate"] for each in found["highest"])
        at_one_load = _by_turns(rig, server, common) if common else []
    return {
        **found,
        "by_turns": at_one_load,
        "ddr_bytes": rig.ddr_bytes,
        "page_cache_share": device.resident_share(rig.rows_file),
        "device_reads_per_s": reads_per_s,
        **{name: rig.config[name] for name in ("p99_ms", "p95_ms")},
    }


def _row(step: Step) -> list[str]:
    return [
        step["protocol"], f"{step['rate']:.0f}", f"{270 * step['rate']:,.0f}", f"{step['p50']:.1f}",
        f"{step['p95']:.1f}", f"{step['p99']:.1f}", f"{step['hit_rate']:.1%}", f"{step['server_cores']:.2f}",
        f"{1e3 * step['server_cores'] / step['rate']:.2f}", f"{step['generator_cores']:.2f}",
    ]  # fmt: skip


def _at_shares(figures: dict[str, Any]) -> list[Step]:
    """The last step at each rate clearly below the highest, and the highest itself, by protocol."""
    found: list[Step] = []
    for highest in figures["highest"]:
        own = [step for step in figures["steps"] if step["protocol"] == highest["protocol"]]
        below = {step["rate"]: step for step in own if step["rate"] < _BELOW * highest["rate"]}
        found += [below[rate] for rate in sorted(below)] + [highest]
    return found


def _tell(figures: dict[str, Any]) -> Report:
    title = "the ranking model under load, tables ten times the memory for rows; last of each: the highest load"
    goals = [
        Goal(f"{each['protocol']} at {each['rate']:.0f} queries/s: {name} ms", each[name], at_most=bound)
        for each in figures["by_turns"]
        for name, bound in (("p95", figures["p95_ms"]), ("p99", figures["p99_ms"]))
    ]
    if ratio := figures["grpc_over_rest"]:
        goals.append(Goal("highest load over gRPC, of that over REST", ratio["value"], at_least=_GRPC_SHARE))
    tables = {title: _at_shares(figures), "the protocols by turns, at one load": figures["by_turns"]}
    shown = [Table(name, _COLUMNS, list(map(_row, steps))) for name, steps in tables.items()]
    return Report(shown, goals, [_note(figures)])


def _note(figures: dict[str, Any]) -> str:
    late = max(step["late_p99"] for step in figures["steps"])
    reads = figures["device_reads_per_s"]
    gave = "" if reads is None else f" The disk gave {reads:,.0f} random reads of 4 KiB a second just before."
    return (
        f"Load: {figures['ddr_bytes'] / 2**20:.0f} MiB for rows; queries of 100 to 700 samples, 270 on average, as "
        "MLPerf Inference's DLRM has them, with one id a feature, drawn by Zipf's law for each query; one query a "
        "request, at the times of a Poisson process, however long the server takes (open loop). Latency counts from "
        f"the time a request was due, so a late generator counts against the server (it came at most {late:.1f} ms "
        "late, p99 of the worst step). Server and generator share the machine's cores; requests were made beforehand. "
        "Clients of both protocols are plain sockets that send bytes made beforehand, and look in an answer for its "
        "end and status. The highest load is where p95 or p99 meets its bound: the median of the loads that a "
        "stochastic approximation visits, beside which stand the medians of what was measured there. Both protocols "
        "are measured at once, by turns every few seconds, with queries of the same sizes at the same times: what the "
        "machine does meanwhile happens to both. The file of rows was read into the page cache before the server "
        f"started, and {figures['page_cache_share']:.0%} of it was there at the end: no memory was kept from it.{gave}"
    )


PART: Final = Part(_measure, _tell)
