"""Workloads by name, and from a file: ``[workload]`` with the keys of ``Workload``, and a ``[[table]]`` for each table
with those of ``TableShape``; or a run file of ``tierstore train``.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from ..layout import DtypeName
from ..settings.sections import described, nearest, read_toml, toml_value
from ..system.checks import excerpt
from ..system.sizes import format_size
from .workload import Assumed, OptimizerName, TableShape, TableSpec, Workload, dlrm_work, specified

KAGGLE_ROWS: Final = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows of the 26 tables of the Criteo-Kaggle set, as published with its DLRM baseline (facebookresearch/dlrm)."""
_MLPERF_ROWS: Final = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
"""Of DLRM-DCNv2: ``--num_embeddings_per_feature`` of mlcommons/training, recommendation_v2/torchrec_dlrm."""
_MLPERF_MULTI_HOT: Final = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample of each of these tables: ``--multi_hot_sizes`` of the same."""
_REQUIRED: Final = ("name", "num_embeddings", "embedding_dim")
_OF_RUNS: Final = {"data", "embedding", "model", "train"}  # sections of a run file, one of which it has


def _workload(
    name: str, rows: Sequence[int], ids: Sequence[int], dim: int, flops: int, batch: int, optimizer: OptimizerName
) -> Workload:
    tables = tuple(
        TableShape(name=f"t{number}", num_embeddings=own, embedding_dim=dim, pooling_factor=pooling)
        for number, (own, pooling) in enumerate(zip(rows, ids, strict=True))
    )
    skew = Assumed("exponent", tuple(table.name for table in tables))  # no publication says how popular rows are
    return Workload(
        name=name, tables=tables, batch_samples=batch, optimizer=optimizer, dense_flops=flops, assumed=(skew,)
    )


PUBLISHED: Final = (
    # Tables and layers: models/configs of harvard-acc/DeepRecSys, the code of Gupta et al., "DeepRecSys: A System for
    # Optimizing End-To-End At-scale Neural Recommendation Inference" (2020). They are looked up, not trained; the
    # batch is the largest that RecSSD (Wilkening et al., 2021) measures them with.
    _workload("rmc1", [4_000_000] * 8, [80] * 8, 32, 200_832, 128, "none"),
    _workload("rmc2", [500_000] * 32, [120] * 32, 64, 639_104, 128, "none"),
    _workload("rmc3", [2_000_000] * 10, [20] * 10, 32, 6_406_656, 128, "none"),
    # bench/dlrm_s_criteo_kaggle.sh of facebookresearch/dlrm.
    _workload("criteo-kaggle", KAGGLE_ROWS, [1] * 26, 16, 972_064, 128, "sgd"),
    # The command lines in the README of mlcommons/training, recommendation_v2/torchrec_dlrm.
    _workload("mlperf-dlrm-v2", _MLPERF_ROWS, _MLPERF_MULTI_HOT, 128, 32_060_928, 65_536, "adagrad"),
)
"""Flops are of one sample, forward, 2 a b for a layer of a inputs and b outputs: of the layers that
docs/planning/traces.md lists, and of the interaction's matrix products."""
PRESETS: Final[Mapping[str, Workload]] = {workload.name: workload for workload in PUBLISHED}


@dataclass(frozen=True, kw_only=True)
class _Keys:
    name: str = ""
    batch_samples: int = 2048
    optimizer: OptimizerName = "none"
    dtype: DtypeName = "float32"
    dense_flops: float = 0.0
    dense_products: float = 0.0
    dense_values: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _File:
    workload: _Keys = _Keys()
    table: tuple[TableSpec, ...] = ()


def preset(name: str) -> Workload:
    """A published model, by its name in any case. ValueError says the nearest."""
    found = PRESETS.get(name.lower())
    if found is None:
        raise ValueError(f"there is no preset {excerpt(name)}; {nearest(name.lower(), PRESETS)}")
    return found


def load_workload(source: str | os.PathLike[str]) -> Workload:
    """A preset by its name, or a workload file or a run file by its path. ValueError: it is neither, or the file has an
    unknown key or a value that cannot be; names the file, the key and what is accepted."""
    text, path = os.fspath(source), Path(source)
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    if path.suffix != ".toml" and not path.exists():
        known = nearest(text.lower(), PRESETS, all_are="presets are")
        raise ValueError(f"{excerpt(text)} is neither a preset nor a workload file; {known}")
    document = read_toml(path, "workload file")
    if _OF_RUNS & set(document):
        return _of_run(path)
    try:
        found = described(_File, document)
        for number, table in enumerate(document.get("table", ())):
            if missing := [key for key in _REQUIRED if key not in table]:
                raise ValueError(f'table[{number}]: key "{missing[0]}" is missing')
        return specified(found.table, **{**vars(found.workload), "name": found.workload.name or path.stem})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def scaled(workload: Workload, factor: float) -> Workload:
    """With ``factor`` times the rows, of each table one at least. ValueError: the factor is 0 or too large."""
    if not 0 < factor < float("inf"):
        raise ValueError(f"factor={factor}: expected a number above 0")
    tables = tuple(
        replace(
            each, num_embeddings=max(1, round(each.num_embeddings * factor)), candidates=round(each.candidates * factor)
        )
        for each in workload.tables
    )
    return replace(workload, name=f"{workload.name} x {factor:g}", tables=tables)


def _of_run(path: Path) -> Workload:
    """What a run trains: its tables, batch and optimizer, and the work of its DLRM, as without towers."""
    from ..train.config import load

    run = load(path)
    dim, columns = run.embedding.dim, run.data.sparse_columns
    ids, counts = run.embedding.ids, run.embedding.ids == "dynamic" and run.embedding.admit_after > 1
    layers: dict[str, Any] = {name: each for name, each in asdict(run.model).items() if not name.startswith("tower")}
    return specified(
        [
            TableSpec(name=name, num_embeddings=size, embedding_dim=dim, ids=ids, candidates=counts * size)
            for name, size in zip(columns, run.table_sizes, strict=True)
        ],
        name=path.stem,
        batch_samples=run.train.batch_size,
        optimizer=run.optimizer.sparse,
        dtype=run.embedding.dtype,
        **dlrm_work([dim] * len(columns), num_dense=len(run.data.dense_columns), **layers)._asdict(),
    )


def describe_workload(workload: Workload) -> str:
    rows = sum(table.num_embeddings for table in workload.tables)
    ids = sum(table.pooling_factor for table in workload.tables)
    dims = sorted({table.embedding_dim for table in workload.tables})
    widths = f"{dims[0]}" if len(dims) == 1 else f"{dims[0]} to {dims[-1]}"
    return (
        f"{workload.name}: {len(workload.tables)} tables, {rows:,} rows of {widths} columns, "
        f"{format_size(workload.table_bytes)}, {ids:g} lookups a sample, {workload.dense_flops / 1e6:g} Mflop a sample"
    )


def workload_toml(workload: Workload) -> str:
    """TOML: ``[workload]``, and a ``[[table]]`` for each; what is assumed is a comment."""
    unknown = {(each.figure, table) for each in workload.assumed for table in each.tables or ("",)}

    def line(each: Workload | TableShape, key: str, table: str = "") -> str:
        text = f"{key} = {toml_value(getattr(each, key))}"
        return f"# {text} # assumed" if (key, table) in unknown else text

    lines = ["[workload]"]
    lines += [line(workload, each.name) for each in fields(Workload) if each.name not in ("tables", "assumed")]
    for table in workload.tables:
        lines += ["", "[[table]]", *(line(table, each.name, table.name) for each in fields(TableShape))]
    return "\n".join(lines) + "\n"
