"""What does ``import tierstore`` add to a program that imports torch anyway?"""

import subprocess
import sys

from .common import Goal, Report, Run, Spread, Table, program

__all__ = ["run"]

_STEPS = ("torch", "numba", "tierstore")

_CODE = """
import importlib, sys, time
for name in sys.argv[1:]:
    start = time.perf_counter()
    importlib.import_module(name)
    print(time.perf_counter() - start)
"""


def _seconds(*modules: str) -> list[float]:
    """Seconds to import each module after those before it, in a fresh interpreter."""
    command = [sys.executable, "-c", _CODE, *modules]
    return [float(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.split()]


def run(request: Run) -> Report:
    _seconds(*_STEPS)
    found = [(_seconds("torch", "tierstore"), _seconds(*_STEPS)) for _ in range(request.config["repetitions"])]
    torch = Spread.of([plain[0] for plain, _ in found])
    beyond = Spread.of([plain[1] for plain, _ in found])
    numba = Spread.of([steps[1] for _, steps in found])
    own = Spread.of([steps[2] for _, steps in found])
    names = ("torch", "tierstore, beyond torch", "of which numba", "of which tierstore and the rest")
    return Report(
        question="What does import tierstore add to a program that imports torch anyway?",
        tables=[
            Table(
                title="seconds to import, fresh interpreter, files in the page cache",
                columns=["module", "median s", "lowest", "highest"],
                rows=[
                    [name, f"{each.median:.2f}", f"{each.lowest:.2f}", f"{each.highest:.2f}"]
                    for name, each in zip(names, (torch, beyond, numba, own), strict=True)
                ],
            )
        ],
        figures={
            "torch_s": torch.median,
            "beyond_torch_s": beyond.median,
            "numba_s": numba.median,
            "own_s": own.median,
        },
        goals=[Goal(name="seconds beyond torch's own import", value=round(beyond.median, 3), at_most=1.0)],
    )


if __name__ == "__main__":
    sys.exit(program("import_time", run))
