"""Is this version as fast as an earlier one?

Both run at the same time, each in a process of its own, and take turns call by call, so that whatever else the machine
does meets both. The earlier version is a commit of the repository. What both only read, it writes for both: where the
pages of a file lie decides up to a fifth of the time to read them.
"""

import contextlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from .child import Child
from .common import Goal, Report, Run, Table, spread, start
from .data import ROOT

TASKS: Final = ("train", "lookup", "partly", "reads", "commit")
SLOWER_MAX: Final = 1.03
PARTLY_MAX: Final = 0.85
CALLS_MAX: Final = {"calls of a lookup": 115, "calls of a gradient": 80, "files of a lookup": 25}
ONE_ID_MAX: Final = {"hits": 20e-6, "misses": 80e-6}
_PAUSE_SECONDS: Final = 0.02
"""Before each measurement: threads of the other process spin for a while after their work."""
_WORKER: Final = ROOT / "bench" / "version_worker.py"


class _Worker(Child):
    """A version that times what it is asked to, in a process of its own."""

    def __init__(self, root: Path, folder: Path, task: str, config: dict[str, Any]) -> None:
        command = ["env", f"PYTHONPATH={root}", sys.executable, "-P", _WORKER, folder, task, json.dumps(config)]
        super().__init__(command, cwd=root)
        self.parts: list[str] = json.loads(self.line())

    def figure(self, part: str) -> float:
        """Seconds of one measurement, or a count."""
        time.sleep(_PAUSE_SECONDS)
        return float(self.ask(part))


def extract(commit: str, folder: Path) -> Path:
    """The tree of a commit, in a folder that is kept for the next run."""
    target = folder / f"version-{commit}"
    if not target.exists():
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target, filter="tar")
    return target


def ratio_quartiles(ratios: Iterable[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio_p50": middle, "ratio_p25": low, "ratio_p75": high}


@contextlib.contextmanager
def _both(request: Run, task: str, number: int) -> Iterator[tuple[_Worker, _Worker]]:
    """(this version, the earlier one), ready to measure; in even rounds the earlier one is started first."""
    roots = {"now": ROOT, "earlier": extract(request.config["earlier"], request.folder)}
    workers: dict[str, _Worker] = {}
    with contextlib.ExitStack() as stack:
        for name in sorted(roots, reverse=bool(number % 2)):
            folder = request.folder / f"versions-{'read' if task == 'reads' else name}"
            workers[name] = stack.enter_context(_Worker(roots[name], folder, task, request.config))
        yield workers["now"], workers["earlier"]


def _measure(request: Run, task: str) -> dict[str, list[tuple[float, float]]]:
    """Seconds of (this version, the earlier one) by part, pair by pair. Each round has new processes and stores: one
    may be faster than another of the same code, by where its memory lies."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number in range(request.config["rounds"]):
        with _both(request, task, number) as (now, earlier):
            for part in now.parts:
                pairs = [_pair(now, earlier, part, turn) for turn in range(request.config["repetitions"] + 1)]
                found.setdefault(part, []).extend(pairs[1:])
    return found


def _pair(now: _Worker, earlier: _Worker, part: str, turn: int) -> tuple[float, float]:
    seconds = {worker: worker.figure(part) for worker in ((now, earlier) if turn % 2 else (earlier, now))}
    return seconds[now], seconds[earlier]


def run(request: Run) -> Report:
    goals, rows, counts, figures, config = [], [], [], dict[str, Any](), request.config
    for task in TASKS:
        for part, pairs in _measure(request, task).items():
            now, earlier = ([pair[place] for pair in pairs] for place in (0, 1))
            quartiles = ratio_quartiles(one / other for one, other in pairs)
            figures[part] = {"seconds": spread(now), "earlier_seconds": spread(earlier)} | quartiles
            ratio, low, high = quartiles["ratio_p50"], quartiles["ratio_p25"], quartiles["ratio_p75"]
            times = [f"{1e3 * statistics.median(seconds):.3f}" for seconds in (now, earlier)]
            rows.append([part, *times, f"{ratio:.3f}", f"{low:.2f} - {high:.2f}"])
            at_most = PARTLY_MAX if part.startswith("partly: lookup") else SLOWER_MAX
            goals.append(Goal(f"{part}: time over the earlier version's", round(ratio, 3), at_most=at_most))
            if most := ONE_ID_MAX.get(part.removeprefix("one id that ")):
                goals.append(Goal(f"{part}: microseconds", 1e6 * statistics.median(now), at_most=1e6 * most))
    with _both(request, "calls", 0) as (ours, theirs):
        for part in ours.parts:
            count, other = int(ours.figure(part)), int(theirs.figure(part))
            figures[part] = {"count": count, "earlier_count": other}
            counts.append([part, str(count), str(other), f"{count / other:.2f}"])
            if part in CALLS_MAX:
                goals.append(Goal(part, count, at_most=CALLS_MAX[part]))
    title = f"time of one measurement, ms, this version and {config['earlier']}"
    note = (
        f"Two processes in turns, {config['rounds']} times started, {config['repetitions']} pairs each time; the ratio "
        f"is the median over all pairs. Training: {config['tables']} tables of {config['rows']:,} rows of "
        f"{config['dim']}, {config['batch']:,} samples of {config['pooling_factor']} ids. Reads: "
        f"{config['read_rows']:,} random rows of {config['cold_rows']:,}, both versions from one store, which the "
        "earlier one wrote: two copies of a file differ by a fifth. For the rest each version has a store, new in each "
        "round. Commits: rows of one table, written before the clock starts. Counts: by sys.setprofile, of the third "
        "batch of two tables, a quarter of the rows being in memory."
    )
    table = Table(title, ["what", "this version", "earlier", "ratio of a pair", "its quartiles"], rows)
    what = f"what Python runs through in the package, this version and {config['earlier']}"
    ran = Table(what, ["what", "this version", "earlier", "ratio"], counts)
    return Report([table, ran], goals, [note], figures, f"Is this version as fast as {config['earlier']}?")


if __name__ == "__main__":
    start("versions")
