"""What part ``rows`` tells of its figures."""

from typing import Any, Final

from ..common import Goal, Table
from .part import Part

__all__ = ["report"]

_RULES: Final = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad"}
_WANTED_OF_COPY: Final = 0.7
_WANTED_OF_PEER: Final = 0.9


def report(
    measured: list[dict[str, Any]], left: list[str], config: dict[str, Any], limit: float, missing: dict[str, str]
) -> Part:
    """Args:
    measured: the cases; left: names of those to come.
    limit: bytes a second of a device copy.
    missing: why a peer was not measured, or "", by name.
    """
    skewed = [case for case in measured if case["exponent"]] or measured
    goals = [
        Goal(
            name=f"{what}, Zipf ids, all widths and batches: compulsory bytes a second over a device copy's, lowest",
            value=round(min(case["of_copy"][name] for case in skewed), 3),
            at_least=_WANTED_OF_COPY,
        )
        for name, what in (("forward", "pooled forward"), *((f"{rule} grouped", told) for rule, told in _RULES.items()))
    ]
    for peer, told in _BASES.items():
        if not missing[peer]:
            goals += [
                Goal(
                    name=f"{what}: rate over that of {told}, Zipf ids, lowest",
                    value=round(min(_over(case, peer, what) for case in skewed), 3),
                    at_least=_WANTED_OF_PEER,
                )
                for what in ("forward", *_RULES)
            ]
    absent = [f"{_BASES[peer]} was not measured: {why}." for peer, why in missing.items() if why]
    return Part(
        tables=[_table(measured, config), _wall_table(measured)],
        figures={"copy_bytes_per_s": limit, "cases": measured, "missing": missing},
        goals=goals,
        notes=[
            "Rows: every call has a batch that was never seen before. Of copy rate: the fewest bytes that must move "
            "(each distinct row, id, offset, gradient and result once, an updated row twice: read, written) a second "
            f"over the {limit / 1e9:,.0f} GB/s of a device copy. An update includes the grouping of its ids, "
            "as a peer's does; grouped: without. Device time by events, after the L2 cache was written over; wall time "
            "on an idle device, from the call until the device is done. torch: one embedding_bag, sparse gradients, "
            "SGD. Our CUDA C++: a plain table-batched kernel family written for this benchmark, one warp a bag and one "
            "warp a row, updates fused, sums of hot rows in no fixed order. " + " ".join(absent)
        ],
        left=left,
    )


_BASES: Final = {"fbgemm": "FBGEMM", "cuda": "our CUDA C++"}


def _median(case: dict[str, Any], name: str, kind: str = "seconds") -> float:
    """Seconds; not a number where it was not measured."""
    return float(case[kind][name]["median"]) if name in case[kind] else float("nan")


def _over(case: dict[str, Any], peer: str, what: str) -> float:
    """How many times as fast as the peer."""
    theirs = f"{peer} sgd forward" if what == "forward" else f"{peer} {what} backward"
    return _median(case, theirs) / _median(case, what)


def _head(case: dict[str, Any]) -> str:
    ids = f"Zipf {case['exponent']}" if case["exponent"] else "uniform"
    return f"{case['dim']}, {case['batch']:,}, {ids}"


def _table(measured: list[dict[str, Any]], config: dict[str, Any]) -> Table:
    rows = []
    for case in measured:
        for what, torch_name in (("forward", "torch forward"), ("sgd", "torch backward"), ("rowwise_adagrad", "")):
            alone = what if what == "forward" else f"{what} grouped"
            rows.append(
                [
                    _head(case),
                    what,
                    f"{_median(case, what) * 1e6:.1f}",
                    f"{case['of_copy'][what]:.2f}",
                    f"{case['of_copy'][alone]:.2f}",
                    _shown(_median(case, torch_name) / _median(case, what)),
                    _shown(_over(case, "cuda", what)),
                    _shown(_over(case, "fbgemm", what)),
                ]
            )
        rows.append([_head(case), "group ids", f"{_median(case, 'group') * 1e6:.1f}", "", "", "", "", ""])
    return Table(
        title=f"{config['tables']} tables of {config['rows']:,} rows in device memory, {config['pooling_factor']} ids "
        "a bag",
        columns=[
            "dim, batch, ids", "kernel", "device us", "of copy rate", "grouped", "x torch", "x our CUDA C++",
            "x FBGEMM",
        ],
        rows=rows,
    )  # fmt: skip


def _wall_table(measured: list[dict[str, Any]]) -> Table:
    """Of whole calls, where launching counts."""
    names = ("forward", *_RULES)
    rows = []
    for case in measured:
        for what in names:
            theirs = ["torch forward", "cuda sgd forward", "fbgemm sgd forward"]
            if what != "forward":
                theirs = ["torch backward" if what == "sgd" else "", f"cuda {what} backward", f"fbgemm {what} backward"]
            walls = [_median(case, name, "wall_s") for name in (what, *theirs)]
            host = _median(case, what, "host_s")
            rows.append([_head(case), what, *(_shown(each * 1e6, ".0f") for each in (host, *walls))])
    return Table(
        title="wall time of a call, us",
        columns=["dim, batch, ids", "kernel", "host", "tierstore", "torch", "our CUDA C++", "FBGEMM"],
        rows=rows,
    )


def _shown(value: float, form: str = ".2f") -> str:
    return "" if value != value else format(value, form)
