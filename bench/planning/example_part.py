"""Part "examples": two questions on paper. Nothing is run: the planner's answers, with what they assume.

Does it save power to serve from SSD-backed memory? And what would it take to train twelve trillion parameters?
"""

import statistics
from dataclasses import replace
from typing import Any, Final

from tierstore.plan import Host, Prediction, Setup, TableShape, Workload
from tierstore.plan.assumptions import describe_setup
from tierstore.plan.demand import Demand
from tierstore.plan.model import predict
from tierstore.plan.parts import load_host
from tierstore.plan.prediction import in_words
from tierstore.plan.price import Pricing
from tierstore.plan.search import SearchSpace, Target, search, with_parts

from ..common import Run, Table
from ..parts import Part, Told

__all__ = ["PART"]

_SHARES: Final = (0.125, 0.25, 0.5, 0.75, 1.0)
_POWER_ONLY: Final = Pricing(usd_per_kwh=1.0, pue=1.0)


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


def _fleet_figures(found: Prediction) -> dict[str, Any]:
    setup, latency = found.setup, found.latency
    return {
        "setup": describe_setup(setup),
        "hosts": setup.num_hosts,
        "ddr_bytes_a_host": setup.host.ddr.capacity_bytes,
        "drives_a_host": len(setup.host.storage),
        "watts": found.price.watts,
        "bottleneck": found.bottleneck,
        "p99_s": None if latency is None else latency.p99_s,
        "hit_rate": next(tier.hit_rate for tier in found.tiers if tier.tier == "ddr"),
    }


def _power(config: dict[str, Any]) -> list[dict[str, Any]]:
    hosts = [_without_price(load_host(name)) for name in config["power_hosts"]]
    found = []
    for model in config["power_models"]:
        workload = _model(config, model)
        demand = Demand.analytic(workload)
        target = Target(queries_per_s=config["power_queries_per_s"], p99_ms=config["power_p99_ms"])
        sizes = tuple(float(size) for size in config["query_sizes"])
        space = SearchSpace(memory_shares=_SHARES, dtypes=(workload.dtype,))
        memory, tiers = (
            search(workload, demand, hosts, target, space=own, pricing=_POWER_ONLY, query_sizes=sizes).best
            for own in (replace(space, in_memory=True), space)
        )
        in_memory, in_tiers = memory.price.watts, tiers.price.watts
        print(f"  {model['name']}: {in_memory:,.0f} W in memory, {in_tiers:,.0f} W in tiers", flush=True)
        found.append(
            {
                "model": model,
                "table_bytes": workload.table_bytes,
                "memory": _fleet_figures(memory),
                "tiers": _fleet_figures(tiers),
                "saved": 1 - in_tiers / in_memory,
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
