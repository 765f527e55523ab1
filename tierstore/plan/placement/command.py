"""``tierstore plan place``: where a workload's tables could go, and what a step would take."""

import argparse
from pathlib import Path

__all__ = ["add_place_arguments", "run_place"]


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``run_place`` takes."""
    from .plan import STRATEGIES

    parser.add_argument("workload", metavar="WORKLOAD", help="a preset, or a workload file")
    parser.add_argument("--host", required=True, metavar="NAME|FILE", help="a host that ships, or a host file")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="hosts that compute (default: 1)")
    parser.add_argument(
        "--servers", type=int, metavar="N", help="with remote: hosts that hold the tables (default: the fewest that do)"
    )
    parser.add_argument(
        "--strategy", choices=["all", *STRATEGIES], default="all", help="where tables go (default: compare all)"
    )
    parser.add_argument(
        "--hbm-share", type=float, metavar="S", help="share of an accelerator's memory that rows may take"
    )
    parser.add_argument("--ddr-share", type=float, metavar="S", help="share of a host's memory that rows may take")
    parser.add_argument("--policy", default="auto", metavar="NAME", help="with ssd: of the caches (default: auto)")
    parser.add_argument("--json", metavar="PATH", help="write the plans to a file")
    parser.add_argument("--force", action="store_true", help="replace that file if it exists")


def run_place(options: argparse.Namespace) -> int:
    """Print the comparison or the plan; the exit status is 1 if nothing fits.

    Raises:
        ValueError: an argument, or a file, that cannot be; names it.
    """
    from ...system.output import require_new, require_other
    from ..json_file import write_json
    from ..parts import load_host
    from ..presets import load_workload
    from .describe import describe_comparison, describe_placement
    from .plan import Room
    from .strategies import compare
    from .through_tiers import planned_store

    if options.json is not None:
        require_other(Path(options.json), [options.workload, options.host])
        require_new(Path(options.json), force=options.force)
    shares = {"hbm_share": options.hbm_share, "ddr_share": options.ddr_share}
    room = Room(**{name: value for name, value in shares.items() if value is not None})
    plans = compare(
        load_workload(options.workload), load_host(options.host), hosts=options.hosts, servers=options.servers,
        strategies=None if options.strategy == "all" else [options.strategy], room=room,
        store_model=planned_store(options.policy),
    )  # fmt: skip
    if len(plans) > 1:
        print(describe_comparison(plans), end="\n\n")
    print(describe_placement(plans[0]))
    if options.json is not None:
        write_json({"plans": [plan.to_dict() for plan in plans]}, options.json, force=options.force)
    return 0 if plans[0].fits else 1
