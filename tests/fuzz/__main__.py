"""``python -m tests.fuzz NAME``: one target, guided by coverage; see ``--help``."""

import argparse
import importlib
import os
import sys
import warnings
from pathlib import Path

from .mutate import mutations
from .target import Target, bounded

CORPUS = Path(__file__).parent / "corpus"
STORED = ("manifest", "records", "walk", "segments", "anchor", "update")
NAMES = (*STORED, "runfile", "criteo", "npy", "parquet", "infer")
LAST_INPUT = "last-input"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="+", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=0, help="let atheris look for inputs that long (needs atheris)")
    parser.add_argument("--mutations", type=int, help="random changes of the seeds instead; default: the target's own")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes")
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
    if options.input:
        inputs = [path.read_bytes() for path in options.input]
    else:
        known = [*target.seeds(), *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]
        count = target.mutations if options.mutations is None else options.mutations
        inputs = [*known, *mutations(known, target.dictionary, count, options.seed)]
    for data in inputs:
        (options.out / LAST_INPUT).write_bytes(data)
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
    limits = [f"-max_total_time={seconds}", "-timeout=30", "-rss_limit_mb=4096", "-max_len=65536"]
    if target.dictionary:
        words = out / f"{name}.words"
        escaped = ("".join(f"{chr(92)}x{byte:02x}" for byte in word) for word in target.dictionary)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        limits.append(f"-dict={words}")
    folders = [str(found), *([str(CORPUS / name)] if (CORPUS / name).is_dir() else [])]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={out / name}-", *folders], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
