"""A run inside a commit: dense weights, their optimizer's state, the place in the data, the random state. With the rows
of the same version they are all that the next step depends on. Tensors only, no pickle."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, ReadOnlyError
from ..models import DLRM
from ..settings.sections import sections_of, to_dict
from ..store.commits import PendingCommit
from ..store.version import EVENT_TIME_KEY, event_time_of
from ..system.checks import excerpt
from .build import Run, dense_parameters, dense_state
from .config import RunConfig
from .processes import Processes
from .readers import DataError, DataFile

_EXTRA_KEY: Final = "tierstore.train"
_GONE: Final = "train.lookahead"  # of runs of 0.1
_FREE_KEYS: Final = frozenset(
    {
        *("data.path", "data.check_files", "data.test_rows", "data.test_path", "train.test_each_epoch"),
        *("data.time_column", "data.late_files", "data.settle_seconds", "data.until", "train.commit_seconds"),
        *("train.test_every_steps", "train.test_every_minutes", "train.patience", "train.keep_best"),
        *("train.callbacks", "train.metrics", "train.metrics_every", "train.tensorboard"),
        *("ranks.plan", "ranks.timeout_seconds"),
        *("train.epochs", "train.prefetch_depth", "train.commit_every", "train.check_finite"),
    }
)
"""Keys that may differ when a run continues, besides [store] and [metrics]: they change no result, or only its end."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: steps done, and the next row to read; and how its tests went.

    Attributes:
        best: figure of the test that is best so far, the less the better; None before the first.
        best_version: whose it is; 0: that of the commit that holds this.
        tested, tests_since: the step of the last test, and how many tests came after the best.
        ended: epochs that the run was to have when it ended at its best version, or early; 0 as long as it goes on.
        reader, event_time: where a reader that follows a folder is; the greatest of trained rows, Unix seconds.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    best: float | None = None
    best_version: int = 0
    tested: int = 0
    tests_since: int = 0
    ended: int = 0
    reader: dict[str, Any] | None = None
    event_time: float | None = None

    def after(self, value: float) -> "Position":
        """The same, tested with that figure."""
        if self.best is None or value < self.best:
            return replace(self, best=value, best_version=0, tested=self.step, tests_since=0)
        return replace(self, tested=self.step, tests_since=self.tests_since + 1)

    def dropped(self, versions: Sequence[int], keep: int) -> Sequence[int]:
        """Versions of a store that the next commit drops to leave ``keep``, itself included, besides the best."""
        others = [version for version in versions if version != self.best_version]
        return others[: 1 - keep] if keep > 1 else others


def commit_run(run: Run, position: Position, files: Sequence[DataFile] = ()) -> PendingCommit:
    """Begin to commit rows and all else of the run, atomically; ``files``: those that the position counts rows of."""
    run.embeddings.gather([run.optimizer])
    tensors = {f"model.{name}": each.detach() for name, each in dense_state(run.model).items()}
    names, states = list(dense_parameters(run.model)), run.optimizer.state_dict()["state"]
    for index, state in states.items():
        tensors |= {f"optimizer.{names[index]}.{key}": value for key, value in state.items()}
    looked_at = tensors if run.config.train.check_finite == "error" else {}
    masks = {f"model.{name}" for name, _ in run.model.named_buffers()}  # which may hold infinity
    if bad := [name for name, each in looked_at.items() if (each.isnan() if name in masks else ~each.isfinite()).any()]:
        raise NonFiniteError(f"{bad[0]} is not finite")
    tensors["rng"] = torch.get_rng_state()
    tensors |= {f"metrics.{name}": each for name, each in run.metrics.state_dict(run.processes.gather).items()}
    place = asdict(position)
    extra: dict[str, Any] = {} if (seconds := place.pop("event_time")) is None else {EVENT_TIME_KEY: seconds}
    extra[_EXTRA_KEY] = {"position": place, "config": to_dict(run.config), "files": [*map(list, files)]}
    return run.processes.commit(run.store, extra, tensors)


def require_alike(config: RunConfig, processes: Processes) -> None:
    """ValueError, naming the keys that differ, unless all processes have the same run. Collective."""
    for rank, other in enumerate(processes.gather(to_dict(config))):
        if differing := _differing(other, config):
            raise ValueError(f"rank {rank} has {differing} in its run file: give all ranks the same")


def require_resumable(store: Any, config: RunConfig) -> None:
    """ValueError, naming the keys that differ, unless the store's last commit is of this run or there is none.
    ReadOnlyError if the store is quantized."""
    if not store.version:
        return
    trained_as = _saved(store)["config"]["embedding"]["dtype"]
    for name in filter(store.tables.__contains__, config.data.sparse_columns):
        if (dtype := store.tables[name].config.dtype) != trained_as:
            raise ReadOnlyError(
                f"{store.directory} is quantized: table {name!r} has {dtype} rows, and was trained as {trained_as}. "
                "It can only be looked up; train the store that it was quantized from"
            )
    if differing := _differing(_saved(store)["config"], config):
        raise ValueError(
            f"{store.directory} was trained with {differing}. "
            "Continue with the run file it was begun with, or train in another folder (--store)"
        )


def require_same_files(store: Any, config: RunConfig, files: Sequence[DataFile]) -> None:
    """DataError, naming the first file that differs, if the last commit stands within an epoch of other files."""
    saved = _saved(store) if store.version else {}
    before = [DataFile(*file) for file in saved.get("files", ())]
    row = saved["position"]["row"] if before else 0

    def described(file: DataFile | None) -> str:
        rows = "" if file is None or file.num_rows is None else f" and {file.num_rows:,} rows"
        return "no file" if file is None else f"{excerpt(file.name)} of {file.size_bytes:,} bytes{rows}"

    if not row or not config.data.check_files:
        return
    for old, new in zip_longest(before, files):
        if old != new:
            raise DataError(
                f"{config.data.path} is not what it was when the run stood at row {row:,}: there "
                f"is {described(new)} in place of {described(old)}. Put the data back as they were, or go on at that "
                "row of what is there now with --set data.check_files=false"
            )


def _differing(other: Mapping[str, Mapping[str, Any]], config: RunConfig) -> str:
    """The keys that decide results and that another run, or else the default, has otherwise; "" if there are none."""
    defaults = to_dict(RunConfig())
    return "; ".join(
        f"{section}.{key} = {there!r}, not {value!r}"
        for section, keys in to_dict(config).items()
        if section not in ("store", "metrics")
        for key, value in keys.items()
        if f"{section}.{key}" not in _FREE_KEYS
        and (there := other.get(section, {}).get(key, defaults[section][key])) != value
    )


def restore_run(run: Run) -> Position:
    """Put the run where its store's last commit left it, or the start; its metrics if it had the same [metrics]."""
    if not run.store.version:
        return Position()
    saved = _saved(run.store)
    tensors = run.store.tensors()
    if not isinstance(run.model, DLRM):
        _require_same_model(run.model, tensors, str(saved["config"]["model"].get("class")))
    load_model(run.model, tensors)

    def part(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}

    names = enumerate(dense_parameters(run.model))
    states = {index: state for index, name in names if (state := part(f"optimizer.{name}."))}
    run.optimizer.load_state_dict({"state": states, "param_groups": run.optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng"])
    if run.config.metrics.names and saved["config"].get("metrics") == to_dict(run.config)["metrics"]:
        run.metrics.load_state_dict(part("metrics."), rank=run.processes.rank)
    position = Position(**saved["position"] | {"event_time": event_time_of(run.store.extra)})
    best = 0 if position.best is None else position.best_version or run.store.version
    return replace(position, best_version=best)


def _require_same_model(model: nn.Module, tensors: Mapping[str, Tensor], name: str) -> None:
    """ValueError, naming the first tensor that differs, unless a commit has those of the model's dense state."""
    own = {f"model.{key}": list(each.shape) for key, each in dense_state(model).items()}
    saved = {key: list(each.shape) for key, each in tensors.items() if key.startswith("model.")}
    for key in sorted(own.keys() | saved.keys()):
        if (a := own.get(key, "none")) != (b := saved.get(key, "none")):
            found = f"model.class = {name!r} has {key} of shape {a}, the commit {b}"
            raise ValueError(f"{found}; resume with the class that the run was begun with")


def saved_config(extra: Mapping[str, Any], origin: str) -> RunConfig | None:
    """The run of a DLRM whose commit has this ``extra``; None if no run committed it, or one with a ``model.class``:
    only the trainer imports code that a run names. ConfigError if it is of another release."""
    saved = extra.get(_EXTRA_KEY)
    if saved is None:
        return None
    sections = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" != _GONE}
        for section, keys in saved["config"].items()
    }
    config = sections_of(RunConfig, sections, origin)
    return None if config.model.class_ else config


def _saved(store: Any) -> dict[str, Any]:
    saved: dict[str, Any] | None = store.extra.get(_EXTRA_KEY)
    if saved is None:
        raise ValueError(f"{store.directory} was not written by tierstore train; give another folder with --store")
    return saved


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, own in dense_state(model).items():
        own.copy_(tensors[f"model.{name}"])
