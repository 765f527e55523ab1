"""Run benchmarks: ``python -m bench [NAME ...] [--quick]``; without names, all. Each as ``python -m bench.NAME``."""

import argparse
import subprocess
import sys

from .data import ROOT, find_criteo

NEED_CRITEO = ("criteo", "ids", "tiers", "towers", "precision", "dist", "dist_costs", "policies", "generalisation")


def main() -> int:
    """Each in a process of its own, so that none inherits another's memory or threads; 1 if one failed."""
    known = sorted(path.stem for path in (ROOT / "bench").glob("*.toml"))
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they work")
    given = parser.parse_args()
    if unknown := set(given.names) - set(known):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = []
    for name in given.names or known:
        if name in NEED_CRITEO and find_criteo() is None:
            print(f"\n{name}: skipped, needs the Criteo rows (set TIERSTORE_CRITEO)")
            continue
        print(f"\n=== {name}", flush=True)
        command = [sys.executable, "-m", f"bench.{name}", *(["--quick"] if given.quick else [])]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
