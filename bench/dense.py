"""How much faster is a model's dense part in fewer bits on a CPU, and what does it cost in AUC?

Each way scores the same samples as float32 does, in turns with it, in one process. AUC is that of examples/criteo.toml,
trained in float32.
"""

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from tierstore.models import DLRM
from tierstore.serve.models.dense import Dense, pack_linears

from .common import Report, Run, Table, fresh_folder, measure, start
from .runs import run_config, scored, trained

__all__ = ["DensePart", "model_of", "run"]

Config = Mapping[str, Any]
Inputs = tuple[Tensor, Tensor]
Score = Callable[[Tensor, Tensor], Tensor]
"""Logits, float32 [B], of dense features and pooled rows."""
BASELINE: Final = "float32"


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


class DensePart(nn.Module):
    """As a module of its own, as compilers want it."""

    def __init__(self, model: DLRM) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        return self.model.dense_part(dense, pooled)


def model_of(shape: Config) -> DensePart:
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
    BASELINE: lambda module: module,
    "float32, torch.compile": _compiled,
    "bfloat16 linear layers": _in_bfloat16,
    "int8, quantize_dynamic, x86": _dynamic,
    "int8, tierstore serve --dense int8": _own,
}
"""Given a model in float32, which it may change."""


def _made(config: Config, shape: Config) -> tuple[dict[str, Score], dict[str, str]]:
    """The ways that this machine has, for one model; and the others, with the reason."""
    torch.manual_seed(config["seed"])
    model, given, scores, missing = model_of(shape), _inputs(shape, 200), {}, {}
    for name, way in WAYS.items():
        if way is _compiled and not (config["compiled"] and torch.get_num_threads() == 1):
            continue
        try:
            (score := way(copy.deepcopy(model)))(*given)
            scores[name] = score
        except Exception as error:  # whatever a compiler says that this machine has or has not
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return scores, missing


def _inputs(shape: Config, samples: int) -> Inputs:
    """Dense features like logarithms of counts, and small rows."""
    counts = torch.randn(samples, shape["num_dense"]).exp()
    return torch.log1p(counts), torch.randn(samples, shape["num_features"] * shape["embedding_dim"]) * 0.1


def _repeat(action: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        action()


@torch.inference_mode()
def _measured(config: Config, shape: Config, threads: int) -> dict[str, Any]:
    """By way: samples a second at each number of candidates, and how far predictions are from float32's."""
    print(f"{shape['name']}, threads: {threads}", flush=True)
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    scores, missing = _made(config, shape)
    found: dict[str, Any] = {name: {"samples_per_s": {}} for name in scores}
    for count in config["candidates"]:
        given = _inputs(shape, count)
        actions: dict[str, Any] = {name: partial(score, *given) for name, score in scores.items()}
        calls = max(1, round(config["min_seconds"] / min(measure(actions, repetitions=3)[BASELINE])))
        actions = {name: partial(_repeat, action, calls) for name, action in actions.items()}
        exact = torch.sigmoid(scores[BASELINE](*given))
        for name, times in measure(actions, repetitions=config["repetitions"], clock=clock).items():
            found[name]["samples_per_s"][str(count)] = count * calls / statistics.median(times)
            off = (torch.sigmoid(scores[name](*given)) - exact).abs()
            found[name] |= {"off_max": off.max().item(), "off_mean": off.mean().item()}
    return {"ways": found, "missing": missing}


def _speed_table(config: Config, name: str, threads: str, measured: Config) -> Table:
    first, rows = measured["ways"][BASELINE]["samples_per_s"], []
    for way, own in measured["ways"].items():
        rates = own["samples_per_s"].items()
        shown = [f"{rate:,.0f}/s" if way == BASELINE else f"{rate / first[count]:.2f}" for count, rate in rates]
        rows.append([way, *shown, f"{own['off_max']:.1e}", f"{own['off_mean']:.1e}"])
    columns = ["dense part", *(f"{count:,}" for count in config["candidates"]), "off by at most", "on average"]
    title = f"{name}, {threads} thread{'s' * (threads != '1')}: samples/s over float32's, by candidates"
    return Table(title, columns, rows)


def _aucs(request: Run, layers: list[str]) -> dict[Dense, list[float]]:
    """Test AUCs of trainings with each seed, by what linear layers are served in."""
    config = request.config
    aucs: dict[Dense, list[float]] = {"float32": [], "int8": []}
    with fresh_folder(request.folder / "dense-store") as path:
        for seed in config["train_seeds"]:
            made = run_config(config["run_file"], path, f"train.seed={seed}", *config["set"], *layers)
            trained(made)
            for kind, own in aucs.items():
                own.append(scored(made, path, prepare=partial(pack_linears, dense=kind)).evaluation.auc)
    return aucs


def _auc_table(config: Config, aucs: Mapping[str, Mapping[Dense, list[float]]]) -> Table:
    rows = []
    for name, own in aucs.items():
        lost = [one - other for one, other in zip(*own.values(), strict=True)]
        means = [f"{statistics.mean(each):.6f}" for each in own.values()]
        rows.append([name, *means, f"{statistics.mean(lost):+.6f}", f"{min(lost):+.6f} to {max(lost):+.6f}"])
    title = f"Test AUC of {config['run_file']}, trained in float32, mean of {len(config['train_seeds'])} trainings"
    return Table(title, ["layers", "float32", "int8", "lost", "lowest to highest"], rows)


def _report(config: Config, found: Mapping[str, Config], aucs: Mapping[str, Mapping[Dense, list[float]]]) -> Report:
    cases = [(name, threads, own) for name, each in found.items() for threads, own in each.items()]
    missing = {name: why for _, _, own in cases for name, why in own["missing"].items()}
    notes = [
        f"Medians of {config['repetitions']} repetitions in turns, in one process, of the same samples; with one "
        "thread of processor time. Off by: distance of probabilities from float32's, at the most candidates, with "
        "weights as first drawn.",
        *(f"Not here: {name} ({why})." for name, why in missing.items()),
    ]
    tables = [*(_speed_table(config, *case) for case in cases), _auc_table(config, aucs)]
    return Report(tables, [], notes, {"dense": found, "auc": aucs})


def run(request: Run) -> Report:
    config, found = request.config, {}
    aucs = {name: _aucs(request, layers) for name, layers in config["trained"].items()}
    for shape in config["shapes"]:
        found[shape["name"]] = {str(threads): _measured(config, shape, threads) for threads in config["threads"]}
        request.save(_report(config, found, aucs))
    return _report(config, found, aucs)


if __name__ == "__main__":
    start("dense")
