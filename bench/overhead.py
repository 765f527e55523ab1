"""What does tierstore take where tiers gain nothing?

Parts, each for itself with ``--only``: "lookup" (pooled lookups, all rows in memory, beside embedding_bag over a plain
tensor), "train" (fused steps over rows in memory, beside FBGEMM's and torch's), "small" (small steps and lookups of one
id, beside one nn.EmbeddingBag), "whole" (a model's steps, of new ids each, beside the same model's over one
nn.EmbeddingBag), "metrics" (their share of a run), "checks" (checked reads of rows that the page cache has, beside
numpy.take), "first" (the README's example with and without compiled kernels), "ahead" (steps by prefetch depth: whether
fetching ahead pays, and depth="auto" finds out).
"""

import contextlib
import itertools
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import tierstore
from tierstore.metrics import Measures, MetricName, Metrics, evaluate
from tierstore.models import DLRM
from tierstore.plan.measure import page_cache
from tierstore.train import RunConfig, train
from tierstore.train.config import DataSection, StoreSection, TrainSection
from tierstore.train.demo import write_synthetic

from .common import Goal, Part, Report, Run, Table, fresh_folder, measure, per_second, spread, start
from .data import ROOT, examples
from .peers import fbgemm
from .rowdata import Rows, TierReader, build_flat, build_store, open_flat
from .steps import StepWorkload, fill, model_step, step_of, timed, zipf
from .workload import Batches, make_store, read_every_row

OURS: Final = "tierstore"
DEFERRED: Final = "tierstore, backward and then store.optimizer().step()"
CLIPPED: Final = "the same with clip_grad_norm_ between"
FBGEMM: Final = "FBGEMM, table-batched"
TENSOR: Final = "embedding_bag over a tensor"
TORCH: Final = "torch.nn.EmbeddingBag, sparse"
COPY: Final = "copying the bytes of the distinct rows"
ONE_BAG: Final = "one torch.nn.EmbeddingBag(sparse=True)"
TAKE: Final = "numpy.take"
_RULES: Final = {"SGD": "EXACT_SGD", "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD"}
_CHECKED: Final = {f"{OURS}, checked": True, f"{OURS}, unchecked": False}
_FIRST: Final = ("without kernels", "with kernels")
DEPTHS: Final = (0, 2, "auto")
PLACES: Final = ("in memory", "page cached", "cold")
Figures = dict[str, Any]
Actions = dict[str, Callable[[], object]]


# Pooled lookups, all rows in memory


def _measure_lookup(request: Run, _: Figures) -> Figures:
    config, rows, points = request.config["lookup"], request.config["lookup"]["rows"], []
    shape = {"rows": rows, "ddr": config["ddr"], "optimizer": tierstore.optim.SGD(lr=0.1)}
    for dim in config["dims"]:
        with fresh_folder(request.folder / "lookup_store") as path, make_store(path, dim=dim, **shape) as store:
            table = store["t0"]
            weights = table.read(torch.arange(rows))
            theirs = fbgemm.Fbgemm([weights], optimizer="EXACT_SGD", lr=0.1, eps=0.0) if fbgemm.is_there() else None
            for exponent, batch in itertools.product(config["exponents"], config["batches"]):
                batches = Batches(
                    tables=1, rows=rows, batch=batch, pooling_factor=config["pooling_factor"], exponent=exponent,
                    count=config["distinct_batches"], seed=config["seed"],
                )  # fmt: skip
                rates = _lookup_rates(table, weights, theirs, batches, config["repetitions"])
                points.append({"exponent": exponent, "dim": dim, "batch": batch, "lookups_per_s": rates})
    return {"points": points, "config": config}


def _lookup_rates(table: Any, weights: Tensor, theirs: Any, batches: Batches, repetitions: int) -> Figures:
    values, offsets, starts = batches.values, batches.offsets, batches.offsets[:-1]
    lookups: dict[str, Callable[[int], Tensor]] = {
        OURS: lambda index: table.pooled(values[index], offsets),
        TENSOR: lambda index: torch.nn.functional.embedding_bag(values[index], weights, starts, mode="sum"),
    }
    if theirs is not None:
        lookups[FBGEMM] = lambda index: theirs.forward(values[index], offsets)
    for name, lookup in lookups.items():
        if not torch.allclose(lookup(0), lookups[TENSOR](0), rtol=1e-4, atol=1e-5):
            raise RuntimeError(f"{name} finds other sums than torch")
    calls = max(1, 20_000 // batches.lookups)  # of some microseconds: timed by the dozen
    turns = itertools.count()

    def many(lookup: Callable[[int], Tensor]) -> None:
        first = next(turns)
        for step in range(calls):
            lookup((first + step) % batches.count)

    actions: Actions = {name: partial(many, lookup) for name, lookup in lookups.items()}
    seconds = measure(actions, repetitions=repetitions, warm_up=3)
    return {name: per_second(batches.lookups * calls, each) for name, each in seconds.items()}


def _tell_lookup(found: Figures) -> Report:
    config, shares, rates, worst = found["config"], [], [], dict[int, float]()
    largest, names = max(config["batches"]), list(found["points"][0]["lookups_per_s"])
    points = {(each["exponent"], each["dim"], each["batch"]): each["lookups_per_s"] for each in found["points"]}
    for exponent, dim in itertools.product(config["exponents"], config["dims"]):
        own = {batch: points[exponent, dim, batch] for batch in config["batches"]}
        ratios = {batch: each[OURS]["median"] / each[TENSOR]["median"] for batch, each in own.items()}
        worst = {batch: min(ratio, worst.get(batch, ratio)) for batch, ratio in ratios.items()}
        ids = f"Zipf {exponent}" if exponent else "uniform"
        shares.append([ids, str(dim), *(f"{ratio:.2f}" for ratio in ratios.values())])
        rates.append([ids, str(dim), *(f"{own[largest][name]['median'] / 1e6:.1f} M" for name in names)])
    name = "lookups a second over embedding_bag's, {:,} bags a call, the worst of dims and ids"
    goals = [Goal(name.format(batch), round(share, 3), at_least=0.9) for batch, share in worst.items()]
    by_batch = ["ids", "dim", *(f"{batch:,}" for batch in config["batches"])]
    tables = [
        Table("lookups a second over those of embedding_bag, by bags a call", by_batch, shares),
        Table(f"lookups a second, {largest:,} bags a call", ["ids", "dim", *names], rates),
    ]
    note = (
        f"One table of {config['rows']:,} rows in float32, {config['pooling_factor']} ids a bag, "
        f"{config['repetitions']} repetitions in turns; all may use all threads. Both check every "
        "id, the table also whether its row is in memory."
    )
    return Report(tables, goals, [note])


# Fused steps, all rows in memory


class _Contender(NamedTuple):
    """A way to train the tables: a step on the batch of that number, and the weights of each table as they are."""

    step: Callable[[int], object]
    weights: Callable[[], list[Tensor]]


def _ours(
    store: tierstore.Store, batches: Batches, gradient: Tensor, finish: Callable[[Any], object] | None
) -> _Contender:
    """``finish`` is given the optimizer of a step that backward deferred, None where none is."""
    module, optimizer = tierstore.TieredEmbeddingBagCollection(store), store.optimizer() if finish else None
    features = [batches.jagged(index) for index in range(batches.count)]

    def step(index: int) -> None:
        module(features[index]).values().backward(gradient)
        if finish and optimizer:
            finish(optimizer)
            optimizer.step()
            optimizer.zero_grad()

    tables = store.tables.values()
    return _Contender(step, lambda: [table.read(torch.arange(table.config.num_embeddings)) for table in tables])


def _torchs(weights: list[Tensor], rule: str, config: Figures, batches: Batches, gradient: Tensor) -> _Contender:
    """``torch.nn.EmbeddingBag`` for each table, sparse gradients, one of torch's optimizers that take them."""
    made, gradients = torch.nn.EmbeddingBag.from_pretrained, torch.split(gradient, config["dim"], dim=1)
    modules = [made(each.clone(), freeze=False, mode="sum", sparse=True) for each in weights]
    own, lr = [module.weight for module in modules], config["lr"]
    sgd, adagrad = torch.optim.SGD, torch.optim.Adagrad
    optimizer: Any = sgd(own, lr=lr) if rule == "SGD" else adagrad(own, lr=lr, eps=config["eps"])

    def step(index: int) -> None:
        optimizer.zero_grad()
        for table, (module, each) in enumerate(zip(modules, gradients, strict=True)):
            module(*batches.of_table(index, table)).backward(each)
        optimizer.step()

    return _Contender(step, lambda: [weight.detach() for weight in own])


def _measure_train(request: Run, _: Figures) -> Figures:
    config = request.config["train"]
    keys = ("tables", "rows", "batch", "pooling_factor", "exponent", "seed")
    batches = Batches(**{key: config[key] for key in keys}, count=config["batches"])
    distinct = int(np.mean([batches.unique(index) for index in range(batches.count)]))
    return {
        "lookups_per_s": {rule: _train_rates(request, rule, batches, distinct) for rule in _RULES},
        "distinct_rows_a_batch": distinct,
        "threads": len(os.sched_getaffinity(0)),
        "config": config,
    }


def _train_rates(request: Run, rule: str, batches: Batches, distinct: int) -> Figures:
    """Lookups a second of each contender; the peers' weights must be near ours in the end."""
    config, index = request.config["train"], 0
    gradient = torch.randn(config["batch"], config["tables"] * config["dim"], generator=torch.manual_seed(0)) / 100
    adagrad = tierstore.optim.RowWiseAdagrad(lr=config["lr"], eps=config["eps"])
    own_rule = tierstore.optim.SGD(lr=config["lr"]) if rule == "SGD" else adagrad
    # No gradient reaches the bound of what is clipped, as the peers clip none.
    ways: dict[str, Callable[[Any], object] | None] = {
        OURS: None, DEFERRED: lambda _: None, CLIPPED: lambda optimizer: optimizer.clip_grad_norm_(max_norm=1e9)
    }  # fmt: skip
    words = distinct * config["dim"] * 3 // 2
    source, target, contenders = torch.ones(words), torch.empty(words), dict[str, _Contender]()

    def advance() -> None:
        nonlocal index
        index = (index + 1) % batches.count

    actions: Actions = {"next batch": advance, COPY: lambda: target.copy_(source)}
    with contextlib.ExitStack() as stack:
        for number, (way, finish) in enumerate(ways.items()):
            path = stack.enter_context(fresh_folder(request.folder / f"train_store{number}"))
            shape = {key: config[key] for key in ("tables", "rows", "dim", "ddr")}
            store = stack.enter_context(make_store(path, optimizer=own_rule, **shape))
            contenders[way] = _ours(store, batches, gradient, finish)
        first = contenders[OURS].weights()
        contenders[TORCH] = _torchs(first, rule, config, batches, gradient)
        if fbgemm.is_there():
            theirs = fbgemm.Fbgemm(first, optimizer=_RULES[rule], lr=config["lr"], eps=config["eps"])
            contenders[FBGEMM] = _Contender(
                lambda number: theirs.step(batches.values[number], batches.offsets, gradient), lambda: theirs.weights
            )
        for way, each in contenders.items():
            actions[way] = lambda each=each: each.step(index)  # type: ignore[misc]
        seconds = measure(actions, repetitions=config["repetitions"], warm_up=batches.count)
        for way, each in contenders.items():
            # Sums differ in their order. torch's Adagrad keeps an accumulator a column, not a row: another rule.
            is_other = rule != "SGD" and way == TORCH
            pairs = [] if is_other else list(zip(contenders[OURS].weights(), each.weights(), strict=True))
            if not all(float((one - other).abs().max()) < 1e-3 for one, other in pairs):
                raise RuntimeError(f"after the same steps {way} has other weights")
    return {way: per_second(batches.lookups, seconds[way]) for way in (*contenders, COPY)}


def _tell_train(found: Figures) -> Report:
    config, rates, goals, rows = found["config"], found["lookups_per_s"], [], []
    best_torch = max(by_name[TORCH]["median"] for by_name in rates.values())
    for rule, by_name in rates.items():
        own = by_name[OURS]["median"]
        for contender, rate in by_name.items():
            spread = f"{rate['lowest'] / 1e6:.1f} - {rate['highest'] / 1e6:.1f}"
            rows.append([rule, contender, f"{rate['median'] / 1e6:.1f} M", spread, f"{own / rate['median']:.2f}"])
        value = round(own / by_name[DEFERRED]["median"], 3)
        goals.append(Goal(f"{rule}: time of a deferred step over a fused one's", value, at_most=1.3))
        if FBGEMM in by_name:
            value = round(own / by_name[FBGEMM]["median"], 3)
            goals.append(Goal(f"{rule}: lookups a second over FBGEMM's", value, at_least=1.0))
        goals.append(Goal(f"{rule}: over the best of torch.nn.EmbeddingBag", round(own / best_torch, 3), at_least=1.5))
    title = f"training steps over {config['tables']} tables of {config['rows']:,} rows of {config['dim']}"
    columns = ["optimizer", "step by", "lookups/s", "lowest - highest", "tierstore is faster by"]
    lookups = config["tables"] * config["batch"] * config["pooling_factor"]
    note = (
        f"Batches of {config['batch']:,} samples, {config['pooling_factor']} ids a bag, Zipf {config['exponent']}: "
        f"{lookups:,} lookups of {found['distinct_rows_a_batch']:,} distinct rows a step; {config['repetitions']} "
        f"repetitions in turns. Every contender may use all {found['threads']} threads. torch's Adagrad keeps an "
        "accumulator for each column, a heavier rule. The copy is of as many bytes as a step must move at least: each "
        "distinct row read forward, then read and written by the update."
    )
    return Report([Table(title, columns, rows)], goals, [note])


# Small steps, and lookups of one id


def _medians(actions: Actions, repetitions: int) -> Figures:
    found = measure(actions, repetitions=repetitions, warm_up=repetitions // 4)
    return {name: spread(each) for name, each in found.items()}


class _Lookup(NamedTuple):
    """Lookups of one id: the budget of DDR, and whether each is of another row."""

    name: str
    ddr: str
    goal_us: float
    is_of_all: bool = False


_LOOKUPS: Final = (
    _Lookup("TieredEmbeddingBag, all rows in memory", "300% of tables", 25),
    _Lookup("TieredEmbeddingBag, rows may leave, a hit", "20% of tables", 25),
    _Lookup("TieredEmbeddingBag, a miss, pages cached", "1MiB", 80, is_of_all=True),
)


def _measure_small(request: Run, _: Figures) -> Figures:
    config, steps = request.config["small"], {}
    tables, rows, dim, lr = (config[name] for name in ("tables", "rows", "dim", "lr"))
    shape = {"tables": tables, "rows": rows, "dim": dim, "ddr": tables * rows * dim * 16, "value": 0.01}
    names = [f"f{table}" for table in range(tables)]
    with fresh_folder(request.folder / "overhead_store") as path:
        with make_store(path, optimizer=tierstore.optim.Adagrad(lr=lr), **shape) as store:
            module = tierstore.TieredEmbeddingBagCollection(store)
            bag = torch.nn.EmbeddingBag(tables * rows, dim, mode="sum", sparse=True)
            optimizer = torch.optim.Adagrad(bag.parameters(), lr=lr)

            def step_rates(batch: int) -> Figures:
                ids, offsets = torch.randint(rows, (tables * batch,)), torch.arange(tables * batch + 1)
                shift, gradient = torch.arange(tables).repeat_interleave(batch) * rows, torch.ones(batch, tables * dim)

                def ours() -> None:
                    module(tierstore.KeyedJaggedTensor(names, ids, offsets=offsets)).values().backward(gradient)

                def one() -> None:
                    optimizer.zero_grad()
                    pooled = bag(ids + shift, offsets[:-1]).view(tables, batch, dim)
                    pooled.transpose(0, 1).reshape(batch, tables * dim).backward(gradient)
                    optimizer.step()

                return _medians({OURS: ours, ONE_BAG: one}, config["repetitions"])

            steps = {str(batch): step_rates(batch) for batch in config["batches"]}
            store.commit()
        lookups = {each.name: _one_id(path, config, each) for each in _LOOKUPS}
    return {"steps": steps, "lookups": lookups}


def _one_id(path: Path, config: Figures, lookup: _Lookup) -> Figures:
    """Times, and the share of lookups whose row was not in memory."""
    offsets, rows = torch.tensor([0]), torch.arange(config["rows"])
    with tierstore.open(path, ddr=lookup.ddr) as store:
        bag = torch.nn.EmbeddingBag(config["rows"], config["dim"], mode="sum")
        read_every_row(store["t0"])
        page_cache.warm(path / "rows.lmdb")
        given, before = rows[torch.randperm(len(rows))] if lookup.is_of_all else torch.tensor([3]), store.stats().ddr

        def action(called: Callable[[Any, Any], object]) -> Callable[[], object]:
            turns = itertools.cycle(torch.split(given, 1))
            return lambda: called(next(turns), offsets)

        actions = {OURS: action(tierstore.TieredEmbeddingBag(store["t0"])), ONE_BAG: action(bag)}
        with torch.no_grad():
            found = _medians(actions, 20 * config["repetitions"])
        after = store.stats().ddr
        missed = 1 - (after.hits - before.hits) / (after.unique - before.unique)
    return found | {"missed": missed}


def _tell_small(found: Figures) -> Report:
    rows, goals = [], []
    kinds = {f"a step, batch {batch}": each for batch, each in found["steps"].items()}
    for name, each in (kinds | {f"a lookup, {name}": each for name, each in found["lookups"].items()}).items():
        own, other = (1e6 * each[who]["median"] for who in (OURS, ONE_BAG))
        rows.append([name, f"{own:.0f}", f"{other:.0f}", f"{own / other:.2f}"])
    for batch, each in found["steps"].items():
        ratio, most = each[OURS]["median"] / each[ONE_BAG]["median"], 1.0 if int(batch) < 512 else 0.8
        goals.append(Goal(f"time over one bag's: a step, batch {batch}", round(ratio, 3), at_most=most))
    for known in _LOOKUPS:
        own = 1e6 * found["lookups"][known.name][OURS]["median"]
        goals.append(Goal(f"us: a lookup, {known.name}", round(own, 1), at_most=known.goal_us))
    missed = 100 * found["lookups"][_LOOKUPS[-1].name]["missed"]
    table = Table("small steps and lookups of one id", ["", f"{OURS}, us", f"{ONE_BAG}, us", "ratio"], rows)
    return Report([table], goals, [f"Of the lookups that are to miss, {missed:.0f} % do."])


# A whole model's steps


class _OneBag(torch.nn.Module):
    """Tables end to end in one ``nn.EmbeddingBag``, called and answering as a collection."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        self._bag = torch.nn.EmbeddingBag(tables * rows, dim, mode="sum", sparse=True)
        self._firsts = torch.arange(tables) * rows
        self._names, self._dims = [f"t{table}" for table in range(tables)], [dim] * tables

    def forward(self, ids: Tensor) -> tierstore.KeyedTensor:
        pooled = self._bag((ids + self._firsts).view(-1, 1)).view(len(ids), -1)
        return tierstore.KeyedTensor(self._names, self._dims, pooled)


def _whole_step(embeddings: Any, optimizers: list[Any], case: Figures, config: Figures) -> Callable[[], None]:
    """A step of a model over new ids, skewed, which a bag is given as [batch, tables]."""
    tables, batch, generator = case["tables"], case["batch"], torch.Generator()
    model = DLRM(embeddings, num_features=tables, embedding_dim=config["dim"], bottom_mlp=[256], top_mlp=[128, 64])
    dense_rule = torch.optim.Adagrad(model.dense_parameters().values(), lr=config["lr"])
    take, names = model_step(model, [dense_rule, *optimizers]), [f"f{table}" for table in range(tables)]
    lengths = torch.ones(tables * batch, dtype=torch.int64)

    def step() -> None:
        ids: Any = (torch.rand(batch, tables, generator=generator) ** config["skew"] * config["rows"]).long()
        dense, labels = torch.rand(batch, 13), (torch.rand(batch) < 0.25).float()
        if not isinstance(embeddings, _OneBag):
            ids = tierstore.KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=lengths)
        take(ids, dense, labels)

    return step


def _measure_whole(request: Run, _: Figures) -> Figures:
    config, found = request.config["whole"], []
    rows, dim, lr = (config[name] for name in ("rows", "dim", "lr"))
    shape = {"rows": rows, "dim": dim, "ddr": "1GiB", "optimizer": tierstore.optim.Adagrad(lr=lr), "value": 0.01}
    for case in config["cases"]:
        with (
            fresh_folder(request.folder / "whole_store") as path,
            make_store(path, tables=case["tables"], **shape) as store,
        ):
            ours, bag = tierstore.TieredEmbeddingBagCollection(store), _OneBag(case["tables"], rows, dim)
            steps: Actions = {
                OURS: _whole_step(ours, [], case, config),
                ONE_BAG: _whole_step(bag, [torch.optim.Adagrad(bag.parameters(), lr=lr)], case, config),
            }
            found.append(case | {"seconds": _medians(steps, case["repetitions"])})
            store.commit()
    return {"cases": found}


def _tell_whole(found: Figures) -> Report:
    rows, goals = [], []
    for case in found["cases"]:
        own, other = (1e3 * case["seconds"][who]["median"] for who in (OURS, ONE_BAG))
        name = f"{case['tables']} table{'s' * (case['tables'] > 1)}, batch {case['batch']:,}"
        rows.append([name, f"{own:.2f}", f"{other:.2f}", f"{own / other:.2f}"])
        goals.append(Goal(f"time over one bag's: a model's step, {name}", round(own / other, 3), at_most=case["goal"]))
    return Report([Table("a model's steps", ["", f"{OURS}, ms", f"{ONE_BAG}, ms", "ratio"], rows)], goals)


# Metrics of training rows


def _measure_metrics(request: Run, _: Figures) -> Figures:
    config, runs, n, file = request.config["metrics"], Figures(), 100_000, str(request.folder / "m.tsv")
    write_synthetic(file, train_rows=config["rows"], test_rows=1)
    rows = torch.rand(n).round(), torch.randn(n), torch.ones(n), torch.arange(n) % (n // 5)

    def window(batch: int) -> None:
        made = Metrics(Measures(names=get_args(MetricName)), window=n)
        for columns in zip(*(torch.split(each, batch) for each in rows), strict=True):
            made.update(*columns)
        made.compute()

    actions: Actions = {"AUC": partial(evaluate, *rows[:2]), "AUC, scikit-learn": partial(roc_auc_score, *rows[:2])}
    for batch in config["batches"]:
        with fresh_folder(request.folder / "metrics_store") as path:
            steps, store = TrainSection(batch_size=batch), StoreSection(path=str(path), ddr="1GiB")
            begun, name = time.process_time(), f"all five, batch {batch:,}"
            train(RunConfig(data=DataSection(path=file), store=store, train=steps))
        runs[name], actions[name] = 1e6 * (time.process_time() - begun) / config["rows"], partial(window, batch)
    seconds = measure(actions, repetitions=11, warm_up=1, clock=time.process_time)
    return {"runs": runs, "us_a_row": {name: spread([1e6 * own / n for own in each]) for name, each in seconds.items()}}


def _tell_metrics(found: Figures) -> Report:
    took = {name: each["median"] for name, each in found["us_a_row"].items()}
    shares = {name: round(100 * took[name] / run, 3) for name, run in found["runs"].items()}
    rows = [[name, f"{each:.3f}", f"{shares[name]:.2f}" if name in shares else ""] for name, each in took.items()]
    goals = [Goal(f"metrics, % of a run's processor: {name}", share, at_most=1) for name, share in shares.items()]
    return Report([Table("metrics of each window", ["", "us of a processor a row", "% of a run's"], rows)], goals)


# Checks of rows


def _measure_checks(request: Run, _: Figures) -> Figures:
    config, batch = request.config["checks"], request.config["checks"]["batch"]
    rows, generator = Rows.of(config), np.random.default_rng(config["seed"])
    flat_path, store = build_flat(request.folder, rows), build_store(request.folder, rows)
    flat, out = open_flat(flat_path, rows), np.empty((batch, rows.dim), np.float32)
    for path in (flat_path, store / "rows.lmdb"):
        page_cache.warm(path)
    readers = {name: TierReader(store, rows, batch, verify=verify) for name, verify in _CHECKED.items()}
    reads: dict[str, Callable[[Any], object]] = {name: reader.read for name, reader in readers.items()}
    reads[TAKE] = lambda chosen: np.take(flat, chosen, axis=0, out=out, mode="clip")
    for each in np.arange(rows.count).reshape(-1, batch):  # maps every page
        for read in reads.values():
            read(each)
    ids = np.zeros(batch, np.int64)

    def draw() -> None:
        ids[:] = generator.integers(0, rows.count, batch)

    actions: Actions = {"draw": draw} | {name: partial(read, ids) for name, read in reads.items()}
    seconds = measure(actions, repetitions=config["repetitions"])
    for name, reader in readers.items():
        reader.read(ids)
        if not np.array_equal(reader.rows(), flat[ids]):
            raise RuntimeError(f"{name} reads other rows than numpy")
        reader.close()
    return {"ns_a_row": {name: spread([1e9 * each / batch for each in seconds[name]]) for name in reads}}


def _tell_checks(found: Figures) -> Report:
    times = {name: each["median"] for name, each in found["ns_a_row"].items()}
    rows = [[name, f"{each:.0f}", f"{times[TAKE] / each:.2f}"] for name, each in times.items()]
    goals = [
        Goal(f"rows/s of numpy.take's: {name}", round(times[TAKE] / times[name], 3), at_least=least)
        for name, least in zip(_CHECKED, (0.65, 0.9), strict=True)
    ]
    return Report([Table("reads of rows that the page cache has", ["", "ns a row", "of numpy.take"], rows)], goals)


# First use


def _run(command: list[str], work: str, **variables: str) -> float:
    """Seconds of a processor that Python takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    subprocess.run([sys.executable, *command], cwd=work, env=environment, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _measure_first(request: Run, _: Figures) -> Figures:
    example, found = examples("README.md")[0], dict[str, list[float]]()
    for _repetition in range(request.config["first"]["repetitions"]):
        with tempfile.TemporaryDirectory(dir=request.folder) as kernels:
            for name in _FIRST:  # the second finds the first one's kernels
                with tempfile.TemporaryDirectory(dir=request.folder) as work:
                    taken = _run(["-c", example], work, NUMBA_CACHE_DIR=os.path.abspath(kernels))
                    found.setdefault(name, []).append(taken)
    return {name: spread(each) for name, each in found.items()}


def _tell_first(found: Figures) -> Report:
    rows = [[name, f"{found[name]['median']:.1f}"] for name in _FIRST]
    compiled = round(found[_FIRST[0]]["median"] - found[_FIRST[1]]["median"], 2)
    goal = Goal("s of a processor that first use compiles", compiled, at_most=4)
    return Report([Table("the README's example", ["", "s of a processor"], rows)], [goal])


# Rows fetched ahead


def _measure_ahead(request: Run, _: Figures) -> Figures:
    config, points = request.config["ahead"], list[Figures]()
    with fresh_folder(request.folder / "ahead_store") as path:
        for batch, steps in zip(config["batches"], config["steps"], strict=True):
            workload = zipf(config | {"batch": batch}, config["exponent"], steps)._replace(is_model=True)
            fill(path, workload, tierstore.optim.RowWiseAdagrad(lr=config["lr"]))
            for place in PLACES:
                turns = [
                    [_mean_step(path, workload, place, depth) for depth in DEPTHS]
                    for _repetition in range(config["repetitions"])
                ]
                medians = map(statistics.median, zip(*turns, strict=True))
                seconds = {f"depth_{depth}_s": each for depth, each in zip(DEPTHS, medians, strict=True)}
                points.append({"batch": batch, "place": place} | seconds)
    return {"points": points}


def _mean_step(path: Path, workload: StepWorkload, place: str, depth: Any) -> float:
    """Of the steps after the first quarter."""
    ddr = workload.table_bytes * (2 if place == "in memory" else 0.05) + 2**22
    with tierstore.open(path, mode="w", ddr=int(ddr)) as store:
        module = tierstore.TieredEmbeddingBagCollection(store)
        step = step_of(module, workload)
        for table in store.tables.values() if place == "in memory" else ():
            read_every_row(table)
        (page_cache.drop if place == "cold" else page_cache.warm)(path / "rows.lmdb")
        with contextlib.closing(timed(module, step, workload.batches, depth)) as steps:
            seconds = list(steps)
        store.rollback(store.version)
    return statistics.mean(seconds[len(seconds) // 4 :])


def _tell_ahead(found: Figures) -> Report:
    rows, goals = [], []
    for point in found["points"]:
        times = [point[f"depth_{depth}_s"] for depth in DEPTHS]
        ratio, cells = min(times[:2]) / times[2], [f"{1e3 * each:.2f}" for each in times]
        rows.append([f"{point['batch']:,}", point["place"], *cells, f"{times[0] / times[1]:.2f}", f"{ratio:.2f}"])
        name = f"auto over the better of 0 and 2, batch {point['batch']:,}, {point['place']}"
        goals.append(Goal(name, round(ratio, 3), at_least=0.97))
    columns = ["batch", "rows", *(f"depth {depth}, ms" for depth in DEPTHS), "2 over 0", "auto over the better"]
    return Report([Table("steps a second by depth", columns, rows)], goals)


PARTS: Final = {
    "lookup": Part(_measure_lookup, _tell_lookup),
    "train": Part(_measure_train, _tell_train),
    "small": Part(_measure_small, _tell_small),
    "whole": Part(_measure_whole, _tell_whole),
    "metrics": Part(_measure_metrics, _tell_metrics),
    "checks": Part(_measure_checks, _tell_checks),
    "first": Part(_measure_first, _tell_first),
    "ahead": Part(_measure_ahead, _tell_ahead),
}

if __name__ == "__main__":
    start("overhead")
