"""Where does the time of RMC1 to RMC3 and DLRM-v2 go, and what does a server of them carry within bounds?

RMC1 to RMC3 (Gupta et al., "The Architectural Implications of Facebook's DNN-based Personalized Recommendation", HPCA
2020; "DeepRecSys", ISCA 2020) and MLPerf's DLRM-v2, by those papers' measures. Parts, each alone with ``--only``: time
by operator, latency-bounded throughput of each model by placement of rows, by limit of a batch, by models co-located.
"""

import itertools
import statistics
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple

import numpy as np

from tierstore.serve.models.jagged import JaggedIds

from .child import HOST, fields_of
from .common import Part, Report, Run, Table, median_of, start
from .serving.clients import RestClient
from .serving.latency import NUM_FIRST, around_highest
from .serving.load import Load, Quantiles, closed_loop, open_loop, poisson
from .serving.queries import QUERY_SIZES, encoded_rest
from .serving.rig import ServerProcess
from .serving.zoo import IN_MEMORY, MODELS, PART, PLACEMENTS, ZooModel

__all__ = ["PARTS"]

Found = dict[str, Any]


class Case(NamedTuple):
    """A server and its queries. ``limit``: those of one candidate that form a batch; 0: of many, as by default."""

    name: str
    placement: str = IN_MEMORY
    models: int = 1
    limit: int = 0


def _cases(part: str, config: Found) -> list[Case]:
    if part == "batching":
        return [Case(f"{limit} a batch", limit=limit) for limit in config["batch_limits"]]
    if part == "colocated":
        counts = config["colocated"]
        ends = [(each, n) for each in PLACEMENTS[1:] for n in (counts[0], counts[-1])]
        return [Case(f"{n} x {each}", each, n) for each, n in [*((IN_MEMORY, n) for n in counts), *ends]]
    return [Case(each, each) for each in PLACEMENTS]


@lru_cache(1)
def _requests(model: ZooModel, sizes: tuple[int, ...], stores: tuple[str, ...]) -> list[bytes]:
    """To be asked over and over; several stores by turns, so that each has the same load."""
    sample_bytes = 8 * model.sample_ids + 4 * model.shape["num_dense"]
    fitting = int(model.config["pool_mib"] * 2**20 // (sample_bytes * statistics.mean(sizes) * len(stores)))
    generator, times = np.random.default_rng(model.config["seed"]), max(1, min(fitting, 2000) // len(sizes))
    drawn, names = generator.permutation(sizes * times).tolist(), stores if len(stores) > 1 else [""]
    queries = [model.queries(drawn, seed=seed, store_name=name) for seed, name in enumerate(names, 1)]
    return [encoded_rest(each) for turn in zip(*queries, strict=True) for each in turn]


def _bounded(server: ServerProcess, pool: list[bytes], config: Found) -> Found:
    """By bound the most queries/s whose p95 is within it, 0 if a query alone takes longer."""
    generator, requests = np.random.default_rng(config["seed"]), itertools.cycle(pool)

    def closed(at_once: int) -> Load:
        client = RestClient(HOST, server.rest_port, at_once)
        return closed_loop(client, pool, at_once=at_once, seconds=config["seconds"])

    closed(8)  # what comes first is slower
    alone, load = Quantiles.of(closed(1).since(0)).p95, closed(8)
    bounds, first = {f"{each:g}": each for each in config["bounds_ms"]}, 0.7 * len(load.since(0)) / load.seconds
    steps: dict[str, list[dict[str, float]]] = {name: [] for name, bound in bounds.items() if alone <= bound}

    def measure(rates: Mapping[str, float]) -> dict[str, float]:
        excess = {}
        for name, rate in rates.items():
            intended = poisson(generator, rate, config["lead_seconds"] + config["seconds"])
            client, before = RestClient(HOST, server.rest_port, config["connections"]), server.used()
            load = open_loop(client, list(itertools.islice(requests, len(intended))), intended)
            cpu, hits, unique = (server.used() - before).tolist()
            p95 = Quantiles.of(load.since(config["lead_seconds"])).p95
            steps[name].append({"p95": p95, "server_cores": cpu / load.seconds, "hit_rate": hits / max(1, unique)})
            excess[name] = float("inf") if load.num_failed else p95 / bounds[name]
        return excess

    visited = around_highest(steps, first, 3 * first, measure, steps=config["steps"])
    found = {name: {"rate": 0.0, "server_cores": 0.0, "hit_rate": 0.0} for name in bounds}
    for name, own in steps.items():
        found[name] = median_of(own[NUM_FIRST:] or own) | {"rate": statistics.median(visited[name] or [0.0])}
    return {"alone_p95": alone, "bounds": found}


def _measure(request: Run, _: Found, *, part: str) -> Found:
    config, found = request.config, {}
    own_model = {"batching": "batch_model", "colocated": "colocated_model"}.get(part, "")
    model = ZooModel(request, config.get(own_model, part))
    counted = JaggedIds(np.zeros(model.sample_ids), np.zeros((len(model.tables), 1))).num_samples
    for case in _cases(part, config):
        stores = tuple(f"s{number}" for number in range(case.models))
        sizes = (1,) if case.limit else tuple(each // config["query_divisor"] for each in QUERY_SIZES)
        flags, pool = ("--max-batch-samples", str(case.limit * counted)), _requests(model, sizes, stores)
        with model.server(case.placement, *(flags if case.limit else ()), stores=stores) as server:
            own = found[case.name] = _bounded(server, pool, config) | {"samples": statistics.mean(sizes)}
            used = fields_of(f"{server.process.pid}/smaps_rollup")
            own |= {name.lower(): int(used[name].split()[0]) << 10 for name in ("Anonymous", "Pss")}
        rates = ", ".join(f"{each['rate']:.0f}/s in {bound} ms" for bound, each in own["bounds"].items())
        print(f"  {case.name}: {rates}", flush=True)
    return {"model": model.name, "cases": found}


def _tell(figures: Found, *, part: str) -> Report:
    what, note = _WHAT.get(part, "placement of rows"), _NOTES.get(part, "")
    rows, widest = [], {name: list(own["bounds"].values())[-1] for name, own in figures["cases"].items()}
    one = next(iter(widest.values()))["rate"] or float("nan")
    for name, own in figures["cases"].items():
        shown = [f"{each['rate'] * times:,.0f}" for each in own["bounds"].values() for times in (1, own["samples"])]
        last, memory = widest[name], [f"{own[kind] / 2**20:,.0f}" for kind in ("pss", "anonymous")]
        used = [f"{last['rate'] / one:.2f}", f"{last['hit_rate']:.1%}", f"{last['server_cores']:.2f}"]
        rows.append([name, f"{own['alone_p95']:.1f}", *shown, *(used if last["rate"] else ["-"] * len(used)), *memory])
    headers = [f"{each} in {bound} ms" for bound in own["bounds"] for each in ("queries/s", "candidates/s")]
    columns = [what, "p95 alone, ms", *headers, "of the first", "hits", "server cores", "PSS, MiB", "anonymous, MiB"]
    table = Table(f"{figures['model']}: latency-bounded throughput by {what}", columns, rows)
    gains = {name: own["rate"] / one for name, own in widest.items() if not name.endswith(PLACEMENTS[1:])}
    best, last = max(gains, key=lambda name: gains[name]), list(gains)[-1]
    told = [note.format(best=best, gain=gains[best], last=last, last_gain=gains[last])] if note else []
    return Report([table], notes=told)


_WHAT: Final = {"batching": "limit of a batch", "colocated": "models co-located"}
_NOTES: Final = {
    MODELS[-1]: (
        "Throughput: one query a request, over REST, at the times of a Poisson process; latency counts from the time "
        "that a query was due. Queries have a tenth of the candidates of MLPerf Inference's DLRM, 10 to 70, as two "
        "cores answer in place of a host's dozens. The rate is the median of those that a stochastic approximation "
        "visits where p95 meets its bound; 0: a query alone takes longer. Generator and server share the cores. A "
        "server begins with the rows that are looked up most often in memory. A tenth: of the tables' bytes as budget; "
        "the file of rows is in the page cache. Queries of more than 32,768 ids, most of rmc2's, run by themselves, so "
        "that no batch joins them."
    ),
    "batching": (
        "Batching: queries of one candidate, each a request; --max-batch-samples is the limit. In the papers larger "
        "batches carry more within a bound. Here {best} carry most, {gain:.2f} times what one by one does; {last} "
        "{last_gain:.2f} times."
    ),
    "colocated": (
        "Co-location: each model has its own store, rows, program and thread, and the same share of the load. In the "
        "papers more models carry more, until latency meets its bound. Here {best} carry most, {gain:.2f} times what "
        "one does, and {last} {last_gain:.2f} times."
    ),
}
PARTS: Final = {"operators": PART} | {
    name: Part(partial(_measure, part=name), partial(_tell, part=name)) for name in (*MODELS, *_WHAT)
}

if __name__ == "__main__":
    start("rmc")
