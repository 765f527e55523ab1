"""Part "fresh": how long after a commit its rows are served, the first one after a server's start and later ones."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import httpx
import numpy as np

from tierstore.serve.messages import JSON_LENGTH_HEADER

from ..child import HOST
from ..common import Goal, Part, Report, Run, Table
from .queries import Query, rest_body
from .rig import Rig
from .shape import CANARY, CANARY_ROWS
from .trainer import Commit, TrainerProcess

_POLL_SECONDS: Final = 0.001
_LIMIT_SECONDS: Final = 120.0
_WANTED_SECONDS: Final = 0.5


def _seen(client: httpx.Client, pending: "Future[Commit]") -> tuple[Commit, float]:
    """The commit, and the time of the first answer with its version."""
    query = Query(f"rows.{CANARY}", {"ids": np.arange(CANARY_ROWS)})
    body, headers = rest_body(query)
    first, end = dict[int, float](), time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < end:
        reply = client.post(f"/v2/models/{query.model}/infer", content=body, headers=headers).raise_for_status()
        version = int(json.loads(reply.content[: int(reply.headers[JSON_LENGTH_HEADER])])["model_version"])
        first.setdefault(version, time.monotonic())
        if pending.done() and pending.result().version in first:
            return pending.result(), first[pending.result().version]
        time.sleep(_POLL_SECONDS)
    raise TimeoutError(f"no answer of the newest commit within {_LIMIT_SECONDS:.0f} s; {version} is served")


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    config, generator = rig.config, np.random.default_rng(rig.config["seed"])
    firsts, commits, seconds = list[float](), list[Commit](), list[float]()
    made = TrainerProcess(rig.store, config["update_rows"], log=request.folder / "serve.log")
    with made as trainer, ThreadPoolExecutor(1) as threads:

        def served(client: httpx.Client) -> float:
            commit, seen = _seen(client, threads.submit(trainer.commit))
            commits.append(commit)
            return seen - commit.committed

        for start in range(config["starts"]):
            with rig.server() as server:
                rig.warm(server, config["start_seconds"])
                with httpx.Client(base_url=f"http://{HOST}:{server.rest_port}", timeout=30) as client:
                    firsts.append(served(client))
                if start == config["starts"] - 1:
                    rig.warm(server)  # longer than a connection may be idle
                    with httpx.Client(base_url=f"http://{HOST}:{server.rest_port}", timeout=30) as client:
                        for _ in range(config["commits"]):
                            # So that commits fall at any time between two looks of the server.
                            time.sleep(generator.random() * 0.1)
                            seconds.append(served(client))
    return {
        "first_seconds": firsts,
        "seconds": seconds,
        "p50_s": float(np.quantile(seconds, 0.5)),
        "p99_s": float(np.quantile(seconds, 0.99)),
        "highest_s": max(seconds),
        "commit_s": float(np.median([commit.seconds for commit in commits])),
        "rows": int(np.median([commit.rows for commit in commits])),
    }


def _tell(figures: dict[str, Any]) -> Report:
    firsts = figures["first_seconds"]
    row = [f"{len(figures['seconds'])}", f"{figures['rows']:,}", f"{1e3 * figures['commit_s']:.0f}"]
    row += [f"{1e3 * figures[name]:.0f}" for name in ("p50_s", "p99_s", "highest_s")]
    row += [f"{1e3 * value:.0f}" for value in (float(np.median(firsts)), max(firsts))]
    columns = ["commits", "rows changed", "the commit ms", "p50 ms", "p99 ms", "highest ms"]
    columns += ["first after a start, p50 ms", "highest ms"]
    first = "seconds from the first commit after a start to served, highest"
    note = (
        "Fresh: a trainer in a process of its own, niced, changes rows of all tables and the dense weights and "
        "commits; from when its commit returned, on one clock, to the first answer that names the version, asked "
        "every millisecond. The server looks for newer commits every 50 ms, and may see one before it has "
        f"returned. First: of {len(firsts)} servers, each after some seconds of load."
    )
    served = Goal("p99 seconds from commit to served", figures["p99_s"], at_most=_WANTED_SECONDS)
    goals = [served, Goal(first, max(firsts), at_most=_WANTED_SECONDS)]
    return Report([Table("from a commit to the first answer of it", columns, [row])], goals, [note])


PART: Final = Part(_measure, _tell)
