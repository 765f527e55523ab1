"""What do fewer bits cost in bytes, time and quality: of rows, of a whole model, of its dense part?

Parts, each for itself with ``--only``: "rows" (one table converted to each dtype: bytes, and pooled lookups beside
torch's operators on the same rows), "quality" (a model trained in float32 and converted, or trained in rows of 16
bits), "search" (a model made small within a bound of its log loss, and scored on later rows), "dense" (the dense part
of models in several ways, each beside float32, in turns).
"""

import contextlib
import copy
import gzip
import mmap
import shutil
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import tierstore
from tierstore.metrics import evaluate
from tierstore.models import DLRM
from tierstore.precision import LAYER, ROWS, quantize_run, size_of
from tierstore.serve.models import Models
from tierstore.serve.models.dense import Dense, lowered, pack_linears
from tierstore.serve.watch import LabelledRows, read_labelled
from tierstore.train import RunConfig
from tierstore.train.build import table_configs

from .common import Goal, Part, Report, Run, Table, fresh_folder, measure, per_second, start
from .data import require_criteo
from .rowdata import Rows
from .runs import DDR, run_config, scored, trained
from .workload import ids_of, read_every_row

DTYPES: Final = ("float32", "float16", "bfloat16", "int8", "int4")
IDS: Final = ("uniform", "Zipf")
_WORSE_MAX: Final = {"float16": 0.0001, "bfloat16": 0.0001, "int8": 0.0001, "int4": 0.001}
_CONVERTED: Final = "converted"
_BASELINE: Final = "float32"
_INT8: Final = "int8 everywhere"
_OWN: Final = "int8, tierstore serve --dense int8"
Figures = dict[str, Any]
Lookup = Callable[[Tensor, Tensor], Tensor]


# Rows: bytes, and pooled lookups


def _measure_rows(request: Run, _: Figures) -> Figures:
    config = request.config["rows"]
    rows = Rows.of(config)
    flat = torch.from_numpy(np.concatenate([chunk for _, chunk in rows.chunks()]) - np.float32(0.5))
    with fresh_folder(request.folder / "precision") as folder:
        paths = {dtype: folder / dtype for dtype in DTYPES}
        made = tierstore.TableConfig(name="item", num_embeddings=rows.count, embedding_dim=rows.dim)
        with tierstore.open(paths["float32"], ddr="256MiB") as store:
            table = store.create_table(made)
            for ids in torch.split(torch.arange(rows.count), 200_000):
                table.write(ids, flat[ids])
            store.commit()
        for dtype in DTYPES[1:]:
            tierstore.quantize(paths["float32"], paths[dtype], dtype=dtype)
        layouts = {dtype: _layout(path) for dtype, path in paths.items()}
        rates = {str(threads): _pooled_rates(paths, config, flat, threads) for threads in config["threads"]}
    return {"layouts": layouts, "pooled_ids_per_s": rates, "config": config}


def _layout(path: Path) -> dict[str, int]:
    with tierstore.open(path, mode="r") as store:
        layout = store["item"].layout
    return {
        "cached_row_bytes": layout.row_bytes,
        "stored_row_bytes": layout.stored_row_words * 8,
        "rows_per_block": layout.rows_per_block,
        "row_file_bytes": (path / "rows.lmdb").stat().st_blocks * 512,
    }


def _torch_lookups(flat: Tensor) -> dict[str, Lookup]:
    """What torch has for the same rows, all of them in memory."""
    own, bag = torch.ops.quantized, torch.nn.functional.embedding_bag
    bytes_, nibbles = own.embedding_bag_byte_prepack(flat), own.embedding_bag_4bit_prepack(flat)
    byte, nibble = own.embedding_bag_byte_rowwise_offsets, own.embedding_bag_4bit_rowwise_offsets
    return {
        "torch float32": lambda ids, offsets: bag(ids, flat, offsets, mode="sum", include_last_offset=True),
        "torch int8": lambda *batch: torch.as_tensor(byte(bytes_, *batch, include_last_offset=True)),
        "torch int4": lambda *batch: torch.as_tensor(nibble(nibbles, *batch, include_last_offset=True)),
    }


def _pooled_rates(paths: dict[str, Path], config: Figures, flat: Tensor, threads: int) -> Figures:
    """Ids a second, by kind of ids and by lookup."""
    torch.set_num_threads(threads)
    lookups, rates = _torch_lookups(flat), {}
    count, rows = config["bags"] * config["pooling_factor"], config["rows"]
    offsets = torch.arange(0, count + 1, config["pooling_factor"])

    def draw(kind: str, seed: int) -> tuple[Tensor, Tensor]:
        exponent = 0.0 if kind == "uniform" else config["zipf"]
        return torch.from_numpy(ids_of(np.random.default_rng((config["seed"], seed)), rows, count, exponent)), offsets

    with contextlib.ExitStack() as stack:
        for dtype in DTYPES:
            store = stack.enter_context(tierstore.open(paths[dtype], mode="r", ddr=DDR, threads=threads))
            read_every_row(store["item"])
            lookups[f"tierstore {dtype}"] = store["item"].pooled
        sums = {name: lookup(*draw("uniform", 0)) for name, lookup in lookups.items()}
        same = [torch.equal(sums[f"tierstore {dtype}"], sums[f"torch {dtype}"]) for dtype in ("int8", "int4")]
        if not all(same) or not torch.allclose(sums["tierstore float32"], sums["torch float32"], atol=1e-4):
            raise RuntimeError("not the sums of torch's operators")
        for kind in IDS:
            # No two lookups in a row are of one batch: the second would find its rows in the processor's caches. An odd
            # number, so that nobody's turn comes back to the same few.
            turns = cycle([draw(kind, seed) for seed in range(13)])
            actions = {name: (lambda lookup=lookup: lookup(*next(turns))) for name, lookup in lookups.items()}  # noqa: B023
            seconds = measure(actions, repetitions=config["repetitions"], warm_up=2)
            rates[kind] = {name: per_second(count, values) for name, values in seconds.items()}
    return rates


def _tell_rows(found: Figures) -> Report:
    config, layouts, rates = found["config"], found["layouts"], found["pooled_ids_per_s"]
    first, sizes = layouts["float32"]["row_file_bytes"], []
    for dtype, (*each, size) in ((dtype, own.values()) for dtype, own in layouts.items()):
        sizes.append([dtype, *map(str, each), f"{size / 2**20:,.0f} MiB", f"{size / first:.2f}"])
    columns = ["rows", "bytes in DDR", "bytes on SSD", "rows a block of 4 KiB", "row file", "of float32's"]
    tables = [Table(f"{config['rows']:,} rows of {config['dim']}", columns, sizes)]
    kinds = [by_kind[kind] for by_kind in rates.values() for kind in IDS]
    medians = [{name: rate["median"] for name, rate in own.items()} for own in kinds]
    rows = [
        [name, *(f"{own[name] / 1e6:.1f} ({own[name] / own['torch float32']:.2f})" for own in medians)]
        for name in medians[0]
    ]
    columns = [f"{kind}, {threads} thread{'s' * (int(threads) > 1)}" for threads in rates for kind in IDS]
    title = (
        f"pooled lookups, million ids a second (of torch's float32): {config['bags']:,} bags of "
        f"{config['pooling_factor']} ids, every row in memory"
    )
    tables.append(Table(title, ["pooled by", *columns], rows))
    goals = []
    for dtype in ("int8", "int4"):
        share = medians[0][f"tierstore {dtype}"] / medians[0]["tierstore float32"]
        goals.append(Goal(f"{dtype}: pooled ids a second over our float32's, 1 thread", round(share, 3), at_least=1))
    notes = [
        "Bytes in DDR without index and policy, 44 more with LRU; bytes on SSD with the row's checksum. Converted "
        "stores have no optimizer state.",
        f"{config['repetitions']} repetitions in turns, each on a batch not looked up shortly before; Zipf "
        f"with exponent {config['zipf']}. torch: embedding_bag, and torch.ops.quantized's row-wise lookups, which "
        "are given the rows' places, where tierstore finds each id in its cache first. The int8 and int4 sums of "
        "the two were compared, and are equal in every bit.",
    ]
    return Report(tables, goals, notes)


# Quality of rows that were converted, or trained in fewer bits


def _measure_quality(request: Run, _: Figures) -> Figures:
    """With each seed: trained in float32 and converted to each dtype; then trained in rows of 16 bits."""
    config, runs, target = request.config["quality"], list[Figures](), request.folder / "quality-converted"

    def note(*given: Any) -> None:
        runs.append(dict(zip(("seed", "dtype", "made", "evaluation", "cached_row_bytes"), given, strict=True)))

    with fresh_folder(request.folder / "quality-store") as path:
        for seed in config["train_seeds"]:
            run = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"])
            exact = trained(run)
            for dtype in DTYPES:
                shutil.rmtree(target, ignore_errors=True)
                if dtype != "float32":
                    tierstore.quantize(path, target, dtype=dtype)
                own = scored(run, path if dtype == "float32" else target)
                if dtype == "float32" and own.evaluation != exact:
                    raise RuntimeError(f"evaluated again, the trained store gives {own.evaluation}, not {exact}")
                note(seed, dtype, _CONVERTED, *own)
            for dtype, how in ((dtype, how) for dtype in ("bfloat16", "float16") for how in ("nearest", "stochastic")):
                own_set = (f'embedding.dtype="{dtype}"', f'embedding.rounding="{how}"')
                run = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"], *own_set)
                note(seed, dtype, how, trained(run), table_configs(run)[0].layout(mmap.PAGESIZE).row_bytes)
    shutil.rmtree(target, ignore_errors=True)
    return {"runs": runs, "config": config}


def _tell_quality(found: Figures) -> Report:
    config, rows, lost = found["config"], list[list[str]](), dict[str, float]()
    kinds: dict[tuple[str, str], list[Figures]] = {}
    for each in found["runs"]:
        kinds.setdefault((each["dtype"], each["made"]), []).append(each)

    def mean(runs: list[Figures], name: str) -> float:
        return float(statistics.mean(each["evaluation"][name] for each in runs))

    first = kinds["float32", _CONVERTED]
    for (dtype, made), own in kinds.items():
        auc, loss, aucs = mean(own, "auc"), mean(own, "log_loss"), [each["evaluation"]["auc"] for each in own]
        how = "" if dtype == "float32" else made if made == _CONVERTED else f"trained, {made}"
        less = mean(first, "auc") - auc
        losses = [f"{less:+.6f}", f"{loss:.6f}", f"{loss - mean(first, 'log_loss'):+.6f}"]
        spread = f"{min(aucs):.6f} - {max(aucs):.6f}"
        rows.append([dtype, how, str(own[-1]["cached_row_bytes"]), f"{auc:.6f}", spread, *losses])
        lost |= {dtype: round(less, 6)} if made == _CONVERTED else {}
    title = (
        f"{config['run_file']}, trained in float32 and converted, or trained in rows of 16 bits that are rounded "
        f"at each update: mean of {len(config['train_seeds'])} trainings"
    )
    columns = ["rows", "made", "bytes in DDR", "test AUC", "lowest - highest", "AUC lost", "log loss", "worse by"]
    note = (
        "Quality: the test rows follow the training rows in time. Bytes of trained rows are with Adagrad's state. A "
        "seed decides about first values, dense weights and random bits; the spread over seeds says which differences "
        "mean something."
    )
    goals = [Goal(f"test AUC lost by {dtype}", lost[dtype], at_most=most) for dtype, most in _WORSE_MAX.items()]
    return Report([Table(title, columns, rows)], goals, [note])


# The fewest bytes within a bound of log loss


def _measure_search(request: Run, _: Figures) -> Figures:
    config, first = request.config["search"], request.config["search"]["train_rows"]
    with fresh_folder(request.folder / "search") as folder:
        folder.mkdir()
        sizes = (f"data.train_rows={first}", f"data.test_rows={config['held_out_rows']}")
        given = (*config["layers"], f"train.seed={config['seed']}", *sizes)
        run = run_config(config["run_file"], folder / "run", *given)
        trained(run)
        later, path, small = config["untouched_rows"], folder / "untouched.tsv", folder / "int8"
        with gzip.open(require_criteo(), "rb") as lines, path.open("wb") as file:
            file.writelines(islice(lines, first + config["held_out_rows"], first + config["held_out_rows"] + later))
        rows = read_labelled(run, str(path), max_rows=later, batch_rows=4096)
        made = {f"within {bound:g}": _by_loss(run, folder / f"{bound:g}", bound, rows) for bound in config["bounds"]}
        types = dict.fromkeys(next(iter(made.values()))["layer_names"], "int8")
        tierstore.quantize(run.store.path, small, dtype="int8", tensors=lambda tensors: lowered(tensors, types))
        found = {"float32": _served(folder / "run", rows), _INT8: _served(small, rows)} | made
    return {"made": found, "config": config}


def _served(store_folder: Path, rows: Sequence[LabelledRows]) -> dict[str, float]:
    """What a store's ranking model gives for rows that no search has seen, and its bytes: of rows that were written,
    as they lie in memory without optimizer state, and of dense weights as the commit has them."""
    with tierstore.open(store_folder, mode="r", ddr=DDR) as store:
        model: Any = Models(store).by_name["ranking"]
        answers = [model.run([model.parse(each.inputs)])[0]["probabilities"].data for each in rows]
        tables = store.tables.values()
        row_bytes = sum(len(each) * own.layout.weight_bytes for own in tables for each in store.written_rows(own))
        weights = sum(each.nbytes for name, each in store.tensors().items() if name.startswith("model."))
    labels = np.concatenate([each.labels for each in rows])
    given = np.concatenate(answers).astype(np.float64).clip(2.0**-24, 1 - 2.0**-24)
    logits = np.log(given / (1 - given))
    found = evaluate(labels, logits)
    return {"rows_bytes": row_bytes, "weights_bytes": weights, "log_loss": found.log_loss, "auc": found.auc}


def _by_loss(run: RunConfig, folder: Path, bound: float, later: Sequence[LabelledRows]) -> Figures:
    begun = time.perf_counter()
    made = quantize_run(run.store.path, folder, loss=bound)
    seconds = time.perf_counter() - begun
    rows, layers = ([each for each in made.units if each.name.startswith(kind)] for kind in (ROWS, LAYER))
    tables_by_type, layers_by_type = (
        Counter(made.found.choice.get(each.name, each.own) for each in units) for units in (rows, layers)
    )
    served = _served(folder, later)
    assert served["rows_bytes"] == size_of(rows, made.found.choice)
    return served | {
        "bound": bound,
        "seconds": seconds,
        "tables": dict(tables_by_type),
        "layers": dict(layers_by_type),
        "layer_names": [each.name.removeprefix(LAYER) for each in layers],
        "added_on_search": made.found.added["search"],
        "added_on_check": made.found.added["check"],
    }


def _tell_search(found: Figures) -> Report:
    config, made, rows, goals = found["config"], found["made"], [], []
    first, whole = made["float32"], {name: each["rows_bytes"] + each["weights_bytes"] for name, each in made.items()}
    for name, each in made.items():
        added = each["log_loss"] / first["log_loss"] - 1
        by_type = [
            ", ".join(f"{count} {dtype}" for dtype, count in sorted(each.get(units, {}).items()))
            for units in ("tables", "layers")
        ]
        sizes = [f"{each['rows_bytes'] / 2**20:.2f} MiB", f"{each['weights_bytes'] / 2**10:,.0f} KiB"]
        sizes.append(f"{whole[name] / whole['float32']:.3f}")
        searched = [f"{100 * each[key]:+.4f} %" if key in each else "" for key in ("added_on_search", "added_on_check")]
        later = [f"{each['log_loss']:.6f}", f"{100 * added:+.4f} %", f"{each['auc']:.6f}"]
        rows.append([name, *sizes, *by_type, *searched, *later, f"{each['seconds']:.0f}" if "seconds" in each else ""])
        if "bound" in each:
            goals.append(Goal(f"log loss added on later rows, {name}", added, at_most=each["bound"]))
    share = round(min(whole.values()) / whole[_INT8], 3)
    goals.append(Goal(f"bytes at the widest bound, of {_INT8}'s", share, at_most=1))
    columns = ["types", "rows", "dense weights", "of float32's bytes", "tables", "layers", "loss added, searched rows"]
    columns += ["checked rows", "log loss, later rows", "added", "AUC, later rows", "seconds"]
    title = (
        f"{config['run_file']} with Criteo-Kaggle's layers, {config['train_rows']:,} rows trained, "
        f"{config['held_out_rows']:,} held out, {config['untouched_rows']:,} later"
    )
    note = (
        "Bytes: rows that were written, as they lie in memory, without optimizer state; dense weights as they are "
        "stored. The held-out rows are searched and checked by turns; the later rows follow them in the file, and "
        "are scored by the model that is served. Seconds are of the whole command, the copy included."
    )
    return Report([Table(title, columns, rows)], goals, [note])


# The dense part


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class DensePart(nn.Module):
    """As a module of its own, as compilers want it: logits, float32 [B], of dense features and pooled rows."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.model.dense_part(dense, pooled)


def model_of(shape: Mapping[str, Any]) -> DensePart:
    """The dense part of a DLRM, its weights drawn from torch's random numbers; interaction "cat" is that of RMC1-3."""
    settings = {name: value for name, value in shape.items() if name != "name"}
    settings["interaction"] = "dot" if shape["interaction"] == "dot" else "dcn"  # which is as wide as "cat"
    model = DLRM(nn.Identity(), **settings)
    if shape["interaction"] == "cat":
        model.interaction = _Function(lambda dense, sparse: torch.cat([dense, sparse.flatten(1)], 1))  # type: ignore[assignment]
    return DensePart(model).eval()


def _in_bfloat16(module: nn.Module) -> nn.Module:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                linear = child.bfloat16()
                setattr(parent, name, _Function(lambda inputs, linear=linear: linear(inputs.bfloat16()).float()))
    return module


def _own(module: nn.Module) -> nn.Module:
    pack_linears(module, "int8")
    return module


def _dynamic(module: nn.Module) -> Any:
    torch.backends.quantized.engine = "x86"
    quantize: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings(action="ignore"):  # deprecated, as quantized tensors are
        return quantize(module, {nn.Linear}, torch.qint8)


def _compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, dynamic=True, options={"freezing": True})


WAYS: Final[dict[str, Callable[[nn.Module], Any]]] = {
    _BASELINE: lambda module: module,
    "float32, torch.compile": _compiled,
    "bfloat16 linear layers": _in_bfloat16,
    "int8, quantize_dynamic, x86": _dynamic,
    _OWN: _own,
}
"""Given a model in float32, which it may change."""


def _inputs(shape: Mapping[str, Any], samples: int) -> tuple[Tensor, Tensor]:
    """Dense features like logarithms of counts, and small rows."""
    counts = torch.randn(samples, shape["num_dense"]).exp()
    return torch.log1p(counts), torch.randn(samples, shape["num_features"] * shape["embedding_dim"]) * 0.1


@torch.inference_mode()
def _dense_rates(config: Figures, shape: Figures, threads: int) -> Figures:
    """By way: samples a second at each number of candidates, and how far predictions are from float32's; and the ways
    that this machine has not, with the reason."""
    torch.set_num_threads(threads)
    torch.manual_seed(config["seed"])
    model, given, ways, missing = model_of(shape), _inputs(shape, 200), dict[str, Any](), {}
    for name, way in WAYS.items():
        if way is _compiled and not (config["compiled"] and threads == 1):
            continue
        try:
            (score := way(copy.deepcopy(model)))(*given)
            ways[name] = score
        except Exception as error:  # whatever a compiler says that this machine has or has not
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    found: Figures = {name: {"samples_per_s": {}} for name in ways}
    clock = time.process_time if threads == 1 else time.perf_counter
    for count in config["candidates"]:
        given = _inputs(shape, count)
        once = measure({"": partial(ways[_BASELINE], *given)}, repetitions=3)[""]
        calls = max(1, round(config["min_seconds"] / min(once)))

        def repeat(score: Any, given: Any = given, calls: int = calls) -> None:
            for _ in range(calls):
                score(*given)

        actions = {name: partial(repeat, score) for name, score in ways.items()}
        exact = torch.sigmoid(ways[_BASELINE](*given))
        for name, times in measure(actions, repetitions=config["repetitions"], clock=clock).items():
            found[name]["samples_per_s"][str(count)] = count * calls / statistics.median(times)
            off = (torch.sigmoid(ways[name](*given)) - exact).abs()
            found[name] |= {"off_max": off.max().item(), "off_mean": off.mean().item()}
    return {"ways": found, "missing": missing}


def _measure_dense(request: Run, _: Figures) -> Figures:
    config, aucs = request.config["dense"], dict[str, dict[Dense, list[float]]]()
    found = {
        shape["name"]: {str(threads): _dense_rates(config, shape, threads) for threads in config["threads"]}
        for shape in config["shapes"]
    }
    lacks_int8 = any(_OWN in each["missing"] for by_threads in found.values() for each in by_threads.values())
    for name, layers in () if lacks_int8 else config["trained"].items():
        aucs[name] = {"float32": [], "int8": []}
        with fresh_folder(request.folder / "dense-store") as path:
            for seed in config["train_seeds"]:
                made = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"], *layers)
                trained(made)
                for kind, own in aucs[name].items():
                    own.append(scored(made, path, prepare=partial(pack_linears, dense=kind)).evaluation.auc)
    return {"dense": found, "auc": aucs, "config": config}


def _tell_dense(found: Figures) -> Report:
    config, tables, missing, rows = found["config"], [], dict[str, str](), []
    for name, threads, measured in ((name, *own) for name, each in found["dense"].items() for own in each.items()):
        first, speeds = measured["ways"][_BASELINE]["samples_per_s"], []
        missing |= measured["missing"]
        for way, own in measured["ways"].items():
            rates = own["samples_per_s"].items()
            shown = [f"{rate:,.0f}/s" if way == _BASELINE else f"{rate / first[count]:.2f}" for count, rate in rates]
            speeds.append([way, *shown, f"{own['off_max']:.1e}", f"{own['off_mean']:.1e}"])
        columns = ["dense part", *(f"{count:,}" for count in config["candidates"]), "off by at most", "on average"]
        title = f"{name}, {threads} thread{'s' * (threads != '1')}: samples/s over float32's, by candidates"
        tables.append(Table(title, columns, speeds))
    for name, aucs in found["auc"].items():
        lost = [one - other for one, other in zip(*aucs.values(), strict=True)]
        means = [f"{statistics.mean(each):.6f}" for each in aucs.values()]
        rows.append([name, *means, f"{statistics.mean(lost):+.6f}", f"{min(lost):+.6f} to {max(lost):+.6f}"])
    title = f"Test AUC of {config['run_file']}, trained in float32, mean of {len(config['train_seeds'])} trainings"
    tables += [Table(title, ["layers", "float32", "int8", "lost", "lowest to highest"], rows)] if rows else []
    notes = [
        f"Medians of {config['repetitions']} repetitions in turns, in one process, of the same samples; with one "
        "thread of processor time. Off by: distance of probabilities from float32's, at the most candidates, with "
        "weights as first drawn.",
        *(f"Not here: {name} ({why})." for name, why in missing.items()),
    ]
    return Report(tables, notes=notes)


PARTS: Final = {
    "rows": Part(_measure_rows, _tell_rows),
    "quality": Part(_measure_quality, _tell_quality),
    "search": Part(_measure_search, _tell_search),
    "dense": Part(_measure_dense, _tell_dense),
}

if __name__ == "__main__":
    start("precision")
