"""Part "restart": a server killed under load, and how soon the next one is as good."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from ..common import Run, Table
from ..parts import Part, Told
from .load import Quantiles, open_loop
from .rig import HitRate, Rig, rate_of
from .server import ServerProcess

__all__ = ["PART"]

_REGAINED: Final = 0.95


def _window(rig: Rig, server: ServerProcess, rate: float) -> tuple[float, float]:
    """(hit rate, p99 in ms) of some seconds of load."""
    before = HitRate.of(server)
    load = rig.load(server, "rest", rate, rig.config["restart_window_seconds"])
    if load.num_failed:
        raise RuntimeError(f"{load.num_failed} requests failed: {'; '.join(load.errors)}")
    return HitRate.of(server).since(before), Quantiles.of(load.since(0)).p99


def _settled(rig: Rig, server: ServerProcess, rate: float) -> tuple[float, float]:
    """Hit rate and p99 in the last third of a while of load."""
    found = []
    end = time.monotonic() + rig.config["restart_settle_seconds"]
    while time.monotonic() < end:
        found.append(_window(rig, server, rate))
    last = found[-max(1, len(found) // 3) :]
    return float(np.median([hits for hits, _ in last])), float(np.median([p99 for _, p99 in last]))


def _kill_under_load(rig: Rig, server: ServerProcess, rate: float) -> int:
    """How many requests the kill took with it."""
    seconds = rig.config["restart_window_seconds"]
    stream = rig.stream(server, "rest", rate, seconds)
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(open_loop, [stream])
        time.sleep(seconds / 2)
        server.kill()
        return pending.result()[0].num_failed


def _way(rig: Rig, warm_up: str, rate: float) -> dict[str, Any]:
    flags = ("--warm-up", warm_up)
    server = rig.server(*flags)
    try:
        former, former_p99 = _settled(rig, server, rate)
        # As after a day: what is saved at a stop is what a server saves from time to time.
        server.stop()
        server = rig.server(*flags)
        _settled(rig, server, rate)
        lost = _kill_under_load(rig, server, rate)
        start = time.monotonic()
        server = rig.server(*flags)
        windows, regained = [], None
        while regained is None and time.monotonic() < start + rig.config["restart_limit_seconds"]:
            hits, p99 = _window(rig, server, rate)
            windows.append([time.monotonic() - start, hits, p99])
            if hits >= _REGAINED * former:
                regained = windows[-1][0]
        ready = server.ready_seconds
    finally:
        server.kill()
    print(f"  restart, {warm_up}: ready after {ready:.1f} s, hits regained after {regained or float('nan'):.1f} s",
          flush=True)  # fmt: skip
    return {
        "warm_up": warm_up,
        "hit_rate": former,
        "p99": former_p99,
        "lost": lost,
        "ready_s": ready,
        "regained_s": regained,
        "windows": windows,
    }


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    rig, rate = Rig(request), rate_of(request, "restart", figures)
    rig.prepare()
    hot = rig.store.with_name(rig.store.name + ".hot")
    found = []
    for warm_up in rig.config["restart_ways"]:
        hot.unlink(missing_ok=True)
        found.append(_way(rig, warm_up, rate))
    hot.unlink(missing_ok=True)
    return {"rate": rate, "ways": found, "limit_s": rig.config["restart_limit_seconds"]}


def _tell(figures: dict[str, Any]) -> Told:
    names = {"auto": "the last server's hot rows first", "none": "empty memory"}
    rows = []
    for way in figures["ways"]:
        regained = way["regained_s"]
        first = way["windows"][0] if way["windows"] else [float("nan")] * 3
        rows.append(
            [
                names[way["warm_up"]], f"{way['lost']}", f"{way['ready_s']:.1f}", f"{way['hit_rate']:.1%}",
                f"{first[1]:.1%}", f"> {figures['limit_s']:.0f}" if regained is None else f"{regained:.1f}",
                f"{way['p99']:.1f}", f"{first[2]:.1f}",
            ]
        )  # fmt: skip
    return Told(
        tables=[
            Table(
                title=f"kill -9 at {figures['rate']:.0f} queries/s, and another server at once",
                columns=["begins with", "requests lost", "ready after s", "hits before", "hits at first",
                         "95 % of them after s", "p99 ms before", "p99 ms at first"],
                rows=rows,
            )
        ],
        notes=[
            "Restart: seconds count from the start of the new process. Hot rows are those which a server wrote beside "
            "the store when it last stopped, one load before the kill. The page cache stayed, as it does when a "
            "process dies."
        ],
    )  # fmt: skip


PART: Final = Part(_measure, _tell)
