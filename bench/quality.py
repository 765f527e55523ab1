"""What rows of 16, 8 and 4 bits do to the predictions of a model on real data: converted, or trained in them."""

import contextlib
import mmap
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

import tierstore
from tierstore.train import RunConfig, train
from tierstore.train.build import Run, build_model, open_data, table_configs
from tierstore.train.config import load, parse_override
from tierstore.train.metrics import Evaluation, Predictions
from tierstore.train.steps import feed

from .common import Goal, Table
from .data import ROOT, require_criteo

__all__ = ["Quality", "evaluated", "goals_of", "measure_quality", "table_of", "train_store"]

_DDR: Final = "200% of tables"
_WORSE_MAX: Final = {"float16": 0.0001, "bfloat16": 0.0001, "int8": 0.0001, "int4": 0.001}
_TRAINED: Final = ("bfloat16", "float16")
CONVERTED: Final = "converted"


class Quality(NamedTuple):
    """One training and its evaluation on the rows after the training rows.

    Attributes:
        made: "converted" after training in float32, or how rows were rounded at each update.
        cached_row_bytes: of a row in memory, with its optimizer state.
    """

    seed: int
    dtype: str
    made: str
    evaluation: Evaluation
    cached_row_bytes: int


def measure_quality(config: dict[str, Any], folder: Path, dtypes: Sequence[str]) -> list[Quality]:
    """With each seed: trained in float32 and converted to each of ``dtypes``; then trained in rows of 16 bits."""
    found = []
    path = folder / "quality-store"
    for seed in config["train_seeds"]:
        run, trained = train_store(config, path, seed)
        found += [_converted(run, path, seed, dtype) for dtype in dtypes]
        again = found[-len(dtypes)].evaluation
        if again != trained:
            raise RuntimeError(f"evaluated again, the trained store gives {again}, not {trained}")
        for dtype in _TRAINED:
            for rounding in ("nearest", "stochastic"):
                own = [f'embedding.dtype="{dtype}"', f'embedding.rounding="{rounding}"']
                run, evaluation = train_store(config, path, seed, *own)
                row_bytes = table_configs(run)[0].layout(mmap.PAGESIZE).row_bytes
                found.append(Quality(seed, dtype, rounding, evaluation, row_bytes))
    shutil.rmtree(path)
    return found


def train_store(config: dict[str, Any], path: Path, seed: int, *overrides: str) -> tuple[RunConfig, Evaluation]:
    shutil.rmtree(path, ignore_errors=True)
    given = [f'data.path="{require_criteo()}"', f'store.ddr="{_DDR}"', f"train.seed={seed}", *config["set"]]
    given += [f'store.path="{path}"', *overrides]
    run = load(str(ROOT / config["run_file"]), [parse_override(text) for text in given])
    found = train(run).test
    if found is None:
        raise ValueError(f"{config['run_file']} has no test rows to evaluate on")
    return run, found


def _converted(run: RunConfig, path: Path, seed: int, dtype: str) -> Quality:
    if dtype == "float32":
        return evaluated(run, path, seed=seed)
    target = path.with_name(f"{path.name}-{dtype}")
    shutil.rmtree(target, ignore_errors=True)
    tierstore.quantize(path, target, dtype=dtype)  # type: ignore[arg-type]
    found = evaluated(run, target, seed=seed, dtype=dtype)
    shutil.rmtree(target)
    return found


@torch.no_grad()
def evaluated(
    config: RunConfig,
    path: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    prepare: Callable[[torch.nn.Module], object] = lambda _: None,
) -> Quality:
    """As training evaluates, from what the store holds; ``prepare`` may change the model."""
    predictions, (reader, hasher), first = Predictions(), open_data(config), config.data.train_rows
    stop, size = first + config.data.test_rows, config.train.batch_size
    rows = reader.batches(hasher, batch_size=size, start_row=first, stop_row=stop, log_dense=config.data.log_dense)
    with _opened(config, path) as run, contextlib.closing(feed(run, rows, depth=2)) as ahead:
        prepare(run.model)
        for batch in ahead:
            predictions.add(batch.labels, run.model(batch.dense, batch.sparse))
        row_bytes = run.embeddings.tables[0].layout.row_bytes
    return Quality(seed, dtype, CONVERTED, predictions.evaluate(), row_bytes)


@contextlib.contextmanager
def _opened(config: RunConfig, path: Path) -> Iterator[Run]:
    """A trained model over its store, opened for reading."""
    with tierstore.open(path, mode="r", ddr=_DDR) as store:
        embeddings = tierstore.TieredEmbeddingBagCollection(store)
        model = build_model(config, embeddings).eval()
        tensors = store.tensors()
        for name, parameter in model.dense_parameters().items():
            parameter.copy_(tensors[f"model.{name}"])
        yield Run(store, model, embeddings, torch.optim.SGD(model.dense_parameters().values()))


class _Means:
    """Of the trainings of one kind."""

    def __init__(self, found: Sequence[Quality], dtype: str, made: str) -> None:
        own = [each for each in found if (each.dtype, each.made) == (dtype, made)]
        self.aucs = [each.evaluation.auc for each in own]
        self.auc = statistics.mean(self.aucs)
        self.log_loss = statistics.mean(each.evaluation.log_loss for each in own)
        self.cached_row_bytes = own[-1].cached_row_bytes


def table_of(found: Sequence[Quality], config: dict[str, Any]) -> Table:
    first, shown = _Means(found, "float32", CONVERTED), []
    for dtype, made in dict.fromkeys((each.dtype, each.made) for each in found):
        own = _Means(found, dtype, made)
        how = "" if dtype == "float32" else made if made == CONVERTED else f"trained, {made}"
        spread = f"{min(own.aucs):.6f} - {max(own.aucs):.6f}"
        losses = [f"{first.auc - own.auc:+.6f}", f"{own.log_loss:.6f}", f"{own.log_loss - first.log_loss:+.6f}"]
        shown.append([dtype, how, str(own.cached_row_bytes), f"{own.auc:.6f}", spread, *losses])
    return Table(
        title=f"{config['run_file']}, trained in float32 and converted, or trained in rows of 16 bits that are rounded "
        f"at each update: mean of {len(config['train_seeds'])} trainings",
        columns=["rows", "made", "bytes in DDR", "test AUC", "lowest - highest", "AUC lost", "log loss", "worse by"],
        rows=shown,
    )


def goals_of(found: Sequence[Quality]) -> list[Goal]:
    first = _Means(found, "float32", CONVERTED).auc
    return [
        Goal(
            name=f"test AUC lost by {dtype}",
            value=round(first - _Means(found, dtype, CONVERTED).auc, 6),
            at_most=most,
        )
        for dtype, most in _WORSE_MAX.items()
    ]
