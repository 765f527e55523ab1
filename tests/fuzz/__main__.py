"""``python -m tests.fuzz NAME``: targets on their seeds and random changes of them; see ``--help``."""

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

from .target import Target, bounded, mutations

STORED = ("manifest", "records", "walk", "look", "segments", "update")
NAMES = (*STORED, "runfile", "criteo", "infer")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--mutations", type=int, default=400, help="random changes of the seeds (default: 400)")
    parser.add_argument("--input", type=Path, nargs="+", help="run these files only")
    parser.add_argument("--out", type=Path, default=Path(".fuzz"), help="where the last input goes")
    options = parser.parse_args()
    # As plain Python an index out of bounds is an error.
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]], environment)
    # Hashes wrap around by intent: machine code does so in silence, numpy's scalars warn.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "overflow encountered in scalar", RuntimeWarning)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        module = importlib.import_module(f"tests.fuzz.{'stored' if name in STORED else 'given'}")
        target: Target = module.TARGETS[name]
        inputs = [path.read_bytes() for path in options.input or ()] or target.seeds()
        if not options.input:
            inputs += mutations(inputs.copy(), target.dictionary, max(1, options.mutations // target.cost))
        for data in inputs:
            (options.out / "last-input").write_bytes(data)
            with bounded():
                target.run(data)
        print(f"{name}: {len(inputs)} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
