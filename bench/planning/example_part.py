"""Part "examples": a question on paper. Nothing is run: the planner's answers, with what they assume.

Does it save power to serve from SSD-backed memory?
"""

import statistics
from dataclasses import replace
from typing import Any, Final

from tierstore.plan import Host, Prediction, TableShape, Workload
from tierstore.plan.assumptions import describe_setup
from tierstore.plan.demand import Demand
from tierstore.plan.parts import load_host
from tierstore.plan.prediction import in_words
from tierstore.plan.price import Pricing
from tierstore.plan.search import SearchSpace, Target, search

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


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    return {"power": _power(request.config), "config": request.config}


def _tell(figures: dict[str, Any]) -> Told:
    return Told(tables=[_power_table(figures)], notes=[_NOTE])


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


_NOTE: Final = (
    "Examples: predictions, not runs; docs/planning.md lists what they assume. Power is of the parts as `tierstore "
    "plan parts` lists them, in use, without the building's."
)

PART: Final = Part(_measure, _tell)
