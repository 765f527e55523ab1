"""Part "load": latencies by load, and the highest load that is carried, of each protocol by turns."""

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tierstore.plan.measure import page_cache

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .clients import RestClient
from .load import Quantiles, closed_loop, open_loop
from .rig import HitRate, Rig
from .search import by_turns, search
from .server import HOST, ServerProcess

__all__ = ["PART"]

_GRPC_SHARE: Final = 0.9


def _step(rig: Rig, server: ServerProcess, protocol: str, rate: float) -> dict[str, Any]:
    """One load for some seconds."""
    lead = rig.config["lead_seconds"]
    stream = rig.stream(server, protocol, rate, lead + rig.config["step_seconds"])
    cpu, disk, hits = server.cpu_seconds(), server.device_bytes_read(), HitRate.of(server)
    load = open_loop([stream])[0]
    quantiles = Quantiles.of(load.since(lead))
    found = {
        "protocol": protocol,
        "rate": rate,
        "requests": len(load.intended),
        "failed": load.num_failed,
        "errors": load.errors,
        **quantiles._asdict(),
        "late_p99": 1e3 * float(np.quantile(load.late, 0.99)),
        "generator_cores": load.cores,
        "server_cores": (server.cpu_seconds() - cpu) / load.seconds,
        "hit_rate": HitRate.of(server).since(hits),
        "device_bytes_read": server.device_bytes_read() - disk,
    }
    print(
        f"  {protocol} {rate:.0f}/s: p50 {quantiles.p50:.1f}, p95 {quantiles.p95:.1f}, p99 {quantiles.p99:.1f} ms, "
        f"{load.num_failed} failed",
        flush=True,
    )
    return found


def _is_carried(config: Any, step: dict[str, Any]) -> bool:
    return bool(not step["failed"] and step["p99"] <= config["p99_ms"] and step["p95"] <= config["p95_ms"])


def _search(rig: Rig, server: ServerProcess) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(of each protocol the highest load and the lowest that is too much, all steps)."""
    config = rig.config
    steps: list[dict[str, Any]] = []
    first = _first_rate(rig, server)

    def carries(protocol: str, rate: float) -> bool:
        steps.append(_step(rig, server, protocol, rate))
        return _is_carried(config, steps[-1])

    searches = {
        protocol: search(first, config["precision"], config["rate_ceiling"], needed=config["repetitions"] // 2 + 1)
        for protocol in config["protocols"]
    }
    highest: list[dict[str, Any]] = [
        {"protocol": protocol, "rate": found.carried, "too_much": found.too_much}
        | _medians([step for step in steps if (step["protocol"], step["rate"]) == (protocol, found.carried)])
        for protocol, found in by_turns(searches, carries).items()
    ]
    for share in config["shares"]:
        steps += [_step(rig, server, each["protocol"], share * each["rate"]) for each in highest if each["rate"]]
    return highest, steps


def _by_turns(rig: Rig, server: ServerProcess, rate: float) -> list[dict[str, Any]]:
    """Each protocol at one load, step by step in turn: what differs is not what the machine did meanwhile."""
    protocols = rig.config["protocols"]
    steps = [_step(rig, server, protocol, rate) for _ in range(rig.config["turns"]) for protocol in protocols]
    return [
        {"protocol": protocol, "rate": rate} | _medians([step for step in steps if step["protocol"] == protocol])
        for protocol in protocols
    ]


def _medians(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = ("p50", "p95", "p99", "generator_cores", "server_cores", "hit_rate")
    return {name: statistics.median(step[name] for step in steps) for name in names}


def _first_rate(rig: Rig, server: ServerProcess) -> float:
    """Half of what the server answers when it is never idle."""
    seconds = rig.config["step_seconds"] / 4
    load = closed_loop(RestClient(HOST, server.rest_port, 8), rig.requests(1000, "rest"), at_once=8, seconds=seconds)
    return 0.5 * len(load.latency) / load.seconds


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    device = rig.device_reads_per_s()
    rig.prepare()
    with rig.server("--warm-up", "none") as server:
        rig.warm(server)
        highest, steps = _search(rig, server)
        common = rig.config["turns_share"] * min(each["rate"] for each in highest)
        at_one_load = _by_turns(rig, server, common) if common else []
        memory = server.memory()
    return {
        "highest": highest,
        "by_turns": at_one_load,
        "steps": steps,
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
        f"{step['generator_cores']:.2f}",
    ]  # fmt: skip


def _at_shares(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The last step at each rate below the highest, and the highest itself, by protocol."""
    found: list[dict[str, Any]] = []
    for highest in figures["highest"]:
        own = [step for step in figures["steps"] if step["protocol"] == highest["protocol"]]
        below = {step["rate"]: step for step in own if step["rate"] < highest["rate"]}
        found += [below[rate] for rate in sorted(below)] + [highest]
    return found


def _tell(figures: dict[str, Any]) -> Told:
    columns = ["protocol", "queries/s", "samples/s", "p50 ms", "p95 ms", "p99 ms", "hits", "server cores",
               "generator cores"]  # fmt: skip
    title = "the ranking model under load, tables ten times the memory for rows; last of each: the highest load carried"
    tables = [
        Table(title=title, columns=columns, rows=[_row(step) for step in _at_shares(figures)]),
        Table(
            title="the protocols by turns, at one load",
            columns=columns,
            rows=[_row(each) for each in figures["by_turns"]],
        ),
    ]  # fmt: skip
    return Told(tables=tables, goals=_goals(figures["highest"], figures), notes=[_note(figures)])


def _goals(highest: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[Goal]:
    return [
        Goal(name=f"{each['protocol']} at {each['rate']:.0f} queries/s: {name} ms", value=each[name], at_most=bound)
        for each in highest
        if each["rate"]
        for name, bound in (("p95", figures["p95_ms"]), ("p99", figures["p99_ms"]))
    ] + _goal_of_grpc({each["protocol"]: each["rate"] for each in highest})


def _goal_of_grpc(rates: Mapping[str, float]) -> list[Goal]:
    if not (rates.get("rest") and rates.get("grpc")):
        return []
    name = "highest load over gRPC, of that over REST"
    return [Goal(name=name, value=rates["grpc"] / rates["rest"], at_least=_GRPC_SHARE)]


def _note(figures: dict[str, Any]) -> str:
    late = max(step["late_p99"] for step in figures["steps"])
    return (
        f"Load: {figures['ddr_bytes'] / 2**20:.0f} MiB for rows; queries of 100 to 700 samples, 270 on average, as "
        "MLPerf Inference's DLRM has them, with one id a feature, drawn by Zipf's law for each query anew; one query a "
        "request, at the times of a Poisson process, however long the server takes (open loop). Latency counts from "
        f"the time a request was due, so a late generator counts against the server (it came at most {late:.1f} ms "
        "late, p99 of the worst step). Server and generator share the machine's cores; requests were made beforehand. "
        "The protocols' searches took turns, step by step. "
        f"{_about_pages(figures)}"
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
