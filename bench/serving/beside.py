"""Part "beside": an earlier version's server over the same store, by turns, with commits and without."""

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from ..common import Goal, Part, Report, Run, Table
from ..versions import extract, ratio_quartiles
from .load import Quantiles, closed_loop
from .rig import Rig, ServerProcess
from .trainer import TrainerProcess

_SLOWER_MAX: Final = 1.03
_AT_ONCE: Final = 2
_BETWEEN_COMMITS: Final = 0.5
"""Seconds."""


def _slices(rig: Rig, servers: Sequence[ServerProcess], number: int) -> dict[str, list[tuple[Any, Any]]]:
    """By protocol the latencies of (this version, the earlier one), slice by slice, each pair for the same queries."""
    found: dict[str, list[tuple[Any, Any]]] = {"rest": [], "grpc": []}
    for turn, protocol in itertools.product(range(number), found):
        requests, pair, seconds = rig.requests(200, protocol), [None, None], rig.config["slice_seconds"]
        for place in (0, 1) if turn % 2 else (1, 0):
            load = closed_loop(servers[place].client(protocol, _AT_ONCE), requests, at_once=_AT_ONCE, seconds=seconds)
            if load.num_failed:
                raise RuntimeError(f"{load.num_failed} requests failed: {load.errors}")
            pair[place] = load.latency
        found[protocol].append((pair[0], pair[1]))
    return found


def _compared(pairs: Sequence[tuple[Any, Any]]) -> dict[str, float]:
    """Medians over the slices' ratios of mean latency, and the p99 of all, in ms."""
    ours, theirs = (Quantiles.of(np.concatenate([pair[place] for pair in pairs])) for place in (0, 1))
    both = {"p50": ours.p50, "earlier_p50": theirs.p50, "p99": ours.p99, "earlier_p99": theirs.p99}
    return both | ratio_quartiles(float(np.mean(now) / np.mean(earlier)) for now, earlier in pairs)


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    rig, number = Rig(request), int(request.config["beside_slices"])
    with rig.server() as now, rig.server(extract(request.config["earlier"], request.folder)) as earlier:
        for server in (now, earlier):
            rig.warm(server)
        alone = _slices(rig, (now, earlier), number)
        with TrainerProcess(rig.store, request.config["update_rows"], log=request.folder / "serve.log") as trainer:
            ended = threading.Event()

            def commit() -> int:
                return sum(trainer.commit().rows > 0 for _ in iter(lambda: ended.wait(_BETWEEN_COMMITS), True))

            with ThreadPoolExecutor(1) as threads:
                counted = threads.submit(commit)
                try:
                    updated = _slices(rig, (now, earlier), number)
                finally:
                    ended.set()
    named = {"alone": alone, "while updates arrive": updated}
    found = {what: {protocol: _compared(pairs) for protocol, pairs in each.items()} for what, each in named.items()}
    return {"earlier": request.config["earlier"], "commits": counted.result(), "found": found}


def _tell(figures: dict[str, Any]) -> Report:
    rows, goals = [], []
    for (what, each), protocol in itertools.product(figures["found"].items(), ("rest", "grpc")):
        own = each[protocol]
        times = [f"{own[name]:.1f}" for name in ("p50", "earlier_p50", "p99", "earlier_p99")]
        quartiles = f"{own['ratio_p25']:.2f} - {own['ratio_p75']:.2f}"
        rows.append([f"{protocol}, {what}", *times, f"{own['ratio_p50']:.3f}", quartiles])
        name, ratio = "time", own["ratio_p50"]
        if what != "alone":
            name, ratio = f"p99 {what},", own["p99"] / own["earlier_p99"]
        goals.append(Goal(f"{protocol}: {name} over the earlier version's", ratio, at_most=_SLOWER_MAX))
    title = f"the ranking model's answers, ms, this version and {figures['earlier']}"
    columns = ["what", "p50", "earlier p50", "p99", "earlier p99", "ratio of a slice", "its quartiles"]
    note = (
        f"Beside: two servers over one store take turns every few seconds, {_AT_ONCE} requests always under way, each "
        f"pair of slices with the same queries; the ratio is that of mean latencies. A trainer made "
        f"{figures['commits']} commits in the second half."
    )
    return Report([Table(title, columns, rows)], goals, [note])


PART: Final = Part(_measure, _tell)
