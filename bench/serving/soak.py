"""Part "soak": load for long while a trainer commits: errors, answers of mixed versions, memory, latencies.

Before that, latencies without and with commits, by turns.
"""

import math
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
        due = time.monotonic() + self._every / 2  # there is load by then
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


_Loads = list[tuple[Load, Load]]


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    rig.prepare()
    config, rate = rig.config, rate_of(request, "soak", figures)
    with rig.server("--warm-up", "none") as server, rig.trainer() as trainer:
        rig.warm(server)
        soak = _Soak(rig, server, rate)

        def run(seconds: float, trainer: TrainerProcess | None, name: str) -> tuple[_Loads, _Beside]:
            beside = _Beside(server, trainer, config["update_every"])
            beside.start()
            loads = soak.run(seconds, name)
            beside.stop()
            return loads, beside

        turns: dict[str, list[_Loads]] = {"without": [], "with": []}
        for _ in range(config["soak_turns"]):
            for name, loads in turns.items():
                found, _ = run(config["soak_turn_seconds"], trainer if name == "with" else None, f"{name} updates")
                loads.append(found)
        during, updating = run(config["soak_seconds"], trainer, "soak")
        status = server.status()
    return _figures(soak.canary, turns, during, updating) | {
        "rate": rate,
        "updates": status["version"]["updates"],
        "update_failures": status["version"]["update_failures"],
    }


def _figures(canary: Canary, turns: dict[str, list[_Loads]], during: _Loads, updating: _Beside) -> dict[str, Any]:
    loads = [load for each in (*turns["without"], *turns["with"], during) for pair in each for load in pair]
    first = updating.memory[0].at
    minutes = [(sample.at - first) / 60 for sample in updating.memory]
    anonymous = [sample.memory.anonymous for sample in updating.memory]
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
        "turns": {
            name: [_quantiles([load.latency for load, _ in each])["p99"] for each in found]
            for name, found in turns.items()
        },
        "late_p99": {
            name: _quantiles([load.late for each in found for load, _ in each])["p99"] for name, found in turns.items()
        },
        "without_updates": _quantiles([load.latency for each in turns["without"] for load, _ in each]),
        "with_updates": _quantiles([load.latency for load, _ in during]),
        "beside_update": _quantiles([load.latency[own] for load, own in marked]),
        "between_updates": _quantiles([load.latency[~own] for load, own in marked]),
        "memory_bytes": {
            "start": anonymous[0],
            "middle": _level(anonymous, 0.5),
            "end": _level(anonymous, 0.95),
            "highest": max(anonymous),
            "resident_end": updating.memory[-1].memory.resident,
        },
        "memory_by_minute": [[round(at, 2), size] for at, size in zip(minutes, anonymous, strict=True)],
    }


def _level(sizes: list[int], at: float) -> int:
    """The median of the tenth of the samples around a part of them: what is taken for a moment is not kept."""
    count = len(sizes)
    return int(np.median(sizes[int((at - 0.05) * count) : max(1, math.ceil((at + 0.05) * count))]))


def _quantiles(latencies: list[Any]) -> dict[str, float]:
    every = np.concatenate(latencies)
    return Quantiles.of(every[np.isfinite(every)])._asdict()


def _tell(figures: dict[str, Any]) -> Told:
    memory, mib = figures["memory_bytes"], 1 << 20
    grown = memory["end"] / memory["middle"] - 1
    parts = {
        "without updates, by turns": "without_updates", "with updates": "with_updates",
        "of these, while one is under way": "beside_update", "of these, at other times": "between_updates",
    }  # fmt: skip
    without, updated = (float(np.median(figures["turns"][name])) for name in ("without", "with"))
    by_turns = Table(
        title="p99 with a commit every few seconds, and without, by turns",
        columns=["", *(f"turn {number + 1} ms" for number in range(len(figures["turns"]["with"]))), "median ms",
                 "requests sent late, p99 ms"],
        rows=[[f"{name} updates", *(f"{p99:.1f}" for p99 in (*found, float(np.median(found)))),
               f"{figures['late_p99'][name]:.1f}"] for name, found in figures["turns"].items()],
    )  # fmt: skip
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
        tables=[by_turns, counts, latencies],
        goals=[
            Goal(name="p99 with updates over p99 without", value=round(updated / without, 3), at_most=2),
            Goal(name="soak: requests that failed", value=figures["failed"], exactly=0),
            Goal(name="soak: answers of mixed versions", value=figures["mixed"], exactly=0),
            Goal(name="soak: memory's growth in its second half", value=round(grown, 4), at_most=0.01),
        ],
        notes=[
            "Soak: each commit writes its own number into all rows of a small table; its rows are asked for all the "
            "while, and must all hold the number that the answer names as its version. The trainer is niced. Memory: "
            "what is resident and no file's; in the middle and at the end, the median of a tenth of the samples."
        ],
    )


PART: Final = Part(_measure, _tell)
