"""The command line of ``python -m bench.gpu``; see the package's docstring."""

import argparse
import sys
from collections.abc import Sequence

import torch

from .. import gpu
from ..common import Report, Run, program
from .part import PARTS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", add_help=False, allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    given, rest = parser.parse_known_args(arguments)
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if given.device == "cpu" and "--quick" not in rest:
        parser.error("--device cpu goes with --quick: its figures are no results")
    if given.device == "cuda" and not torch.cuda.is_available() and not {"-h", "--help"} & set(rest):
        print("no CUDA device: nothing measured")
        return 0
    reports: list[Report] = []

    def run(request: Run) -> Report:
        reports.append(gpu.run(request, device=given.device, parts=parts))
        return reports[-1]

    run.__module__ = gpu.__name__
    status = program("gpu", run, rest)
    return status or int(any(report.figures["failed"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
