"""``tierstore plan curve``: what caches of every size would hit, of a trace."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...rows import MAX_ROWS
from ...system.terminal import progress_bar

if TYPE_CHECKING:
    from ..accesses import Accesses
    from .base import MissRatioCurve
    from .build import CurveOptions
    from .replays import Progress

__all__ = ["add_curve_arguments", "run_curve"]

_POLICY: Final = "lru"


def add_curve_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``tierstore plan curve``."""
    parser.add_argument("trace", metavar="TRACE", help="a trace, of tierstore trace or another that can be read")
    parser.add_argument(
        "--policy",
        default=_POLICY,
        metavar="NAMES",
        help="some of auto, lru, lfu, tinylfu, perfect-lfu, opt, with commas between (default: lru); "
        "perfect-lfu and opt are bounds that no store reaches",
    )
    parser.add_argument("--sizes", metavar="ROWS", help="sizes of caches, with commas between, as 1000,20000,5%%")
    parser.add_argument(
        "--sampling-rate",
        type=float,
        default=1.0,
        metavar="R",
        help="let this share of the rows stand for all (default: 1, every row)",
    )
    parser.add_argument(
        "--once-a-batch", action="store_true", help="count a row once a batch, as the tiers of a store do"
    )
    parser.add_argument("--by-table", action="store_true", help="a cache for each table, not one for all")
    parser.add_argument("--windows", type=int, metavar="N", help="N parts of the trace, to see drift")
    parser.add_argument("--json", metavar="PATH", help="also write the curves to a file")
    parser.add_argument("--force", action="store_true", help="replace that file if it exists")


def run_curve(options: argparse.Namespace) -> int:
    """The exit status.

    Raises:
        ValueError: options or the trace are no good; says why. OSError.
    """
    from ...system.output import require_new, require_other
    from ..accesses import once_a_batch
    from ..json_file import write_json
    from .text import describe_curves

    if options.by_table and options.windows is not None:
        raise ValueError("--by-table and --windows: choose one")
    if options.json is not None:
        require_other(Path(options.json), [options.trace])
        require_new(Path(options.json), force=options.force)
    policies = _policies(options.policy)
    accesses = _read(options.trace)
    if not len(accesses.keys):
        raise ValueError(f"{options.trace} has no lookup: there is no curve of it")
    if options.once_a_batch:
        accesses = once_a_batch(accesses)
    sizes = _sizes(options.sizes, accesses)
    found: dict[str, dict[str, MissRatioCurve]] = {}
    for policy in policies:
        with progress_bar(policy, unit=" accesses", unit_scale=True) as show:
            found[policy] = _curves(options, accesses, policy, sizes, show)
    _say(options.trace, accesses, options.once_a_batch)
    for heading, group in _groups(found).items():
        print(f"\n{heading}" + describe_curves(group, sizes))
    if options.json is not None:
        listed = {policy: {name: each.to_dict() for name, each in curves.items()} for policy, curves in found.items()}
        write_json(listed, options.json, force=options.force, indent=None)
        print(f"\nWritten: {options.json}")
    return 0


def _read(path: str) -> "Accesses":
    from ..traces import read_accesses

    return read_accesses(path)


def _policies(text: str) -> list[str]:
    from ...cache import resolve_policy
    from ...settings.names import nearest
    from .base import POLICIES

    names = [resolve_policy(name.strip()) for name in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"--policy {name}: {nearest(name, POLICIES)}")
    return list(dict.fromkeys(names))


def _sizes(text: str | None, accesses: "Accesses") -> list[int] | None:
    """Rows; a share is of the distinct rows."""
    if text is None:
        return None
    from ..accesses import numbered

    num_rows = numbered(accesses.keys).num_rows / accesses.sampling_rate if "%" in text else 0.0
    return sorted({_size(part.strip(), num_rows) for part in text.split(",")})


def _size(text: str, num_rows: float) -> int:
    number = text.removesuffix("%")
    try:
        size = int(number) if number == text else _share(float(number), num_rows)
    except (ValueError, OverflowError):
        size = 0
    if not 1 <= size < MAX_ROWS:
        raise ValueError(f"--sizes {text}: write rows, 1 or more, or a share of the distinct rows, as 1000,20000,5%")
    return size


def _share(percent: float, num_rows: float) -> int:
    return max(1, round(percent / 100 * num_rows)) if percent > 0 else 0


def _curves(
    options: argparse.Namespace, accesses: "Accesses", policy: str, sizes: list[int] | None, show: "Progress"
) -> "dict[str, MissRatioCurve]":
    """By table, by window, or the one of all."""
    from .build import by_table, curve, windows

    asked: CurveOptions = {"sizes": sizes, "sampling_rate": options.sampling_rate, "progress": show}
    if options.by_table:
        return by_table(accesses, policy, **asked)
    if options.windows is not None:
        parts = windows(accesses, policy, options.windows, **asked)
        return {f"{part.start:,} - {part.stop:,}": part.curve for part in parts}
    return {"all": curve(accesses, policy, **asked)}


def _groups(found: "Mapping[str, Mapping[str, MissRatioCurve]]") -> "Mapping[str, Mapping[str, MissRatioCurve]]":
    """What is shown together, by heading: all policies where each has one curve, else a policy's."""
    if all(len(curves) == 1 for curves in found.values()):
        return {"": {policy: each for policy, curves in found.items() for each in curves.values()}}
    return {f"{policy}:\n": curves for policy, curves in found.items()}


def _say(path: str, accesses: "Accesses", once: bool) -> None:
    what = "distinct rows of batches" if once else "lookups"
    sampled = f", a sample of {accesses.sampling_rate:.3g} of the rows" if accesses.sampling_rate < 1 else ""
    counted = "" if accesses.all_lookups is None else f" of {sum(accesses.all_lookups):,}"
    print(f"{path}: {len(accesses.keys):,}{counted} {what} of {len(accesses.tables)} tables{sampled}")
    if accesses.sampling_rate < 1 and not once and not counted:
        print(
            "the sample does not say how many lookups there were, and each weighs by the popular rows that happen to "
            "be in it: use --once-a-batch, or record anew"
        )
