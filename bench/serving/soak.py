"""Part "soak": load for long while a trainer commits: errors, answers of mixed versions, memory, latencies."""

import threading
import time
from typing import Any, Final, NamedTuple

import numpy as np

from ..common import Goal, Run, Table
from ..parts import Part, Told
from .clients import Answer, RestClient
from .load import Load, Quantiles, Stream, open_loop, poisson
from .rig import Rig, canary_request, rate_of, version_of
from .server import HOST, Memory, ServerProcess
from .shape import CANARY_ROWS
from .trainer import Commit, TrainerProcess

__all__ = ["PART", "Canary"]

_SLICE_SECONDS: Final = 20.0
_MEMORY_SECONDS: Final = 5.0


class Canary:
    """Looks at answers of the canary table, whose rows all hold the number of the version that wrote them.

    Attributes:
        checked: answers so far.
        mixed: those whose rows were not all of one version, or not of the one that the answer names.
        first_seen: time of the first answer of each version.
    """

    def __init__(self, dim: int) -> None:
        self._size_bytes = CANARY_ROWS * dim * 4
        self.checked = self.mixed = 0
        self.first_seen: dict[int, float] = {}

    def look(self, _: int, answer: Answer) -> None:
        if answer.error:
            return
        version = version_of(answer.body)
        self.first_seen.setdefault(version, time.monotonic())
        rows = np.frombuffer(answer.body[-self._size_bytes :], np.float32)
        self.checked += 1
        self.mixed += not bool((rows == version).all())


class _Sample(NamedTuple):
    at: float
    memory: Memory


class _Beside(threading.Thread):
    """What goes on beside the load: memory is looked at and, given a trainer, updates are committed."""

    def __init__(self, server: ServerProcess, trainer: TrainerProcess | None, every: float) -> None:
        super().__init__(name="beside", daemon=True)
        self._server, self._trainer, self._every = server, trainer, every
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self.memory: list[_Sample] = []
        self.commits: list[Commit] = []

    def run(self) -> None:
        """Until stopped."""
        due = time.monotonic()
        try:
            while not self._stopping.is_set():
                self.memory.append(_Sample(time.monotonic(), self._server.memory()))
                if self._trainer is not None and time.monotonic() >= due:
                    due += self._every
                    self.commits.append(self._trainer.commit())
                until_due = due - time.monotonic() if self._trainer is not None else _MEMORY_SECONDS
                self._stopping.wait(min(_MEMORY_SECONDS, max(0.0, until_due)))
        except Exception as error:
            self._error = error

    def stop(self) -> None:
        """Raises what ended it before its time."""
        self._stopping.set()
        self.join(120)
        if self._error is not None:
            raise self._error


class _Soak:
    """Load in slices, each of queries that were never asked before."""

    def __init__(self, rig: Rig, server: ServerProcess, rate: float) -> None:
        self._rig, self._server, self._rate = rig, server, rate
        self.canary = Canary(rig.config["dim"])
        self._requests = [canary_request()]

    def _slice(self, seconds: float) -> list[Load]:
        rig = self._rig
        stream = rig.stream(self._server, "rest", self._rate, seconds, None)
        at = poisson(rig.generator, rig.config["canary_rate"], seconds)
        asked = Stream(RestClient(HOST, self._server.rest_port, 4), self._requests * len(at), at, self.canary.look)
        return open_loop([stream, asked])

    def run(self, seconds: float, name: str) -> list[tuple[Load, Load]]:
        """Loads of the ranking model and of the canary, slice by slice."""
        found: list[tuple[Load, Load]] = []
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ranking, canary = self._slice(min(_SLICE_SECONDS, max(left, 0.2)))
            found.append((ranking, canary))
            p99, failed = Quantiles.of(ranking.since(0)).p99, ranking.num_failed + canary.num_failed
            counts = f"p99 {p99:.1f} ms, {failed} failed, {self.canary.mixed} mixed"
            print(f"  {name}: {left:.0f} s left, {counts}", flush=True)
        return found


def _is_beside_update(load: Load, commits: list[Commit], first_seen: dict[int, float]) -> Any:
    """bool [n]: requests that were due between the begin of a commit and its first answer."""
    due = load.start + load.intended
    found = np.zeros(len(due), bool)
    for commit in commits:
        end = max(commit.committed, first_seen.get(commit.version, commit.committed))
        found |= (due >= commit.committed - commit.seconds) & (due <= end)
    return found


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    rig.prepare()
    config, rate = rig.config, rate_of(request, "soak", figures)
    with rig.server("--warm-up", "none") as server:
        rig.warm(server)
        soak = _Soak(rig, server, rate)
        quiet = _Beside(server, None, 0)
        quiet.start()
        before = soak.run(config["soak_quiet_seconds"], "soak without updates")
        quiet.stop()
        with TrainerProcess(rig.store, config["update_rows"], log=rig.log) as trainer:
            updating = _Beside(server, trainer, config["update_every"])
            updating.start()
            during = soak.run(config["soak_seconds"], "soak with updates")
            updating.stop()
        status = server.status()
    return _figures(soak.canary, before, during, updating, quiet) | {
        "rate": rate,
        "updates": status["version"]["updates"],
        "update_failures": status["version"]["update_failures"],
    }


def _figures(
    canary: Canary,
    before: list[tuple[Load, Load]],
    during: list[tuple[Load, Load]],
    updating: _Beside,
    quiet: _Beside,
) -> dict[str, Any]:
    loads = [load for pair in (*before, *during) for load in pair]
    first = updating.memory[0].at
    minutes = [(sample.at - first) / 60 for sample in updating.memory]
    anonymous = [sample.memory.anonymous for sample in updating.memory]
    half = len(anonymous) // 2
    served = [canary.first_seen[each.version] - each.committed for each in updating.commits
              if each.version in canary.first_seen]  # fmt: skip
    marked = [(load, _is_beside_update(load, updating.commits, canary.first_seen)) for load, _ in during]
    return {
        "seconds": sum(load.seconds for load, _ in during),
        "queries": sum(len(load.intended) for load in loads),
        "failed": sum(load.num_failed for load in loads),
        "errors": [error for load in loads for error in load.errors][:10],
        "canaries": canary.checked,
        "mixed": canary.mixed,
        "commits": len(updating.commits),
        "commit_s": float(np.median([each.seconds for each in updating.commits] or [float("nan")])),
        "served_p50_s": float(np.median(served)) if served else None,
        "quiet": _quantiles([load.latency for load, _ in before]),
        "with_updates": _quantiles([load.latency for load, _ in during]),
        "beside_update": _quantiles([load.latency[own] for load, own in marked]),
        "between_updates": _quantiles([load.latency[~own] for load, own in marked]),
        "memory_bytes": {
            "quiet_start": quiet.memory[0].memory.anonymous,
            "start": anonymous[0],
            "middle": anonymous[half],
            "end": anonymous[-1],
            "highest": max(anonymous),
            "resident_end": updating.memory[-1].memory.resident,
        },
        "memory_by_minute": [[round(at, 2), size] for at, size in zip(minutes, anonymous, strict=True)],
    }


def _quantiles(latencies: list[Any]) -> dict[str, float]:
    every = np.concatenate(latencies)
    return Quantiles.of(every[np.isfinite(every)])._asdict()


def _tell(figures: dict[str, Any]) -> Told:
    memory, mib = figures["memory_bytes"], 1 << 20
    grown = memory["end"] / memory["middle"] - 1
    parts = {
        "without updates": "quiet", "with updates": "with_updates", "of these, while one is under way": "beside_update",
        "of these, at other times": "between_updates",
    }  # fmt: skip
    latencies = Table(
        title=f"a soak at {figures['rate']:.0f} queries/s, a commit every few seconds",
        columns=["requests", "p50 ms", "p95 ms", "p99 ms", "highest ms"],
        rows=[[name, *(f"{figures[key][each]:.1f}" for each in ("p50", "p95", "p99", "highest"))]
              for name, key in parts.items()],
    )  # fmt: skip
    counts = Table(
        title="what the soak came to",
        columns=["minutes", "requests", "failed", "mixed versions", "commits", "MiB at start", "in the middle",
                 "at the end"],
        rows=[[f"{figures['seconds'] / 60:.1f}", f"{figures['queries']:,}", f"{figures['failed']}",
               f"{figures['mixed']} of {figures['canaries']:,}", f"{figures['commits']}",
               *(f"{memory[name] / mib:.0f}" for name in ("start", "middle", "end"))]],
    )  # fmt: skip
    return Told(
        tables=[counts, latencies],
        goals=[
            Goal(name="soak: requests that failed", value=figures["failed"], exactly=0),
            Goal(name="soak: answers of mixed versions", value=figures["mixed"], exactly=0),
            Goal(name="soak: memory's growth in its second half", value=round(grown, 4), at_most=0.02),
        ],
        notes=[
            "Soak: each commit writes its own number into all rows of a small table; its rows are asked for all the "
            "while, and must all hold the number that the answer names as its version. Memory: what is resident and no "
            "file's."
        ],
    )


PART: Final = Part(_measure, _tell)
