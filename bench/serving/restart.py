"""Part "restart": a server killed under load, and how soon the next one is as good."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from ..common import Part, Run, Table, Told
from .load import Quantiles, open_loop
from .rig import HitRate, Rig
from .server import ServerProcess

__all__ = ["PART"]

_REGAINED: Final = 0.95
_WAYS: Final = {"auto": "the last server's hot rows first", "none": "empty memory"}


def _window(rig: Rig, server: ServerProcess, rate: float) -> tuple[float, float]:
    """(hit rate, p99 in ms) of some seconds of load."""
    before = HitRate.of(server)
    load = rig.load(server, "rest", rate, rig.config["restart_window_seconds"])
    if load.num_failed:
        raise RuntimeError(f"{load.num_failed} requests failed: {'; '.join(load.errors)}")
    asked = HitRate.of(server).minus(before)
    return asked.hits / max(1, asked.unique), Quantiles.of(load.since(0)).p99


def _settled(rig: Rig, server: ServerProcess, rate: float) -> tuple[float, float]:
    """Hit rate and p99 in the last third of a while of load."""
    found, end = [], time.monotonic() + rig.config["restart_settle_seconds"]
    while time.monotonic() < end:
        found.append(_window(rig, server, rate))
    hits, p99 = np.median(found[-max(1, len(found) // 3) :], axis=0)
    return float(hits), float(p99)


def _way(rig: Rig, warm_up: str, rate: float) -> dict[str, Any]:
    flags, seconds = ("--warm-up", warm_up), rig.config["restart_window_seconds"]
    with rig.server(*flags) as server:
        former, former_p99 = _settled(rig, server, rate)
    # As after a day: what is saved at a stop is what a server saves from time to time.
    with rig.server(*flags) as server, ThreadPoolExecutor(1) as thread:
        _settled(rig, server, rate)
        pending = thread.submit(open_loop, [rig.stream(server, "rest", rate, seconds)])
        time.sleep(seconds / 2)
        server.kill()
        lost = pending.result()[0].num_failed
    start, windows, regained = time.monotonic(), list[list[float]](), None
    with rig.server(*flags) as server:
        while regained is None and time.monotonic() < start + rig.config["restart_limit_seconds"]:
            hits, p99 = _window(rig, server, rate)
            windows.append([time.monotonic() - start, hits, p99])
            regained = windows[-1][0] if hits >= _REGAINED * former else None
    print(f"  restart, {warm_up}: hits regained after {regained or float('nan'):.1f} s", flush=True)
    return {
        "warm_up": warm_up,
        "hit_rate": former,
        "p99": former_p99,
        "lost": lost,
        "ready_s": server.ready_seconds,
        "regained_s": regained,
        "windows": windows,
    }


def _rate(config: Mapping[str, Any], figures: Mapping[str, Any]) -> float:
    """Queries a second: as configured, or a share of what the part "load" found to be carried.

    Raises:
        SystemExit: neither is there; says what to do.
    """
    found = figures.get("load", {}).get("highest", [])
    highest = next((float(each["rate"]) for each in found if each["protocol"] == "rest"), 0.0)
    if not config["restart_rate"] and not highest:
        raise SystemExit("restart: run the part load before, into the same file, or give restart_rate")
    return float(config["restart_rate"] or config["restart_share"] * highest)


def _measure(request: Run, figures: dict[str, Any]) -> dict[str, Any]:
    rig, rate = Rig(request), _rate(request.config, figures)
    rig.prepare()
    hot, found = rig.store.with_name(rig.store.name + ".hot"), []
    for warm_up in rig.config["restart_ways"]:
        hot.unlink(missing_ok=True)
        found.append(_way(rig, warm_up, rate))
    hot.unlink(missing_ok=True)
    return {"rate": rate, "ways": found, "limit_s": rig.config["restart_limit_seconds"]}


def _tell(figures: dict[str, Any]) -> Told:
    rows = [
        [
            _WAYS[way["warm_up"]], f"{way['lost']}", f"{way['ready_s']:.1f}", f"{way['hit_rate']:.1%}",
            f"{way['windows'][0][1]:.1%}",
            f"> {figures['limit_s']:.0f}" if way["regained_s"] is None else f"{way['regained_s']:.1f}",
            f"{way['p99']:.1f}", f"{way['windows'][0][2]:.1f}",
        ]
        for way in figures["ways"]
    ]  # fmt: skip
    title = f"kill -9 at {figures['rate']:.0f} queries/s, and another server at once"
    columns = ["begins with", "requests lost", "ready after s", "hits before", "hits at first", "95 % of them after s",
               "p99 ms before", "p99 ms at first"]  # fmt: skip
    note = (
        "Restart: seconds count from the start of the new process. Hot rows are those which a server wrote beside "
        "the store when it last stopped, one load before the kill. The page cache stayed, as it does when a process "
        "dies."
    )
    return Told(tables=[Table(title=title, columns=columns, rows=rows)], notes=[note])


PART: Final = Part(_measure, _tell)
