"""Are the planner's predictions of training right, and where does the time of published models go that are served?

Parts, each for itself with ``--only``. "unseen" and "known": hit rates and step times of whole models at several
budgets, predicted and measured; unseen ones were chosen before they were run, nothing was fitted to them. "operators"
and a part for each of RMC1 to RMC3 (Gupta et al., HPCA and ISCA 2020) and MLPerf's DLRM-v2: time by operator, and the
highest rate within a bound of latency, by placement of rows.

On few cores run it with OMP_WAIT_POLICY=PASSIVE: else OpenMP's threads spin between two kernels, which is no work that
a planner could know of.
"""

import itertools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist

import tierstore
from tierstore.dist import ShardedTieredEmbeddingBagCollection, data_parallel, open_sharded
from tierstore.dist.placement import RankCosts
from tierstore.dist.placement.measure import measure_ranks
from tierstore.optim.configs import RULES
from tierstore.plan import Host, Prediction, Processor, Setup, SoftwareCosts, TableShape, Workload, accesses_of
from tierstore.plan.demand import Demand, pool_loads
from tierstore.plan.host import LIBRARY_BYTES, load_host
from tierstore.plan.loads import in_words
from tierstore.plan.measure import measure, page_cache
from tierstore.plan.model import predict, processes_bytes
from tierstore.plan.workload import DenseWork, dlrm_work
from tierstore.trace import TableTrace, Trace

from .common import Goal, Part, Report, Run, Table, median_of, start
from .serving.latency import NUM_FIRST, around_highest
from .serving.load import Load, Quantiles, closed_loop, open_loop, poisson
from .serving.queries import QUERY_SIZES, Ranking, encoded_rest
from .serving.rig import ServerProcess
from .serving.shape import kaggle_rows, kaggle_store
from .serving.zoo import MODELS, PART, PLACEMENTS, ZooModel
from .sharded.ranks import run_ranks
from .steps import StepWorkload, fill, jagged, step_of, timed
from .workload import CHUNK, ids_of

_ROWS_FILE: Final = "rows.lmdb"
_DENSE: Final = 13
Found = dict[str, Any]


class Case(NamedTuple):
    """A workload; ``batch``: samples of a rank. ``bottom_mlp``, ``top_mlp``: of a DLRM, of tables alone both empty."""

    name: str
    tables: int
    rows: int
    dim: int
    pooling_factor: int
    exponent: float
    batch: int
    steps: int
    optimizer: Any
    deferred: bool
    ranks: int
    interaction: Literal["dot", "dcn"]
    bottom_mlp: Sequence[int]
    top_mlp: Sequence[int]
    budgets: Sequence[float]

    @property
    def table_names(self) -> list[str]:
        return [f"t{number}" for number in range(self.tables)]

    @property
    def rule(self) -> tierstore.optim.Optimizer:
        return RULES[self.optimizer](lr=0.01)

    @property
    def layers(self) -> Found:
        """Of ``models.DLRM``."""
        own = {"bottom_mlp": self.bottom_mlp, "top_mlp": self.top_mlp, "interaction": self.interaction}
        return own | {"cross_layers": 2, "cross_rank": 32}

    @property
    def dense(self) -> DenseWork:
        if not self.top_mlp:
            return DenseWork(0.0, 0.0, 0.0)
        return dlrm_work([self.dim] * self.tables, num_dense=_DENSE, **self.layers)

    def drawn(self, seed: int) -> list[Any]:
        """int64 [steps, ids of all ranks] of each table."""
        generator, size = np.random.default_rng(seed), self.ranks * self.batch * self.pooling_factor
        count = self.steps * size
        return [ids_of(generator, self.rows, count, self.exponent).reshape(-1, size) for _ in range(self.tables)]

    def batches(self, seed: int, rank: int) -> StepWorkload:
        """Of one rank."""
        size, drawn = self.batch * self.pooling_factor, self.drawn(seed)
        own = slice(rank * size, (rank + 1) * size)
        batches = [jagged([each[step, own] for each in drawn], self.pooling_factor) for step in range(self.steps)]
        return StepWorkload(self.name, [self.rows] * self.tables, self.dim, batches, is_model=bool(self.top_mlp))

    def step(self, store: Any, module: Any, own: StepWorkload, wrapped: Any = None) -> Callable[[Any], None]:
        rules = [store.optimizer()] if self.deferred else []
        return step_of(module, own, rules=rules, wrapped=wrapped, **self.layers)


class Measured(NamedTuple):
    """Means of a run with one budget over the steps that counted; ``sent_bytes``: a step, of a rank, None of one."""

    hit_rate: float
    step_s: float
    rows_moved: float
    sent_bytes: float | None = None


def _measured(store: tierstore.Store, module: Any, step: Callable[[Any], None], batches: Any, depth: int) -> Measured:
    """Train on the first half of the batches; means over the second. What the first half wrote is on its way to the
    device when the second begins, and what the second wrote when it ends: as at any moment of a long run."""
    half = len(batches) // 2
    list(timed(module, step, batches[:half], depth))
    began, start = store.stats(), time.perf_counter()
    steps = len(list(timed(module, step, batches[half:], depth)))
    seconds, ended = time.perf_counter() - start, store.stats()
    hits, unique = ended.ddr.hits - began.ddr.hits, ended.ddr.unique - began.ddr.unique
    return Measured(hits / max(unique, 1), seconds / steps, (ended.ssd.rows_moved - began.ssd.rows_moved) / steps)


def _in_rank(fields: Found, budgets: list[int], path: Path, config: Found) -> tuple[RankCosts, list[Measured]]:
    case = Case(**fields)
    own = case.batches(config["seed"], dist.get_rank())
    costs, runs = measure_ranks(optimizer=case.optimizer, seconds=config["rank_seconds"]), []
    with open_sharded(path, ddr="256MiB", threads=1) as store:
        for name in case.table_names:
            table = tierstore.TableConfig(
                name=name, feature_names=(f"f{name[1:]}",), num_embeddings=case.rows, embedding_dim=case.dim,
                pooling="sum", optimizer=case.rule,
            )  # fmt: skip
            owned = store.create_table(table, sharding_type="row_wise", ranks=range(case.ranks)).local
            for ids in torch.split(torch.arange(owned.rows.start, owned.rows.stop), CHUNK):
                owned.write(ids, torch.full((len(ids), case.dim), 0.01))
        store.commit()
    for budget in budgets:
        with open_sharded(path, ddr=budget // case.ranks, policy=config["policy"], threads=1) as store:
            page_cache.warm(store.local.directory / _ROWS_FILE)
            module = ShardedTieredEmbeddingBagCollection(store)
            step = case.step(store, module, own, data_parallel)
            before = store.ranks.traffic.bytes_sent
            found = _measured(store.local, module, step, own.batches, config["depth"])
            sent = (store.ranks.traffic.bytes_sent - before) / len(own.batches)
            runs.append(found._replace(sent_bytes=sent))
    return costs, runs


class _Subject:
    """A workload over its store, in this process or in ranks, to be run again and again."""

    def __init__(self, case: Case, path: Path, config: Found) -> None:
        self.case, self._path, self._config, self._own = case, path, config, case.batches(config["seed"], 0)
        if case.ranks == 1:
            fill(path, self._own, case.rule)
        shape = {"num_embeddings": case.rows, "embedding_dim": case.dim, "pooling_factor": float(case.pooling_factor)}
        self.shape = Workload(
            name=case.name,
            tables=tuple(TableShape(name=name, exponent=case.exponent, **shape) for name in case.table_names),  # type: ignore[arg-type]
            batch_samples=case.batch * case.ranks,
            optimizer=case.optimizer,
            **case.dense._asdict(),
        )
        bags = case.steps * case.ranks * case.batch
        offsets = np.arange(0, bags * case.pooling_factor + 1, case.pooling_factor)
        drawn = zip(case.table_names, case.drawn(config["seed"]), strict=True)
        tables = {name: TableTrace(ids.reshape(-1), offsets) for name, ids in drawn}
        accesses = accesses_of(Trace(tables=tables, batch_samples=case.ranks * case.batch))
        # The curve is of the batches that are measured, the cache being warm from those before.
        self._demand = Demand.from_accesses(self.shape, accesses, config["policy"], skip=case.steps // 2)

    def round(self, host: Host) -> list[tuple[Measured, Prediction]]:
        """A run of each budget, in bytes of all ranks, and what is predicted of it."""
        case, rank_costs = self.case, None
        budgets = [int(self.shape.table_bytes * percent / 100) for percent in case.budgets]
        if case.ranks == 1:
            measured = [self._alone(budget) for budget in budgets]
        else:
            shutil.rmtree(self._path, ignore_errors=True)
            of_ranks = run_ranks(_in_rank, case.ranks, case._asdict(), budgets, self._path, self._config)
            runs, rank_costs = zip(*(runs for _, runs in of_ranks), strict=True), of_ranks[0][0]
            measured = [Measured(*map(statistics.mean, zip(*of_budget, strict=True))) for of_budget in runs]
        both = zip(budgets, measured, strict=True)
        return [(each, self._predicted(host, rank_costs, budget, each.rows_moved)) for budget, each in both]

    def _alone(self, budget: int) -> Measured:
        case, config = self.case, self._config
        page_cache.warm(self._path / _ROWS_FILE)
        settings: Found = {"ddr": budget, "policy": config["policy"], "threads": config["threads"]}
        with tierstore.open(self._path, mode="w", **settings) as store:
            module = tierstore.TieredEmbeddingBagCollection(store)
            step = case.step(store, module, self._own)
            return _measured(store, module, step, self._own.batches, config["depth"])

    def _predicted(self, host: Host, rank_costs: RankCosts | None, budget: int, rows_moved: float) -> Prediction:
        """With as much cleaning as was measured: a run is too short for it to be steady."""
        config, shape = self._config, self.shape
        fields: Found = {
            "workload": shape, "host": host, "ddr_bytes": budget, "page_cache_bytes": config["page_cache_gib"] * 2**30,
            "policy": config["policy"], "prefetch_depth": config["depth"], "threads": config["threads"],
            "rank_costs": rank_costs,
        }  # fmt: skip
        steady = sum(pool.rows_moved for pool in pool_loads(Setup(**fields).of_a_rank, self._demand))
        return predict(Setup(**fields, cleaning=rows_moved / steady if steady else 0.0), self._demand)


def _hit_rate(prediction: Prediction) -> float:
    """Of host memory."""
    return next(tier.hit_rate for tier in prediction.tiers if tier.tier == "ddr")


def _measure(request: Run, _: Found, *, key: str) -> Found:
    config = request.config
    folder = request.folder / f"plan_{key}"
    folder.mkdir(parents=True, exist_ok=True)
    cases = [Case(**(fields | config["changes"])) for fields in config[key]]
    subjects = [_Subject(case, folder / f"{number}", config) for number, case in enumerate(cases)]
    rounds: list[list[list[tuple[Measured, Prediction]]]] = []
    hosts: list[dict[str, float]] = []
    for _round in range(config[f"{key}_rounds"]):
        # Before each round, as others use the machine too.
        host = measure(request.folder, seconds=config["machine_seconds"])
        hosts.append({"flops": host.processor.flops, **vars(host.costs)})
        rounds.append([subject.round(host) for subject in subjects])
    shutil.rmtree(folder)
    points = []
    for subject, of_subject in zip(subjects, zip(*rounds, strict=True), strict=True):
        of_budgets = zip(subject.case.budgets, zip(*of_subject, strict=True), strict=True)
        points += [_point(subject, percent, of_rounds) for percent, of_rounds in of_budgets]
    return {"points": points, "cases": [case._asdict() for case in cases], "hosts": hosts}


def _point(subject: _Subject, percent: float, of_rounds: Sequence[tuple[Measured, Prediction]]) -> Found:
    """Medians of the rounds, of what was measured and of what was predicted."""
    measured = sorted((each for each, _ in of_rounds), key=lambda each: each.step_s)[len(of_rounds) // 2]
    found = sorted((each for _, each in of_rounds), key=lambda each: each.step_s)[len(of_rounds) // 2]
    loads = {load.resource: load for load in found.loads}
    ring = 2 * (subject.case.ranks - 1) / subject.case.ranks * subject.shape.dense_flops / 2 * 4
    return {
        "workload": subject.case.name,
        "budget_percent": percent,
        **measured._asdict(),
        "predicted_hit_rate": _hit_rate(found),
        "predicted_step_s": found.step_s,
        "predicted_sent_bytes": loads["network"].amount - ring + loads["id exchange"].amount,
        "bottleneck": found.bottleneck,
        "loads": {name: load.seconds for name, load in loads.items()},
    }


def _tell(figures: Found, *, key: str, title: str, note: str) -> Report:
    rows, hits, times = [], list[float](), list[float]()
    for each in figures["points"]:
        sent, error = each["sent_bytes"], each["predicted_step_s"] / each["step_s"] - 1
        hits.append(100 * abs(each["predicted_hit_rate"] - each["hit_rate"]))
        times.append(100 * abs(error))
        rows.append(
            [
                each["workload"], f"{each['budget_percent']:g} %", f"{each['hit_rate']:.2%}",
                f"{each['predicted_hit_rate']:.2%}", f"{1e3 * each['step_s']:.1f}",
                f"{1e3 * each['predicted_step_s']:.1f}", f"{error:+.0%}", in_words(each["bottleneck"]),
                "" if sent is None else f"{sent / 2**20:.2f}, {each['predicted_sent_bytes'] / 2**20:.2f}",
            ]
        )  # fmt: skip
    columns = [
        "workload", "DDR", "hits measured", "predicted", "step ms measured", "predicted", "off", "bottleneck",
        "MiB a rank sends for tables, measured and predicted",
    ]  # fmt: skip
    wanted = (("points the predicted hit rate is off", hits, 1), ("% the predicted step time is off", times, 15))
    mean = [(f"{key}: {what}, on average", round(statistics.mean(off), 3), most) for what, off, most in wanted]
    goals = [Goal(name, value, at_most=most) for name, value, most in mean]
    return Report([Table(title, columns, rows)], goals, [note])


def _requests(model: ZooModel, sizes: list[int]) -> list[bytes]:
    """To be asked over and over."""
    sample_bytes = 8 * model.sample_ids + 4 * model.shape["num_dense"]
    fitting = int(model.config["pool_mib"] * 2**20 // (sample_bytes * statistics.mean(sizes)))
    repeated = sizes * max(1, min(fitting, 2000) // len(sizes))
    drawn = np.random.default_rng(model.config["seed"]).permutation(repeated).tolist()
    return [encoded_rest(each) for each in model.queries(drawn, seed=1)]


def _bounded(server: ServerProcess, pool: list[bytes], config: Found) -> Found:
    """By bound the most queries/s whose p95 is within it, 0 if a query alone takes longer."""
    generator, requests = np.random.default_rng(config["seed"]), itertools.cycle(pool)

    def closed(at_once: int) -> Load:
        return closed_loop(server.client("rest", at_once), pool, at_once=at_once, seconds=config["seconds"])

    closed(8)  # what comes first is slower
    alone, load = Quantiles.of(closed(1).since(0)).p95, closed(8)
    bounds, first = {f"{each:g}": each for each in config["bounds_ms"]}, 0.7 * len(load.since(0)) / load.seconds
    steps: dict[str, list[dict[str, float]]] = {name: [] for name, bound in bounds.items() if alone <= bound}

    def measure(rates: Mapping[str, float]) -> dict[str, float]:
        excess = {}
        for name, rate in rates.items():
            intended = poisson(generator, rate, config["lead_seconds"] + config["seconds"])
            client, before = server.client("rest", config["connections"]), server.used()
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


def _measure_served(request: Run, _: Found, *, part: str) -> Found:
    config, found, model = request.config, dict[str, Found](), ZooModel(request, part)
    sizes = [each // config["query_divisor"] for each in QUERY_SIZES]
    pool, samples = _requests(model, sizes), statistics.mean(sizes)
    for placement in PLACEMENTS:
        with model.server(placement) as server:
            own = found[placement] = _bounded(server, pool, config) | {"samples": samples}
            own |= {name.lower(): _memory_bytes(server.process.pid, name) for name in ("Anonymous", "Pss")}
    return {"model": model.name, "cases": found}


def _memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def _tell_served(figures: Found, *, part: str) -> Report:
    what = "placement of rows"
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
    return Report([table], notes=[_NOTE] if part == MODELS[-1] else [])


def _loaded(server: ServerProcess, queries: list[bytes], at_once: int, seconds: float) -> Found:
    """As many queries as it answers: a second, seconds of its processes' time that each takes, and their own memory."""
    parent = psutil.Process(server.process.pid)
    processes = [parent, *parent.children(recursive=True)]

    def cpu() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    def load(seconds: float) -> Load:
        return closed_loop(server.client("rest", at_once), queries, at_once=at_once, seconds=seconds)

    load(seconds)
    before, found = cpu(), load(seconds)
    answered = len(found.since(0))
    return {
        "rate": answered / found.seconds,
        "cpu_s": (cpu() - before) / answered,
        "memory": sum(_memory_bytes(each.pid, "Anonymous") for each in processes),
    }


def _measure_workers(request: Run, figures: Found) -> Found:
    """By the medians of what part "unseen" measured of this machine; what it did not say of it is of an example."""
    config, own, points = request.config, request.config["workers_model"], []
    rounds = figures["unseen"]["hosts"] if "unseen" in figures else [{"flops": 1e11, **vars(SoftwareCosts())}]
    costs = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    processor = Processor(cores=2, flops=costs.pop("flops"))
    host = replace(load_host("cloud-16-cores"), processor=processor, costs=SoftwareCosts(**costs))
    store, generator = kaggle_store(request.folder, own), np.random.default_rng(1)
    rows, ddr = kaggle_rows(own), own["ddr_mib"] << 20
    layers: Found = {"bottom_mlp": own["bottom_mlp"], "top_mlp": own["top_mlp"], "interaction": "dot"}
    dense = dlrm_work([own["dim"]] * len(rows), num_dense=_DENSE, cross_layers=0, cross_rank=0, **layers)
    shapes = [
        TableShape(name=f"t{number}", num_embeddings=each, embedding_dim=own["dim"]) for number, each in enumerate(rows)
    ]
    for samples, workers in itertools.product(own["samples"], own["workers"]):
        at_once = own["at_once"]
        drawn = Ranking(rows, 1.05).draw(generator, own["queries"], sizes=[samples] * own["queries"])
        first = 20_000 + 8 * (os.getpid() % 1000)  # of several workers ports are next to each other
        ports = [f"--{name}={first + step}" for step, name in enumerate(("port", "grpc-port", "admin-port"))]
        flags = ["--workers", str(workers), "--warm-up", "none", *ports]
        with ServerProcess(store, ddr, log=request.folder / "serve.log", flags=flags) as server:
            found = _loaded(
                server, [encoded_rest(each) for each in drawn], workers * at_once, config["workers_seconds"]
            )
        shape = Workload(name="kaggle", tables=tuple(shapes), batch_samples=samples, **dense._asdict())
        setup = Setup(
            workload=shape, host=host, ddr_bytes=ddr, page_cache_bytes=8 << 30, workers=workers, threads=1,
            policy="auto", batch_samples_max=samples * at_once,
        )  # fmt: skip
        demand = Demand.analytic(shape, "auto")
        predicted = predict(setup, demand)
        found |= {"predicted_cpu_s": workers * samples / predicted.samples_per_s, "bottleneck": predicted.bottleneck}
        found["predicted_memory"] = ddr + processes_bytes(setup, demand) - LIBRARY_BYTES
        points.append(found | {"samples": samples, "workers": workers})
    return {"points": points}


def _tell_workers(figures: Found) -> Report:
    rows, off = [], {"memory": list[float](), "throughput": list[float]()}
    for each in figures["points"]:
        off["memory"].append(each["predicted_memory"] / each["memory"] - 1)
        off["throughput"].append(each["cpu_s"] / each["predicted_cpu_s"] - 1)
        rows.append(
            [
                f"{each['samples']}", f"{each['workers']}", f"{each['rate']:,.0f}", f"{1 / each['cpu_s']:,.0f}",
                f"{1 / each['predicted_cpu_s']:,.0f}", f"{off['throughput'][-1]:+.0%}",
                f"{each['memory'] / 2**20:,.0f}", f"{each['predicted_memory'] / 2**20:,.0f}",
                f"{off['memory'][-1]:+.0%}", in_words(each["bottleneck"]),
            ]
        )  # fmt: skip
    columns = [
        "samples of a query", "workers", "queries/s", "a core used", "predicted", "off", "memory, MiB", "predicted",
        "off", "bottleneck",
    ]  # fmt: skip
    goals = [
        Goal(f"workers: {key} predicted, the most that one is off", round(max(map(abs, values)), 3), at_most=most)
        for (key, values), most in zip(off.items(), (0.1, 0.2), strict=True)
    ]
    note = (
        "Workers: the DLRM of the serve benchmark at a tenth of Kaggle's rows, over REST, in a closed loop of 16 "
        "queries a worker. Generator, server and others share the cores, so what is predicted is how many queries a "
        "second of a core's time answers, by the costs that the unseen workloads are predicted with; the times of a "
        "request and of a batch were fitted to this model. Memory is the processes' own; files of libraries, which "
        "they share, are up to 0.5 GiB more."
    )
    return Report([Table("servers of several workers, predicted", columns, rows)], goals, [note])


_NOTE: Final = (
    "Throughput: one query a request, over REST, at the times of a Poisson process; latency counts from the time "
    "that a query was due. Queries have a tenth of the candidates of MLPerf Inference's DLRM, 10 to 70, as two "
    "cores answer in place of a host's dozens. The rate is the median of those that a stochastic approximation "
    "visits where p95 meets its bound; 0: a query alone takes longer. Generator and server share the cores. A "
    "server begins with the rows that are looked up most often in memory. A tenth: of the tables' bytes as budget; "
    "the file of rows is in the page cache. Queries of more than 32,768 ids, most of rmc2's, run by themselves, so "
    "that no batch joins them."
)


def _trained(key: str, title: str, note: str) -> Part:
    return Part(partial(_measure, key=key), partial(_tell, key=key, title=title, note=note))


PARTS: Final[dict[str, Part]] = {
    "known": _trained(
        "known", "whole models that were looked at",
        "Known: these were the unseen workloads before; dense layers, ranks and threads are modelled since.",
    ),
    "unseen": _trained(
        "unseen", "workloads that nothing was fitted to",
        "Unseen: the workloads were fixed before they were first run, and bench/plan.toml has them.",
    ),
    "workers": Part(_measure_workers, _tell_workers),
    "operators": PART,
    **{name: Part(partial(_measure_served, part=name), partial(_tell_served, part=name)) for name in MODELS},
}  # fmt: skip

if __name__ == "__main__":
    start("plan")
