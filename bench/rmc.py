"""Where does the time of recommendation models go, and how many queries does a server of them carry within bounds?

RMC1 to RMC3 (Gupta et al., "The Architectural Implications of Facebook's DNN-based Personalized Recommendation", HPCA
2020; "DeepRecSys", ISCA 2020) and MLPerf's DLRM-v2, by those papers' measures. Parts, each for itself with ``--only``:
"operators" (time by operator), one of each model (latency-bounded throughput by placement of rows), "batching" (by the
limit of a batch), "colocated" (by models in one server). The figures of parts that are not run again stay.
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

from tierstore.serve.models.jagged import JaggedIds

from .child import HOST
from .common import Part, Report, Run, Table, Told, program, run_parts
from .serving import operators
from .serving.clients import RestClient
from .serving.load import Load, Quantiles, Stream, closed_loop, open_loop, poisson
from .serving.queries import QUERY_SIZES, encoded_rest
from .serving.rig import HitRate
from .serving.search import NUM_FIRST, by_turns, highest_load, search
from .serving.server import ServerProcess
from .serving.zoo import IN_MEMORY, MODELS, PLACEMENTS, ZooModel

__all__ = ["PARTS", "run"]

Config = Mapping[str, Any]
Found = dict[str, Any]


class Case(NamedTuple):
    """A server, and the queries that it is asked. ``limit``: queries of one candidate that form a batch; 0: queries of
    many, and batches as by default."""

    name: str
    placement: str = IN_MEMORY
    models: int = 1
    limit: int = 0


class _Requests:
    """Made beforehand, and asked over and over; several stores by turns, so that each has the same load."""

    def __init__(self, model: ZooModel, case: Case, stores: list[str]) -> None:
        config = self._config = model.config
        sizes = [1] if case.limit else [each // config["query_divisor"] for each in QUERY_SIZES]
        self.mean_size = statistics.mean(sizes)
        query_bytes = (8 * model.sample_ids + 4 * model.shape["num_dense"]) * self.mean_size * len(stores)
        fitting = min(config["pool_mib"] * 2**20 // query_bytes, 2000) // len(sizes)
        self._generator = np.random.default_rng(config["seed"])
        drawn = self._generator.permutation(sizes * max(1, int(fitting))).tolist()
        names = stores if len(stores) > 1 else [""]
        queries = [model.queries(drawn, seed=seed, store_name=name) for seed, name in enumerate(names, 1)]
        self._pool = [encoded_rest(each) for turn in zip(*queries, strict=True) for each in turn]
        self._next: Iterator[bytes] = itertools.cycle(self._pool)

    def open_loop(self, server: ServerProcess, rate: float) -> Load:
        intended = poisson(self._generator, rate, self._config["lead_seconds"] + self._config["seconds"])
        client = RestClient(HOST, server.rest_port, self._config["connections"])
        return open_loop([Stream(client, list(itertools.islice(self._next, len(intended))), intended)])[0]

    def closed_loop(self, server: ServerProcess, at_once: int) -> Load:
        client = RestClient(HOST, server.rest_port, at_once)
        return closed_loop(client, self._pool, at_once=at_once, seconds=self._config["seconds"])


def _bounded(server: ServerProcess, requests: _Requests, config: Config) -> Found:
    """By bound the most queries/s whose p95 is within it, 0 if a query alone takes longer."""
    requests.closed_loop(server, 8)  # what comes first is slower
    alone = Quantiles.of(requests.closed_loop(server, 1).since(0)).p95
    load = requests.closed_loop(server, 8)
    bounds, first = {f"{each:g}": each for each in config["bounds_ms"]}, 0.7 * len(load.since(0)) / load.seconds
    steps: dict[str, list[dict[str, float]]] = {name: [] for name, bound in bounds.items() if alone <= bound}

    def step(name: str, rate: float) -> float:
        cpu, hits = server.cpu_seconds(), HitRate.of(server)
        load = requests.open_loop(server, rate)
        asked = HitRate.of(server).minus(hits)
        p95, cores = Quantiles.of(load.since(config["lead_seconds"])).p95, (server.cpu_seconds() - cpu) / load.seconds
        steps[name].append({"p95": p95, "server_cores": cores, "hit_rate": asked.hits / max(1, asked.unique)})
        return float("inf") if load.num_failed else p95 / bounds[name]

    searches = {name: search(first, 3 * first, steps=config["steps"]) for name in steps}
    visited = by_turns(searches, lambda rates: {name: step(name, rate) for name, rate in rates.items()})
    found = {name: {"rate": 0.0, "server_cores": 0.0, "hit_rate": 0.0} for name in bounds}
    for name, own in steps.items():
        near = own[min(NUM_FIRST, len(own) - 1) :]
        found[name] = {key: statistics.median(each[key] for each in near) for key in near[0]}
        found[name]["rate"] = highest_load(visited[name])
    return {"alone_p95": alone, "samples": requests.mean_size, "bounds": found}


def _measure(request: Run, _: Found, *, name: str, cases: Callable[[Config], list[Case]]) -> Found:
    config, found, requests = request.config, {}, dict[tuple[int, bool], _Requests]()
    model = ZooModel(request, config.get(name, name))
    counted = JaggedIds(np.zeros(model.sample_ids), np.zeros((len(model.tables), 1))).num_samples
    for case in cases(config):
        stores, key = [f"s{number}" for number in range(case.models)], (case.models, bool(case.limit))
        requests = requests if key in requests else {key: _Requests(model, case, stores)}
        flags = ("--max-batch-samples", str(case.limit * counted)) if case.limit else ()
        with model.server(case.placement, *flags, stores=stores) as server:
            process = psutil.Process(server.process.pid)
            own = found[case.name] = _bounded(server, requests[key], config)
            own |= {"anonymous": server.memory().anonymous, "pss": process.memory_full_info().pss}
        rates = ", ".join(f"{each['rate']:.0f}/s in {bound} ms" for bound, each in own["bounds"].items())
        print(f"  {case.name}: {rates}", flush=True)
    return {"model": model.name, "cases": found}


def _tell(figures: Found, *, what: str, note: str) -> Told:
    rows, widest = [], {name: list(own["bounds"].values())[-1] for name, own in figures["cases"].items()}
    one = next(iter(widest.values()))["rate"] or float("nan")
    for name, own in figures["cases"].items():
        shown = [f"{each['rate'] * times:,.0f}" for each in own["bounds"].values() for times in (1, own["samples"])]
        last, memory = widest[name], [f"{own[kind] / 2**20:,.0f}" for kind in ("pss", "anonymous")]
        used = [f"{last['rate'] / one:.2f}", f"{last['hit_rate']:.1%}", f"{last['server_cores']:.2f}"]
        rows.append([name, f"{own['alone_p95']:.1f}", *shown, *(used if last["rate"] else ["-"] * len(used)), *memory])
    headers = [f"{each} in {bound} ms" for bound in own["bounds"] for each in ("queries/s", "candidates/s")]
    columns = [what, "p95 alone, ms", *headers, "of the first", "hits", "server cores", "PSS, MiB", "anonymous, MiB"]
    table = Table(title=f"{figures['model']}: latency-bounded throughput by {what}", columns=columns, rows=rows)
    gains = {name: own["rate"] / one for name, own in widest.items() if not name.endswith(PLACEMENTS[1:])}
    best, last = max(gains, key=lambda name: gains[name]), list(gains)[-1]
    told = note.format(best=best, gain=gains[best], last=last, last_gain=gains[last])
    return Told(tables=[table], notes=[told] if note else [])


_NOTE: Final = (
    "Throughput: one query a request, over REST, at the times of a Poisson process; latency counts from the time that "
    "a query was due. Queries have a tenth of the candidates of MLPerf Inference's DLRM, 10 to 70, as two cores answer "
    "in place of a host's dozens. The rate is the median of those that a stochastic approximation visits where p95 "
    "meets its bound; 0: a query alone takes longer. Generator and server share the cores. A server begins with the "
    "rows that are looked up most often in memory. A tenth: of the tables' bytes as budget; the file of rows is in the "
    "page cache. Queries of more than 32,768 ids, most of rmc2's, run by themselves, so that no batch joins them."
)
_BATCHING: Final = (
    "Batching: queries of one candidate, each a request; --max-batch-samples is the limit. In the papers larger "
    "batches carry more within a bound. Here {best} carry most, {gain:.2f} times what one by one does; {last} "
    "{last_gain:.2f} times."
)
_COLOCATION: Final = (
    "Co-location: each model has its own store, rows, program and thread, and the same share of the load. In the "
    "papers more models carry more, until latency meets its bound. Here {best} carry most, {gain:.2f} times what one "
    "does, and {last} {last_gain:.2f} times."
)


def _part(name: str, what: str, cases: Callable[[Config], list[Case]], note: str = "") -> Part:
    return Part(partial(_measure, name=name, cases=cases), partial(_tell, what=what, note=note))


def _colocated(config: Config) -> list[Case]:
    counts = config["colocated"]
    ends = [Case(f"{n} x {each}", each, n) for each in PLACEMENTS[1:] for n in (counts[0], counts[-1])]
    return [*(Case(f"{n} x {IN_MEMORY}", models=n) for n in counts), *ends]


def _placed(name: str) -> Part:
    note = _NOTE if name == MODELS[-1] else ""
    return _part(name, "placement of rows", lambda _: [Case(each, each) for each in PLACEMENTS], note)


def _limited(config: Config) -> list[Case]:
    return [Case(f"{limit} a batch", limit=limit) for limit in config["batch_limits"]]


PARTS: Final = {
    "operators": operators.PART,
    **{name: _placed(name) for name in MODELS},
    "batching": _part("batch_model", "limit of a batch", _limited, _BATCHING),
    "colocated": _part("colocated_model", "models co-located", _colocated, _COLOCATION),
}


def run(request: Run) -> Report:
    question = "Where does the time of RMC1 to RMC3 and DLRM-v2 go, and what does a server of them carry within bounds?"
    return run_parts(request, question, PARTS)


if __name__ == "__main__":
    sys.exit(program("rmc", run, parts=tuple(PARTS)))
