"""What does a training step with rows in device memory ask of host and device?

Launches, waits, bytes that are sent, and the host's time, of this version and of an earlier one, without a GPU: the
tier runs on the CPU. Launches and waits are counted by Python, where the tier asks for them; in the host's time, what
the device would do is taken out. ``bench.gpu`` measures the device.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from .common import Goal, Report, Run, Table, extract, program
from .data import ROOT

__all__ = ["run"]

_WORKER: Final = ROOT / "bench" / "hbm_worker.py"
_NOW, _BEFORE = "now", "before"
_KINDS: Final = {
    "all": "all rows",
    "hits": "some rows, those of the batch among them",
    "misses": "some rows, new batches",
}
_LAUNCHES_MAX: Final = {"all": 10, "hits": 15}
_WAITS_MAX: Final = {"all": 0, "hits": 0, "misses": 2}
_SENT_MAX: Final = 12
_FASTER: Final = 5
_KEPT_BYTES: Final = 2**31
"""What glibc keeps of memory that was freed."""


def _case(kind: str, config: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a worker is told."""
    shared = {name: config[name] for name in ("dim", "seed", "exponent")}
    share = 1.0 if kind == "all" else more.pop("some_share")
    more.pop("some_share", None)
    return shared | {"share": share, "hits": kind == "hits"} | more


def _timing_cases(config: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    own = config["time"]
    rows = [max(3, int(size * own["scale"])) for size in own["table_sizes"]]
    return {
        (kind, batch): _case(
            kind, config, table_rows=rows, some_share=config["some_share"], batch=batch, warm_up=own["warm_up"],
            steps=steps + 1,
        )
        for kind in _KINDS
        for batch, steps in zip(own["batches"], own["steps"], strict=True)
    }  # fmt: skip


def _counting_cases(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    own = dict(config["count"])
    rows = [own.pop("rows")] * own.pop("tables")
    return {kind: _case(kind, config, table_rows=rows, **own) for kind in _KINDS}


def _ask(root: Path, task: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a version says of each case."""
    # Threads that spin for a while after torch's work would take the host's time; so would the system's memory that
    # large tensors are made of, which a device's allocator keeps.
    environment = os.environ | {
        "TRITON_INTERPRET": "1" if task == "count" else "0", "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": f"{_KEPT_BYTES}",
    }  # fmt: skip
    command = [sys.executable, "-P", str(_WORKER), str(root), task, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise RuntimeError(f"{root} cannot be measured: see its message above")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _roots(request: Run) -> tuple[dict[str, Path], str]:
    """The versions' trees, by name, and why there is none before."""
    try:
        return {_BEFORE: extract(request.config["earlier"], request.folder, "tierstore"), _NOW: ROOT}, ""
    except (OSError, subprocess.CalledProcessError):
        return {_NOW: ROOT}, f"git has no commit {request.config['earlier']} here: there is no before."


def _counted(roots: dict[str, Path], config: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """By kind and version."""
    cases = _counting_cases(config)
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in cases}
    for version, root in roots.items():
        for kind, one in zip(cases, _ask(root, "count", list(cases.values())), strict=True):
            found[kind][version] = one
    return found


def _timed(roots: dict[str, Path], config: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each case, by version, the steps of each round; versions take turns."""
    cases = _timing_cases(config)
    found: list[dict[str, Any]] = [{"kind": kind, "batch": batch} for kind, batch in cases]
    for number in range(config["time"]["rounds"]):
        for version in sorted(roots, reverse=bool(number % 2)):
            for case, one in zip(found, _ask(roots[version], "time", list(cases.values())), strict=True):
                own = case.setdefault(version, {"host_us": [], "device_us": []})
                own["host_us"].append(one["host_us"])
                own["device_us"].append(one["device_us"])
                own["sent_bytes_a_position"] = one["sent_bytes_a_position"]
    for case in found:
        for version in roots:
            case[version]["host_us_least"] = statistics.median(map(min, case[version]["host_us"]))
    return found


def run(request: Run) -> Report:
    roots, missing = _roots(request)
    compiled = _compiled()
    counts, cases = _counted(roots, request.config), _timed(roots, request.config)
    rows = []
    for case in cases:
        cells = [f"{_KINDS[case['kind']]}, {case['batch']:,}"]
        for version in (_NOW, _BEFORE):
            if version in roots:
                own, asked = case[version], counts[case["kind"]][version]
                sent = f"{own['sent_bytes_a_position']:.1f}"
                cells += [f"{len(asked['launches'])}", f"{len(asked['waits'])}", sent, f"{own['host_us_least']:,.0f}"]
            else:
                cells += [""] * 4
        rows.append([*cells, _times(case)])
    names = ("launches", "waits", "bytes", "host us")
    return Report(
        question="What does a training step with rows in device memory ask of host and device?",
        tables=[
            Table(
                title="a step with 26 one-hot features of dim 16, before: commit " + request.config["earlier"],
                columns=[
                    "rows in device memory, batch", *names, *(f"{name} before" for name in names),
                    "before over now",
                ],
                rows=rows,
            ),
            _kernels_table(compiled),
        ],
        figures={
            "counts": counts,
            "cases": cases,
            "missing": missing,
            "kernels": compiled,
        },
        goals=[
            *_goals(counts, cases, has_before=_BEFORE in roots),
            Goal(
                name="loads and stores of spilled registers in a kernel, at most",
                value=max(each["spills"] for each in compiled.values()),
                exactly=0,
            ),
        ],
        notes=[_how(request.config), *filter(None, [missing])],
    )  # fmt: skip


def _compiled() -> dict[str, Any]:
    """What the compiler makes of each kernel, as the tests look at it (``tests/hbm/machine_code.py``)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.hbm.machine_code"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["launches"]
    return {name: {key: value for key, value in each.items() if key != "ptx"} for name, each in found.items()}


def _kernels_table(compiled: dict[str, Any]) -> Table:
    """A line for each kernel, over all constants that it was compiled with."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for own in compiled.values():
        variants.setdefault(own["kernel"], []).append(own)
    rows = []
    for kernel, each in variants.items():
        registers, shared, occupancies = (
            [own[name] for own in each] for name in ("registers", "shared_bytes", "occupancy")
        )
        barriers = max(loop["barriers"] for own in each for loop in [{"barriers": 0}, *own["loops"]])
        cells = [f"{len(each)}", _span(registers), f"{max(own['spills'] for own in each)}", _span(shared)]
        rows.append([kernel, *cells, _span([round(100 * share) for share in occupancies]), f"{barriers}"])
    return Table(
        title="the Triton kernels as compiled for an H100",
        columns=[
            "kernel", "variants", "registers", "spills", "shared bytes", "occupancy, %", "barriers in a loop"
        ],
        rows=rows,
    )  # fmt: skip


def _span(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _times(case: dict[str, Any]) -> str:
    return f"{case[_BEFORE]['host_us_least'] / case[_NOW]['host_us_least']:.1f}" if _BEFORE in case else ""


def _goals(counts: dict[str, Any], cases: list[dict[str, Any]], *, has_before: bool) -> list[Goal]:
    goals = [
        Goal(name=f"{_KINDS[kind]}: launches a step", value=len(counts[kind][_NOW]["launches"]), at_most=most)
        for kind, most in _LAUNCHES_MAX.items()
    ]
    goals += [
        Goal(name=f"{_KINDS[kind]}: waits a step", value=len(counts[kind][_NOW]["waits"]), at_most=most)
        for kind, most in _WAITS_MAX.items()
    ]
    most_sent = max(case[_NOW]["sent_bytes_a_position"] for case in cases)
    goals.append(Goal(name="bytes sent for a position, at most", value=round(most_sent, 2), at_most=_SENT_MAX))
    if has_before:
        goals += [
            Goal(
                name=f"{_KINDS[case['kind']]}, batch {case['batch']:,}: the host's time before over now",
                value=round(case[_BEFORE]["host_us_least"] / case[_NOW]["host_us_least"], 2),
                at_least=_FASTER,
            )
            for case in cases
        ]
    return goals


def _how(config: dict[str, Any]) -> str:
    own, count = config["time"], config["count"]
    return (
        "No GPU was used. A step: lookup, backward with row-wise Adagrad, one thread, no prefetching; Zipf "
        f"{config['exponent']} ids; some rows: {config['some_share']:.0%}, and all of them in host memory. Launches "
        "(kernels of Triton, torch operations, copies) and waits of the host: counted by Python, the tier launching "
        "what it would launch on a GPU, page-locking pretended, twins computing, the device a step behind; the most of "
        f"{count['steps']} steps of {count['batch']} samples. "
        "Bytes: what is copied to the device for a position, rows apart. Host: a step's time less what "
        "runs on the device (torch operations, the kernels' twins), by torch's profiler on the CPU, the same for both "
        "versions; pooling and updates do nothing there, as the host never looks at their results. The driver's part "
        "of a launch is not in it. Of each process the least of its steps, as whatever else the machine does only adds "
        f"to it; the median over {own['rounds']} processes of each version, in turns. Kernels: over the widths, types "
        "and optimizers that the tests compile; occupancy: of the warps that a multiprocessor can hold, as registers "
        "and shared memory allow."
    )


if __name__ == "__main__":
    sys.exit(program("hbm", run))
