"""Part "load": latencies by load, and the highest load that is carried, of each protocol by turns."""

import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.plan.measure import page_cache

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .clients import RestClient
from .load import Load, Quantiles, closed_loop, open_loop
from .rig import HitRate, Rig
from .search import NUM_FIRST, Ratio, by_turns, highest_load, search
from .server import HOST, ServerProcess

__all__ = ["PART"]

_BOTH: Final = ("rest", "grpc")
_GRPC_SHARE: Final = 0.9
_BELOW: Final = 0.95
_SLICES: Final = 5
"""Of a step: short beside what a busy machine does for some seconds, long beside a queue's filling."""


class _Slice(NamedTuple):
    """What one protocol's load for a moment came to."""

    load: Load
    cpu_seconds: float
    hits: HitRate
    device_bytes_read: int


def _slice(rig: Rig, server: ServerProcess, protocol: str, rate: float, pattern: Sequence[int]) -> _Slice:
    seconds = rig.config["lead_seconds"] + rig.config["slice_seconds"]
    stream = rig.stream(server, protocol, rate, seconds, pattern=pattern)
    hits, disk, cpu = HitRate.of(server), server.device_bytes_read(), server.cpu_seconds()
    load = open_loop([stream])[0]
    cpu, disk = server.cpu_seconds() - cpu, server.device_bytes_read() - disk
    since = HitRate(*(now - before for now, before in zip(HitRate.of(server), hits, strict=True)))
    return _Slice(load, cpu, since, disk)


def _told(protocol: str, rate: float, slices: Sequence[_Slice], lead: float) -> dict[str, Any]:
    loads = [each.load for each in slices]
    seconds = sum(load.seconds for load in loads)
    quantiles = Quantiles.of(np.concatenate([load.since(lead) for load in loads]))
    failed = sum(load.num_failed for load in loads)
    print(
        f"  {protocol} {rate:.0f}/s: p50 {quantiles.p50:.1f}, p95 {quantiles.p95:.1f}, p99 {quantiles.p99:.1f} ms, "
        f"{failed} failed",
        flush=True,
    )
    return {
        "protocol": protocol,
        "rate": rate,
        "requests": sum(len(load.intended) for load in loads),
        "failed": failed,
        "errors": [error for load in loads for error in load.errors],
        **quantiles._asdict(),
        "late_p99": 1e3 * float(np.quantile(np.concatenate([load.late for load in loads]), 0.99)),
        "generator_cores": sum(load.cores * load.seconds for load in loads) / seconds,
        "server_cores": sum(each.cpu_seconds for each in slices) / seconds,
        "hit_rate": sum(each.hits.hits for each in slices) / max(1, sum(each.hits.unique for each in slices)),
        "device_bytes_read": sum(each.device_bytes_read for each in slices),
    }


def _step(rig: Rig, server: ServerProcess, rates: Mapping[str, float], number: int) -> list[dict[str, Any]]:
    """The protocols at their loads for some seconds, by turns slice by slice, with queries of the same sizes at the
    same times."""
    slices: dict[str, list[_Slice]] = {protocol: [] for protocol in rates}
    for turn in range(_SLICES):
        for protocol, rate in rates.items():
            slices[protocol].append(_slice(rig, server, protocol, rate, (rig.config["seed"], number, turn)))
    lead = rig.config["lead_seconds"]
    return [_told(protocol, rate, slices[protocol], lead) for protocol, rate in rates.items()]


def _excess(config: Any, step: dict[str, Any]) -> float:
    """Latency over its bound, the larger of two."""
    if step["failed"]:
        return float("inf")
    return float(max(step["p95"] / config["p95_ms"], step["p99"] / config["p99_ms"]))


def _search(rig: Rig, server: ServerProcess) -> dict[str, Any]:
    """Figures: of each protocol the highest load and the medians of the steps around it; all steps; gRPC's over REST's
    highest load."""
    config = rig.config
    steps: list[list[dict[str, Any]]] = []
    first = _first_rate(rig, server)

    def measure(rates: Mapping[str, float]) -> dict[str, float]:
        steps.append(_step(rig, server, rates, len(steps)))
        return {step["protocol"]: _excess(config, step) for step in steps[-1]}

    searches = {
        protocol: search(first, config["rate_ceiling"], steps=config["search_steps"])
        for protocol in config["protocols"]
    }
    visited = by_turns(searches, measure)
    rates = {protocol: highest_load(each) for protocol, each in visited.items()}
    near = list(itertools.chain(*steps[min(NUM_FIRST, len(steps) - 1) :]))
    for share in config["shares"]:
        measure({protocol: share * rate for protocol, rate in rates.items() if rate})
    return {
        "highest": [
            {"protocol": protocol, "rate": rate} | _medians([step for step in near if step["protocol"] == protocol])
            for protocol, rate in rates.items()
        ],
        "steps": list(itertools.chain(*steps)),
        "grpc_over_rest": Ratio.of(visited["grpc"], visited["rest"])._asdict()
        if all(map(visited.get, _BOTH))
        else None,
    }


def _by_turns(rig: Rig, server: ServerProcess, rate: float) -> list[dict[str, Any]]:
    """Each protocol at one load."""
    protocols = rig.config["protocols"]
    turns = [_step(rig, server, dict.fromkeys(protocols, rate), turn) for turn in range(rig.config["turns"])]
    return [
        {"protocol": protocol, "rate": rate} | _medians(steps)
        for protocol, steps in zip(protocols, zip(*turns, strict=True), strict=True)
    ]


def _medians(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("p50", "p95", "p99", "generator_cores", "server_cores", "hit_rate")
    return {name: statistics.median(step[name] for step in steps) for name in names}


def _first_rate(rig: Rig, server: ServerProcess) -> float:
    """Half of what the server answers when it is never idle."""
    seconds = rig.config["slice_seconds"]
    load = closed_loop(RestClient(HOST, server.rest_port, 8), rig.requests(1000, "rest"), at_once=8, seconds=seconds)
    return 0.5 * len(load.latency) / load.seconds


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    device = rig.device_reads_per_s()
    rig.prepare()
    with rig.server("--warm-up", "none") as server:
        rig.warm(server)
        found = _search(rig, server)
        common = rig.config["turns_share"] * min(each["rate"] for each in found["highest"])
        at_one_load = _by_turns(rig, server, common) if common else []
        memory = server.memory()
    return {
        **found,
        "by_turns": at_one_load,
        "ddr_bytes": rig.ddr_bytes,
        "page_cache": rig.config["page_cache"],
        "page_cache_share": page_cache.resident_share(rig.rows_file),
        "device_reads_per_s": device,
        "server_environment": {name: os.environ[name] for name in os.environ if name.startswith(("OMP_", "GOMP_"))},
        "memory": memory._asdict(),
        "p99_ms": rig.config["p99_ms"],
        "p95_ms": rig.config["p95_ms"],
    }


def _row(step: dict[str, Any]) -> list[str]:
    return [
        step["protocol"], f"{step['rate']:.0f}", f"{270 * step['rate']:,.0f}", f"{step['p50']:.1f}",
        f"{step['p95']:.1f}", f"{step['p99']:.1f}", f"{step['hit_rate']:.1%}", f"{step['server_cores']:.2f}",
        f"{1e3 * step['server_cores'] / step['rate']:.2f}", f"{step['generator_cores']:.2f}",
    ]  # fmt: skip


def _at_shares(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The last step at each rate clearly below the highest, and the highest itself, by protocol."""
    found: list[dict[str, Any]] = []
    for highest in figures["highest"]:
        own = [step for step in figures["steps"] if step["protocol"] == highest["protocol"]]
        below = {step["rate"]: step for step in own if step["rate"] < _BELOW * highest["rate"]}
        found += [below[rate] for rate in sorted(below)] + [highest]
    return found


def _tell(figures: dict[str, Any]) -> Told:
    columns = ["protocol", "queries/s", "samples/s", "p50 ms", "p95 ms", "p99 ms", "hits", "server cores",
               "server ms a query", "generator cores"]  # fmt: skip
    title = "the ranking model under load, tables ten times the memory for rows; last of each: the highest load"
    tables = [
        Table(title=title, columns=columns, rows=[_row(step) for step in _at_shares(figures)]),
        Table(
            title="the protocols by turns, at one load",
            columns=columns,
            rows=[_row(each) for each in figures["by_turns"]],
        ),
    ]  # fmt: skip
    return Told(tables=tables, goals=_goals(figures), notes=[_note(figures)])


def _goals(figures: dict[str, Any]) -> list[Goal]:
    return [
        Goal(name=f"{each['protocol']} at {each['rate']:.0f} queries/s: {name} ms", value=each[name], at_most=bound)
        for each in figures["by_turns"]
        for name, bound in (("p95", figures["p95_ms"]), ("p99", figures["p99_ms"]))
    ] + _goal_of_grpc(figures)


def _goal_of_grpc(figures: dict[str, Any]) -> list[Goal]:
    found = figures.get("grpc_over_rest")
    if not found:
        return []
    return [Goal(name="highest load over gRPC, of that over REST", value=found["value"], at_least=_GRPC_SHARE)]


def _about_ratio(figures: dict[str, Any]) -> str:
    found = figures.get("grpc_over_rest")
    if not found:
        return ""
    return (
        f" The highest load over gRPC is {found['value']:.2f} of that over REST, give or take {found['margin']:.2f}: "
        "the median of the steps' ratios, and two standard errors."
    )


def _note(figures: dict[str, Any]) -> str:
    late = max(step["late_p99"] for step in figures["steps"])
    return (
        f"Load: {figures['ddr_bytes'] / 2**20:.0f} MiB for rows; queries of 100 to 700 samples, 270 on average, as "
        "MLPerf Inference's DLRM has them, with one id a feature, drawn by Zipf's law for each query anew; one query a "
        "request, at the times of a Poisson process, however long the server takes (open loop). Latency counts from "
        f"the time a request was due, so a late generator counts against the server (it came at most {late:.1f} ms "
        "late, p99 of the worst step). Server and generator share the machine's cores; requests were made beforehand. "
        "Clients of both protocols are plain sockets that send bytes made beforehand, and look in an answer for its "
        "end and status: gRPC's own client takes a third of a millisecond more of the shared cores. The highest load "
        "is where p95 or p99 meets its bound: the median of the loads that a stochastic approximation visits, beside "
        "which stand the medians of what was measured there. Both protocols are measured at once, by turns every few "
        "seconds, with queries of the same sizes at the same times: what the machine does meanwhile happens to both."
        f"{_about_ratio(figures)} {_about_pages(figures)}"
    )


def _about_pages(figures: dict[str, Any]) -> str:
    begun = "put out of the page cache" if figures["page_cache"] == "cold" else "read into the page cache"
    device = figures["device_reads_per_s"]
    gave = "" if device is None else f" The disk gave {device:,.0f} random reads of 4 KiB a second just before."
    return (
        f"The file of rows was {begun} before the server started, and {figures['page_cache_share']:.0%} of it was "
        f"there at the end: no memory was kept from it.{gave}"
    )


PART: Final = Part(_measure, _tell)
