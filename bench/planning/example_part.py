"""Part "examples": two questions on paper. Nothing is run: the planner's answers, with what they assume.

Does it save power to serve from SSD-backed memory? And what would it take to train twelve trillion parameters?
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from tierstore.plan import Host, Prediction, Setup, TableShape, Workload
from tierstore.plan.demand import Demand
from tierstore.plan.model import predict
from tierstore.plan.parts import load_host
from tierstore.plan.prediction import in_words
from tierstore.plan.price import Pricing
from tierstore.plan.search import SearchSpace, Target, describe_setup, search, with_parts

from ..common import Run, Table
from ..parts import Part, Told

__all__ = ["PART"]

_SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1.0)
_ROW_SHARE: Final = 0.8
_BOOKS_BYTES: Final = 12
"""Of a row in memory, beside it, and what else a store of all rows in memory takes."""
_POWER_ONLY: Final = Pricing(usd_per_kwh=1.0, pue=1.0)
_MOST_GROUPS: Final = 64


class _Fleet(NamedTuple):
    """Hosts that serve a model: all rows in memory, or in tiers."""

    setup: Setup
    prediction: Prediction
    watts: float


def _model(config: dict[str, Any], model: dict[str, Any]) -> Workload:
    """Users' tables, which are large, and items', which are asked for more."""
    user, item, sizes = config["power_user"], config["power_item"], config["query_sizes"]
    samples = round(statistics.mean(sizes))
    kinds = (
        ("user", user["tables"], model["user_rows"], user["ids_a_query"] / samples),
        ("item", item["tables"], item["rows"], item["pooling_factor"]),
    )
    tables = tuple(
        TableShape(
            name=f"{kind}{number}",
            num_embeddings=int(rows),
            embedding_dim=config["power_dim"],
            pooling_factor=ids,
            exponent=config["exponent"],
        )
        for kind, count, rows, ids in kinds
        for number in range(count)
    )
    return Workload(
        name=model["name"],
        tables=tables,
        batch_samples=samples,
        dtype=config["power_dtype"],
        dense_flops=config["power_dense_flops"],
    )


def _without_price(host: Host) -> Host:
    """So that the cheapest is what takes the least power."""
    return replace(
        host,
        usd=0.0,
        processor=replace(host.processor, usd=0.0),
        ddr=replace(host.ddr, usd=0.0),
        storage=tuple(replace(drive, usd=0.0) for drive in host.storage),
    )


def _in_memory(workload: Workload, demand: Demand, hosts: Sequence[Host], target: Target, sizes: Any) -> _Fleet:
    """The fleet of least power whose memory holds every row; its drives hold the files, and are not read."""
    row_bytes = workload.layout(workload.tables[0]).row_bytes + _BOOKS_BYTES
    whole = row_bytes * sum(table.num_embeddings for table in workload.tables)
    found = []
    for host in hosts:
        still = replace(host, storage=tuple(replace(each, reads_per_s=1, read_latency_us=1e6) for each in host.storage))
        for share in _SHARES:
            group = math.ceil(whole / (_ROW_SHARE * share * host.ddr.capacity_bytes))
            space = SearchSpace(
                memory_shares=(share,),
                row_shares=(_ROW_SHARE,),
                dtypes=(workload.dtype,),
                drives=(1,),
                hosts=tuple(group * count for count in range(1, _MOST_GROUPS + 1)),
            )
            found += list(_tried(workload, demand, still, target, space, sizes))
    return min(found, key=lambda fleet: fleet.watts)


def _tried(
    workload: Workload, demand: Demand, host: Host, target: Target, space: SearchSpace, sizes: Any
) -> Iterator[_Fleet]:
    try:
        best = search(workload, demand, [host], target, space=space, pricing=_POWER_ONLY, query_sizes=sizes).best
    except ValueError:  # no such fleet reaches the target
        return
    yield _Fleet(best.setup, best, best.price.watts)


def _in_tiers(workload: Workload, demand: Demand, hosts: Sequence[Host], target: Target, sizes: Any) -> _Fleet:
    space = SearchSpace(memory_shares=_SHARES, dtypes=(workload.dtype,))
    found = search(workload, demand, hosts, target, space=space, pricing=_POWER_ONLY, query_sizes=sizes).best
    return _Fleet(found.setup, found, found.price.watts)


def _fleet_figures(fleet: _Fleet) -> dict[str, Any]:
    latency = fleet.prediction.latency
    return {
        "setup": describe_setup(fleet.setup),
        "hosts": fleet.setup.num_hosts,
        "ddr_bytes_a_host": fleet.setup.host.ddr.capacity_bytes,
        "drives_a_host": len(fleet.setup.host.storage),
        "watts": fleet.watts,
        "bottleneck": fleet.prediction.bottleneck,
        "p99_s": None if latency is None else latency.p99_s,
        "hit_rate": next(tier.hit_rate for tier in fleet.prediction.tiers if tier.tier == "ddr"),
    }


def _power(config: dict[str, Any]) -> list[dict[str, Any]]:
    hosts = [_without_price(load_host(name)) for name in config["power_hosts"]]
    found = []
    for model in config["power_models"]:
        workload = _model(config, model)
        demand = Demand.analytic(workload)
        target = Target(queries_per_s=config["power_queries_per_s"], p99_s=config["power_p99_ms"] / 1e3)
        sizes = tuple(float(size) for size in config["query_sizes"])
        memory = _in_memory(workload, demand, hosts, target, sizes)
        tiers = _in_tiers(workload, demand, hosts, target, sizes)
        print(f"  {model['name']}: {memory.watts:,.0f} W in memory, {tiers.watts:,.0f} W in tiers", flush=True)
        found.append(
            {
                "model": model,
                "table_bytes": workload.table_bytes,
                "memory": _fleet_figures(memory),
                "tiers": _fleet_figures(tiers),
                "saved": 1 - tiers.watts / memory.watts,
            }
        )
    return found


def _trillions(config: dict[str, Any]) -> dict[str, Any]:
    asked = config["trillions"]
    tables = tuple(
        TableShape(
            name=f"t{number}",
            num_embeddings=asked["rows"],
            embedding_dim=asked["dim"],
            pooling_factor=asked["pooling_factor"],
            exponent=config["exponent"],
        )
        for number in range(asked["tables"])
    )
    workload = Workload(
        name="twelve trillion parameters",
        tables=tables,
        batch_samples=asked["batch"],
        optimizer="rowwise_adagrad",
        dtype="float16",
        dense_flops=asked["dense_flops"],
    )
    host = _share_of(load_host(asked["host"]), asked["stores_a_host"])
    demand = Demand.analytic(workload)
    setup = Setup(
        workload=workload,
        host=host,
        ddr_bytes=asked["ddr_share"] * host.ddr.capacity_bytes,
        hbm_bytes=asked["hbm_share"] * host.accelerators[0].hbm.capacity_bytes,
        page_cache_bytes=asked["page_cache_share"] * host.ddr.capacity_bytes,
        hosts=asked["hosts"] * asked["stores_a_host"],
        threads=host.processor.cores,
    )
    found = predict(setup, demand)
    return {
        "parameters": sum(table.num_embeddings * table.embedding_dim for table in tables),
        "table_bytes": workload.table_bytes,
        "step_s": found.step_s,
        "samples_per_s": found.samples_per_s,
        "bottleneck": found.bottleneck,
        "ids": workload.lookups,
        "distinct_rows": demand.unique,
        "tiers": [tier._asdict() for tier in found.tiers],
        "loads": [load._asdict() for load in found.loads],
        "drive_writes_a_day": found.drive_writes_a_day,
        "watts": found.price.watts,
        "usd": found.price.usd,
    }


def _share_of(host: Host, count: int) -> Host:
    """What each of so many processes has of it."""
    less = with_parts(
        host,
        memory_bytes=host.ddr.capacity_bytes / count,
        drives=len(host.storage) // count,
        accelerators=len(host.accelerators) // count,
    )
    processor = replace(less.processor, cores=less.processor.cores // count)
    less = replace(
        less,
        processor=_divided(processor, count, "flops", "watts", "usd"),
        ddr=_divided(less.ddr, count, "bytes_per_s", "row_bytes_per_s"),
        network=_divided(less.network, count, "bytes_per_s"),
    )
    found: Host = _divided(less, count, "watts", "usd")
    return found


def _divided(part: Any, count: int, *names: str) -> Any:
    return replace(part, **{name: getattr(part, name) / count for name in names})


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    return {"power": _power(request.config), "trillions": _trillions(request.config), "config": request.config}


def _tell(figures: dict[str, Any]) -> Told:
    return Told(tables=[_power_table(figures), _tier_table(figures), _load_table(figures)], notes=[_NOTE])


def _power_table(figures: dict[str, Any]) -> Table:
    rows = []
    for each in figures["power"]:
        for way, name in (("memory", "all rows in memory"), ("tiers", "SSD below memory")):
            fleet = each[way]
            rows.append(
                [
                    f"{each['model']['name']}, {each['table_bytes'] / 1e9:,.0f} GB: {name}", str(fleet["hosts"]),
                    f"{fleet['ddr_bytes_a_host'] / 2**30:,.0f}", str(fleet["drives_a_host"]),
                    f"{fleet['hit_rate']:.1%}", f"{fleet['watts']:,.0f}",
                    f"{each['saved']:.1%}" if way == "tiers" else "", in_words(fleet["bottleneck"]),
                ]
            )  # fmt: skip
    columns = ["model", "hosts", "GiB DDR each", "SSDs each", "hits", "watts", "saved", "bottleneck"]
    return Table(title="power to serve a model at a rate, by the planner", columns=columns, rows=rows)


def _tier_table(figures: dict[str, Any]) -> Table:
    rows = [
        [
            tier["tier"], f"{tier['capacity_bytes'] / 1e12:.2f}", f"{tier['rows'] / 1e9:.2f}",
            f"{tier['lookups'] / 1e6:.1f}", f"{tier['hit_rate']:.1%}",
        ]
        for tier in figures["trillions"]["tiers"]
    ]  # fmt: skip
    columns = ["tier", "TB", "rows, billions", "rows asked for, millions a step", "had"]
    title = "twelve trillion parameters on sixteen hosts of eight GPUs, each with a store of its own: tiers of one"
    return Table(title=title, columns=columns, rows=rows)


def _load_table(figures: dict[str, Any]) -> Table:
    found = figures["trillions"]
    rows = [
        [in_words(load["resource"]), f"{1e3 * load['seconds']:.1f}", f"{load['amount']:,.3g} {load['unit']}"]
        for load in sorted(found["loads"], key=lambda load: -load["seconds"])
        if load["seconds"]
    ]
    title = (
        f"the same: what a step of {1e3 * found['step_s']:.0f} ms keeps busy of what it has "
        f"({found['samples_per_s'] / 1e3:,.0f} thousand samples/s; the bottleneck: {in_words(found['bottleneck'])})"
    )
    return Table(title=title, columns=["resource", "ms", "amount"], rows=rows)


_NOTE: Final = (
    "Examples: predictions, not runs; docs/planning.md lists what they assume. Power is of the parts as `tierstore "
    "plan parts` lists them, in use, without the building's."
)

PART: Final = Part(_measure, _tell)
