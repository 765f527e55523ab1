"""A run inside a commit: dense weights, their optimizer's state, the place in the data, the random state. With the rows
of the same version they are all that the next step depends on. Tensors only, no pickle."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import ReadOnlyError
from ..models import DLRM
from ..settings.sections import sections_of, to_dict
from ..store.commits import PendingCommit
from ..system.checks import excerpt
from .build import Run
from .config import RunConfig
from .processes import Processes
from .readers import DataError, DataFile

_EXTRA_KEY: Final = "tierstore.train"
_GONE: Final = "train.lookahead"  # of runs of 0.1
_FREE_KEYS: Final = frozenset(
    {
        *("data.path", "data.check_files", "data.test_rows", "data.test_path", "train.test_each_epoch"),
        *("ranks.plan", "ranks.timeout_seconds"),
        *("train.epochs", "train.prefetch_depth", "train.commit_every"),
    }
)
"""Keys that may differ when a run continues, besides [store]: they change no result, or (epochs) only its end."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: steps done, and the next row to read."""

    step: int = 0
    epoch: int = 0
    row: int = 0


def commit_run(run: Run, config: RunConfig, position: Position, files: Sequence[DataFile] = ()) -> PendingCommit:
    """Begin to commit rows and all else of the run, atomically; ``files``: those that the position counts rows of."""
    run.embeddings.gather([run.optimizer])
    dense = run.model.dense_parameters()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in dense.items()}
    names, states = list(dense), run.optimizer.state_dict()["state"]
    for index, state in states.items():
        tensors |= {f"optimizer.{names[index]}.{key}": value for key, value in state.items()}
    tensors["rng"] = torch.get_rng_state()
    extra: dict[str, Any] = {_EXTRA_KEY: {"position": asdict(position), "config": to_dict(config)}}
    extra[_EXTRA_KEY]["files"] = [list(file) for file in files]
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
        if section != "store"
        for key, value in keys.items()
        if f"{section}.{key}" not in _FREE_KEYS
        and (there := other.get(section, {}).get(key, defaults[section][key])) != value
    )


def restore_run(run: Run) -> Position:
    """Put the run where its store's last commit left it; the start if nothing was ever committed."""
    if not run.store.version:
        return Position()
    saved = _saved(run.store)
    tensors = run.store.tensors()
    load_model(run.model, tensors)
    states: dict[int, dict[str, Tensor]] = {}
    for index, (name, _) in enumerate(run.model.dense_parameters().items()):
        prefix = f"optimizer.{name}."
        state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if state:
            states[index] = state
    run.optimizer.load_state_dict({"state": states, "param_groups": run.optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng"])
    return Position(**saved["position"])


def saved_config(extra: Mapping[str, Any], origin: str) -> RunConfig | None:
    """The run whose commit has this ``extra``; None if no run committed it. ConfigError if it is of another release."""
    saved = extra.get(_EXTRA_KEY)
    if saved is None:
        return None
    config = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" != _GONE}
        for section, keys in saved["config"].items()
    }
    return sections_of(RunConfig, config, origin)


def _saved(store: Any) -> dict[str, Any]:
    saved: dict[str, Any] | None = store.extra.get(_EXTRA_KEY)
    if saved is None:
        raise ValueError(f"{store.directory} was not written by tierstore train; give another folder with --store")
    return saved


@torch.no_grad()
def load_model(model: DLRM, tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in model.dense_parameters().items():
        parameter.copy_(tensors[f"model.{name}"])
