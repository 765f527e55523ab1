"""``tierstore plan measure``: what this machine can do, as a host file for the other commands."""

import argparse
from pathlib import Path
from typing import Final

from ...system.terminal import progress_bar
from .describe import describe
from .measurement import measure

__all__ = ["add_measure_arguments", "run_measure"]

_DEFAULT_PATH: Final = "host.json"


def add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``tierstore plan measure``."""
    parser.add_argument("--dir", default=".", metavar="DIR", help="a folder on the SSD to be measured (default: .)")
    parser.add_argument(
        "--json",
        default=_DEFAULT_PATH,
        metavar="PATH",
        help=f"where the host goes, .json or .toml (default: {_DEFAULT_PATH})",
    )
    parser.add_argument("--seconds", type=float, default=50.0, metavar="N", help="time to spend, about (default: 50)")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="cpu (default), or cuda for all GPUs, or cuda:1"
    )
    parser.add_argument("--force", action="store_true", help="replace PATH if it exists")


def run_measure(options: argparse.Namespace) -> int:
    """Measure, print what was found, and save it; the exit status."""
    from ..parts.host_files import require_writable, write_host

    path = Path(options.json)
    require_writable(path, force=options.force)  # better now than in a minute
    with progress_bar("measuring", bar_format="{desc} {bar} {percentage:.0f}%") as show:

        def told(step: str, share: float) -> None:
            show(round(100 * share), 100, f"measuring {step}")

        found = measure(options.dir, seconds=options.seconds, progress=told, device=options.device)
    write_host(found.host, path, force=options.force)
    print(describe(found))
    print(f"\nSaved as {path}. Fill in what it could not know: watts, prices, the network, drive writes a day.")
    return 0
