"""``python -m tests.fuzz NAME``: one target, guided by coverage; see ``--help``."""

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

from .target import Target, bounded, mutations

STORED = ("manifest", "records", "walk", "segments", "update")
NAMES = (*STORED, "runfile", "criteo", "infer")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=0, help="let atheris look for inputs that long (needs atheris)")
    parser.add_argument("--mutations", type=int, default=400, help="random changes of the seeds (default: 400)")
    parser.add_argument("--input", type=Path, nargs="+", help="run these files only")
    parser.add_argument("--out", type=Path, default=Path(".fuzz"), help="where findings and new inputs go")
    options = parser.parse_args()
    # As plain Python an index out of bounds is an error, and coverage is seen.
    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]], environment)
    # Hashes wrap around by intent: machine code does so in silence, numpy's scalars warn.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "overflow encountered in scalar", RuntimeWarning)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        if options.seconds:
            _search(name, options.seconds, options.out)
        else:
            _replay(name, options)
    return 0


def _target(name: str) -> Target:
    module = importlib.import_module(f"tests.fuzz.{'stored' if name in STORED else 'given'}")
    found: Target = module.TARGETS[name]
    return found


def _replay(name: str, options: argparse.Namespace) -> None:
    target = _target(name)
    inputs = [path.read_bytes() for path in options.input or ()] or target.seeds()
    if not options.input:
        inputs += mutations(inputs.copy(), target.dictionary, max(1, options.mutations // target.cost), seed=0)
    for data in inputs:
        (options.out / "last-input").write_bytes(data)
        with bounded():
            target.run(data)
    print(f"{name}: {len(inputs)} inputs")


def _search(name: str, seconds: int, out: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["tierstore", "tomllib", "gzip", "json", "numpy.lib"]):
        target = _target(name)
    found = out / name
    found.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (found / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4096", f"-artifact_prefix={out / name}-"]
    if target.dictionary:  # libFuzzer takes no empty one
        words = ["".join(f"{chr(92)}x{byte:02x}" for byte in word) for word in target.dictionary]
        (out / f"{name}.words").write_text("".join(f'"{word}"\n' for word in words))
        options.append(f"-dict={out / name}.words")
    atheris.Setup([sys.argv[0], *options, "-max_len=65536", str(found)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
