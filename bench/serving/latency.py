"""Part "load": latencies by load, the highest load that is carried, and what the server adds to the model."""

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tierstore.plan.measure import page_cache

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .clients import BlockingGrpc, BlockingRest, RestClient
from .load import Quantiles, closed_loop, open_loop
from .rig import HitRate, Rig
from .search import highest_load
from .server import HOST, ServerProcess

__all__ = ["PART"]


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


def _search(rig: Rig, server: ServerProcess, protocol: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the highest load and the lowest that is too much, all steps)."""
    steps: list[dict[str, Any]] = []
    needed = rig.config["repetitions"] // 2 + 1

    def carries(rate: float) -> bool:
        votes = [0, 0]
        while max(votes) < needed:
            steps.append(_step(rig, server, protocol, rate))
            votes[_is_carried(rig.config, steps[-1])] += 1
        return votes[1] > votes[0]

    found = highest_load(carries, _first_rate(rig, server), rig.config["precision"], rig.config["rate_ceiling"])
    for share in rig.config["shares"]:
        rate = share * found.carried
        if rate:
            steps.append(_step(rig, server, protocol, rate))
    highest = {"protocol": protocol, "rate": found.carried, "too_much": found.too_much}
    return highest | _medians([step for step in steps if step["rate"] == found.carried]), steps


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


def _overhead(rig: Rig, server: ServerProcess, protocol: str) -> dict[str, Any]:
    """What a request takes beside the model's run, when nothing else is under way."""
    is_grpc = protocol == "grpc"
    client = BlockingGrpc(HOST, server.grpc_port) if is_grpc else BlockingRest(HOST, server.rest_port)
    blocks, count = rig.config["overhead_blocks"], rig.config["overhead_queries"] // rig.config["overhead_blocks"]
    latencies, computes = [], []
    try:
        for _ in range(blocks):
            requests = rig.requests(count, protocol)
            client.ask(requests[0])
            before = _compute(server)
            start = time.perf_counter()
            for request in requests:
                answer = client.ask(request)
                if answer.error:
                    raise RuntimeError(answer.error)
            latencies.append((time.perf_counter() - start) / count)
            after = _compute(server)
            computes.append((after[1] - before[1]) / max(1, after[0] - before[0]))
    finally:
        client.close()
    latency = statistics.median(latencies)
    outside = statistics.median(latency - compute for latency, compute in zip(latencies, computes, strict=True))
    return {
        "protocol": protocol,
        "latency_us": 1e6 * latency,
        "compute_us": 1e6 * statistics.median(computes),
        "overhead_us": 1e6 * outside,
        "overhead_share": outside / latency,
    }


def _compute(server: ServerProcess) -> tuple[int, float]:
    """(batches, seconds they took) of the ranking model so far."""
    model = server.model("ranking")
    return model["batches"], model["batches"] * model["compute_seconds_mean"]


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    device = rig.device_reads_per_s()
    rig.prepare()
    with rig.server("--warm-up", "none") as server:
        rig.warm(server)
        overheads = [_overhead(rig, server, protocol) for protocol in rig.config["protocols"]]
        searched = [_search(rig, server, protocol) for protocol in rig.config["protocols"]]
        common = rig.config["turns_share"] * min(highest["rate"] for highest, _ in searched)
        by_turns = _by_turns(rig, server, common) if common else []
        memory = server.memory()
    return {
        "highest": [highest for highest, _ in searched],
        "by_turns": by_turns,
        "steps": [step for _, steps in searched for step in steps],
        "overhead": overheads,
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
        Table(
            title="one request at a time: what is not the model",
            columns=["protocol", "latency us", "model and lookups us", "all else us", "all else, of the latency"],
            rows=[
                [each["protocol"], f"{each['latency_us']:,.0f}", f"{each['compute_us']:,.0f}",
                 f"{each['overhead_us']:,.0f}", f"{each['overhead_share']:.1%}"]
                for each in figures["overhead"]
            ],
        ),
    ]  # fmt: skip
    return Told(tables=tables, goals=_goals(figures["highest"], figures), notes=[_note(figures)])


def _goals(highest: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[Goal]:
    return [
        Goal(name=f"{each['protocol']} at {each['rate']:.0f} queries/s: {name} ms", value=each[name], at_most=bound)
        for each in highest
        if each["rate"]
        for name, bound in (("p95", figures["p95_ms"]), ("p99", figures["p99_ms"]))
    ]


def _note(figures: dict[str, Any]) -> str:
    late = max(step["late_p99"] for step in figures["steps"])
    return (
        f"Load: {figures['ddr_bytes'] / 2**20:.0f} MiB for rows; queries of 100 to 700 samples, 270 on average, as "
        "MLPerf Inference's DLRM has them, with one id a feature, drawn by Zipf's law for each query anew; one query a "
        "request, at the times of a Poisson process, however long the server takes (open loop). Latency counts from "
        f"the time a request was due, so a late generator counts against the server (it came at most {late:.1f} ms "
        "late, p99 of the worst step). Server and generator share the machine's cores; requests were made beforehand. "
        f"{_about_pages(figures)} All else: what a blocking client sees, less the model's run as the server "
        "reports it; sockets, the client's own time, parsing, queueing and the answer."
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
