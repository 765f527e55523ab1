"""Part "soak": load for long, with a trainer that commits in every other slice."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from ..child import HOST
from ..common import Goal, Run, Table
from ..parts import Part, Told
from .clients import Answer, RestClient
from .load import Load, Quantiles, Stream, open_loop, poisson
from .rig import Rig, canary_request, rate_of, version_of
from .server import ServerProcess
from .shape import CANARY_ROWS
from .trainer import TrainerProcess

__all__ = ["PART", "Canary"]

_WAYS: Final = ("without", "with")
_QUANTILES: Final = ("p50", "p95", "p99", "highest")
_CANARY_RATE: Final = 10.0
"""A second."""


class Canary:
    """Looks at answers of the canary table, whose rows all hold the number of the version that wrote them.

    Attributes:
        checked: answers so far.
        mixed: those whose rows were not all of one version, or not of the one that the answer names.
    """

    def __init__(self, dim: int) -> None:
        self._size_bytes = CANARY_ROWS * dim * 4
        self.checked = self.mixed = 0

    def look(self, _: int, answer: Answer) -> None:
        if not answer.error:
            rows = np.frombuffer(answer.body[-self._size_bytes :], np.float32)
            self.checked += 1
            self.mixed += not bool((rows == version_of(answer.body)).all())


def _commit(trainer: TrainerProcess, times: int, every: float) -> int:
    for _ in range(times):
        time.sleep(every / 2)
        trainer.commit()
        time.sleep(every / 2)
    return times


def _slice(rig: Rig, server: ServerProcess, rate: float, seconds: float, canary: Canary) -> list[Load]:
    """Loads of the ranking model and of the canary."""
    at = poisson(rig.generator, _CANARY_RATE, seconds)
    asked = Stream(RestClient(HOST, server.rest_port, 4), [canary_request()] * len(at), at, canary.look)
    return open_loop([rig.stream(server, "rest", rate, seconds), asked])


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    rig = Rig(request)
    rig.prepare()
    config, rate, canary = rig.config, rate_of(request, "soak", figures), Canary(rig.config["dim"])
    loads: dict[str, list[Load]] = {way: [] for way in _WAYS}
    every, memory, commits, canaries = config["update_every"], list[int](), 0, list[Load]()
    with rig.server("--warm-up", "none") as server, rig.trainer() as trainer, ThreadPoolExecutor(1) as threads:
        rig.warm(server)
        end = time.monotonic() + config["soak_seconds"]
        while time.monotonic() < end:
            for way in _WAYS:
                pending = threads.submit(_commit, trainer, 2, every) if way == "with" else None
                ranking, asked = _slice(rig, server, rate, 2 * every, canary)
                loads[way].append(ranking)
                canaries.append(asked)
                memory.append(server.memory().anonymous)
                commits += pending.result() if pending else 0
            p99 = [Quantiles.of(loads[way][-1].since(0)).p99 for way in _WAYS]
            print(f"  soak: {end - time.monotonic():.0f} s left, p99 {p99[0]:.1f} and {p99[1]:.1f} ms", flush=True)
        status = server.status()["version"]
    every_load = [*loads["without"], *loads["with"], *canaries]
    return {
        "rate": rate,
        "seconds": sum(load.seconds for load in canaries),
        "queries": sum(len(load.intended) for load in every_load),
        "failed": sum(load.num_failed for load in every_load),
        "errors": [error for load in every_load for error in load.errors][:10],
        "canaries": canary.checked,
        "mixed": canary.mixed,
        "commits": commits,
        "updates": status["updates"],
        "update_failures": status["update_failures"],
        "turns": {way: [Quantiles.of(load.since(0)).p99 for load in loads[way]] for way in _WAYS},
        **{
            f"{way}_updates": Quantiles.of(np.concatenate([load.since(0) for load in loads[way]]))._asdict()
            for way in _WAYS
        },
        "memory_bytes": {"start": memory[0], "middle": _level(memory, 0.5), "end": _level(memory, 0.95)},
    }


def _level(sizes: list[int], at: float) -> int:
    """The median of the tenth of the samples around a part of them: what is taken for a moment is not kept."""
    count = len(sizes)
    return int(np.median(sizes[int((at - 0.05) * count) : max(1, math.ceil((at + 0.05) * count))]))


def _tell(figures: dict[str, Any]) -> Told:
    memory = figures["memory_bytes"]
    without, updated = (float(np.median(figures["turns"][way])) for way in _WAYS)
    latencies = Table(
        title=f"a soak at {figures['rate']:.0f} queries/s, with a commit every few seconds and without, by turns",
        columns=["requests", "p50 ms", "p95 ms", "p99 ms", "highest ms", "p99 ms of a turn, median"],
        rows=[[f"{way} updates", *(f"{figures[f'{way}_updates'][name]:.1f}" for name in _QUANTILES), f"{p99:.1f}"]
              for way, p99 in zip(_WAYS, (without, updated), strict=True)],
    )  # fmt: skip
    counts = Table(
        title="what the soak came to",
        columns=["minutes", "requests", "failed", "mixed versions", "commits", "MiB at start", "in the middle",
                 "at the end"],
        rows=[[f"{figures['seconds'] / 60:.1f}", f"{figures['queries']:,}", f"{figures['failed']}",
               f"{figures['mixed']} of {figures['canaries']:,}", f"{figures['commits']}",
               *(f"{memory[name] / 2**20:.0f}" for name in ("start", "middle", "end"))]],
    )  # fmt: skip
    grown = memory["end"] / memory["middle"] - 1
    return Told(
        tables=[latencies, counts],
        goals=[
            Goal(name="p99 with updates over p99 without", value=round(updated / without, 3), at_most=2),
            Goal(name="soak: requests that failed", value=figures["failed"], exactly=0),
            Goal(name="soak: answers of mixed versions", value=figures["mixed"], exactly=0),
            Goal(name="soak: memory's growth in its second half", value=round(grown, 4), at_most=0.01),
        ],
        notes=[
            "Soak: each commit writes its own number into all rows of a small table; its rows are requested "
            "throughout, and must all hold the number that the answer names as its version. The trainer is niced. "
            "Memory: what is resident and no file's; in the middle and at the end the median of a tenth of the samples."
        ],
    )


PART: Final = Part(_measure, _tell)
