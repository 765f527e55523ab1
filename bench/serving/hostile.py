"""Part "hostile": what one client that takes all it can costs the others; without and with it by turns."""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from tierstore.serve.limits import Limits

from ..child import HOST, Child
from ..common import Goal, Run, Table
from ..parts import Part, Told
from . import attacks, queries
from .clients import Answer, RestClient
from .http2 import GrpcClient
from .load import Load, Quantiles, Stream, open_loop
from .server import ServerProcess
from .shape import NUMBERS, numbered_store

__all__ = ["PART"]

_TOKEN: Final = "a-token-of-honest-clients"
_WAYS: Final = ("alone", "beside")
_HOURS: Final = 24


class _Score(torch.nn.Module):
    """A model of the user's own: it scores an item by its number plus the hour, and fails on hours it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.hours = torch.nn.Embedding(_HOURS, 1, _weight=torch.arange(float(_HOURS))[:, None])

    def forward(self, item: torch.Tensor, hour: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": item.mean(1) + self.hours(hour)[:, 0]}


def _model(folder: Path, dim: int) -> Path:
    path, batch = folder / "score.pt2", torch.export.Dim("batch")
    example = torch.zeros(2, dim), torch.zeros(2, dtype=torch.int64)
    shapes = {"item": {0: batch}, "hour": {0: batch}}
    torch.export.save(torch.export.export(_Score().eval(), example, dynamic_shapes=shapes), path)
    return path


class _Honest:
    """Clients that score at a steady rate over both protocols, and know what is right."""

    def __init__(self, config: dict[str, Any], server: ServerProcess) -> None:
        self._config, self._server = config, server
        self._generator = np.random.default_rng(config["seed"])
        self.wrong = 0

    def _stream(self, protocol: str, first: float) -> Stream:
        config, size = self._config, self._config["hostile_samples"]
        seconds = config["hostile_lead_seconds"] + config["hostile_seconds"]
        intended = np.arange(first, seconds, 2 / config["hostile_rate"])
        ids = self._generator.integers(0, config["hostile_rows"], (len(intended), size))
        hours = self._generator.integers(0, _HOURS, ids.shape)
        right = (ids % NUMBERS + hours).astype(np.float32)
        lengths = np.ones((1, size), np.int32)
        asked = [queries.Query("score", {"values": values, "lengths": lengths, "hour": hour})
                 for values, hour in zip(ids, hours, strict=True)]  # fmt: skip

        def look(index: int, answer: Answer) -> None:
            self.wrong += not answer.error and not answer.body.endswith(right[index].tobytes())

        if protocol == "grpc":
            grpc = GrpcClient(HOST, self._server.grpc_port, config["hostile_connections"], _TOKEN)
            return Stream(grpc, [queries.encoded_grpc(each) for each in asked], intended, look)
        rest = RestClient(HOST, self._server.rest_port, config["hostile_connections"])
        return Stream(rest, [queries.encoded_rest(each, _TOKEN) for each in asked], intended, look)

    def load(self) -> list[Load]:
        gap = 1 / self._config["hostile_rate"]
        return open_loop([self._stream("rest", 0.0), self._stream("grpc", gap)])


def _beside(kind: str, honest: _Honest, server: ServerProcess, rows: int) -> tuple[list[Load], dict[str, Any]]:
    """Honest load while a hostile client is there, and what that counted."""
    with Child([sys.executable, "-m", attacks.__name__, kind, server.rest_port, server.grpc_port, _TOKEN, rows]) as it:
        if it.line() != attacks.READY:
            raise RuntimeError(f"the hostile client of kind {kind!r} did not start")
        return honest.load(), json.loads(it.last_line())


def _kind(kind: str, config: dict[str, Any], server: ServerProcess) -> dict[str, Any]:
    honest, lead = _Honest(config, server), config["hostile_lead_seconds"]
    honest.load()
    budget = server.memory().highest + Limits().bodies_bytes
    loads: dict[str, list[Load]] = {way: [] for way in _WAYS}
    taken: list[dict[str, Any]] = []
    for _ in range(config["hostile_turns"]):
        loads["alone"] += honest.load()
        found, counts = _beside(kind, honest, server, config["hostile_rows"])
        loads["beside"] += found
        taken.append(counts)
    ways = {way: Quantiles.of(np.concatenate([load.since(lead) for load in loads[way]])) for way in _WAYS}
    every = [load for way in _WAYS for load in loads[way]]
    figures = {
        "kind": kind,
        **{way: found._asdict() for way, found in ways.items()},
        "lead": Quantiles.of(np.concatenate([load.since(0, lead) for load in loads["beside"]]))._asdict(),
        "ratio": ways["beside"].p99 / ways["alone"].p99,
        "requests": sum(len(load.intended) for load in every),
        "failed": sum(load.num_failed for load in every),
        "errors": [error for load in every for error in load.errors],
        "wrong": honest.wrong,
        "highest_bytes": server.memory().highest,
        "budget_bytes": budget,
        "taken": taken,
    }
    print(
        f"  {kind}: p99 {figures['ratio']:.2f} x, {figures['failed']} failed, {honest.wrong} wrong; {taken}", flush=True
    )
    return figures


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    config, folder = request.config, request.folder
    store, token, found = numbered_store(folder, config), folder / "serve.token", []
    token.write_text(_TOKEN)
    flags = ("--model", str(_model(folder, config["dim"])), "--token-file", str(token), "--warm-up", "none")
    for kind in attacks.KINDS:
        with ServerProcess(store, config["hostile_ddr"], log=folder / "serve.log", flags=flags) as server:
            found.append(_kind(kind, config, server))
            start = time.monotonic()
        found[-1]["stop_seconds"] = time.monotonic() - start
    return {"kinds": found, "rate": config["hostile_rate"], "samples": config["hostile_samples"],
            "lead_seconds": config["hostile_lead_seconds"]}  # fmt: skip


def _tell(figures: dict[str, Any]) -> Told:
    kinds = figures["kinds"]
    rows = [
        [each["kind"], *(f"{each[way][name]:.1f}" for name in ("p50", "p99") for way in _WAYS), f"{each['ratio']:.2f}",
         f"{each['requests']:,}", f"{each['failed']}", f"{each['wrong']}",
         f"{each['highest_bytes'] >> 20:,}", f"{each['budget_bytes'] >> 20:,}"]
        for each in kinds
    ]  # fmt: skip
    columns = ["hostile client", "p50 ms alone", "beside", "p99 ms alone", "beside", "of alone", "requests", "failed",
               "wrong", "most MiB", "of"]  # fmt: skip
    title = f"{figures['rate']:.0f} honest queries/s, and one hostile client"
    most = max(each["highest_bytes"] / each["budget_bytes"] for each in kinds)
    return Told(
        tables=[Table(title=title, columns=columns, rows=rows)],
        goals=[
            *(Goal(name=f"{each['kind']}: honest p99, of alone", value=each["ratio"], at_most=2.0) for each in kinds),
            Goal(name="hostile clients: honest requests that failed", value=sum(each["failed"] for each in kinds),
                 exactly=0),
            Goal(name="hostile clients: wrong answers", value=sum(each["wrong"] for each in kinds), exactly=0),
            Goal(name="hostile clients: the server's memory, of its budget", value=most, at_most=1.0),
        ],
        notes=[
            f"Hostile: honest clients score {figures['samples']} samples a query by a model of the user's own, half "
            "over REST and half over gRPC, evenly spaced; their answers are known to the bit. The hostile client is a "
            "process of its own, niced, as it would have its own machine. Latencies count from "
            f"{figures['lead_seconds']:g} s after it has begun; failures and wrong answers from the first on. "
            "Memory is the most that was ever resident; "
            "the budget is what that was before the first hostile client, and the 1 GiB that requests may hold."
        ],
    )  # fmt: skip


PART: Final = Part(_measure, _tell)
