"""Ways to compute a model's dense part in float32, bfloat16 and int8 on a CPU: what bench.dense compares."""

import importlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from tierstore.models import DLRM
from tierstore.serve.models.dense import pack_linears

__all__ = ["BASELINE", "COMPILED", "WAYS", "Score", "model_of"]

Score = Callable[[Tensor, Tensor], Tensor]
"""Logits, float32 [B], of dense features and pooled rows."""
Way = Callable[..., Score]
"""Given a model in float32, which it may change, and an example of its two inputs."""
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


def model_of(shape: Mapping[str, Any]) -> DensePart:
    """The dense part of a DLRM, its weights drawn from torch's random numbers; interaction "cat" is that of RMC1-3."""
    settings = {name: value for name, value in shape.items() if name != "name"}
    settings["interaction"] = "dot" if shape["interaction"] == "dot" else "dcn"  # which is as wide as "cat"
    model = DLRM(nn.Identity(), **settings)
    if shape["interaction"] == "cat":
        model.interaction = _Function(lambda dense, sparse: torch.cat([dense, sparse.flatten(1)], 1))  # type: ignore[assignment]
    return DensePart(model).eval()


def _by_onednn(linear: nn.Linear) -> Callable[[Tensor], Any]:
    """As ``torch.compile`` calls it, its weights laid out once."""
    weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 200)
    return lambda inputs: torch.ops.mkldnn._linear_pointwise(inputs, weight, linear.bias, "none", [], "")


def _in_bfloat16(linear: nn.Linear) -> Callable[[Tensor], Any]:
    linear = linear.bfloat16()
    return lambda inputs: linear(inputs.bfloat16()).float()


def _replaced(module: nn.Module, *_: Tensor, make: Callable[[nn.Linear], Callable[[Tensor], Any]]) -> nn.Module:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, _Function(make(child)))
    return module


def _own(module: nn.Module, *_: Tensor) -> nn.Module:
    pack_linears(module, "int8")
    return module


def _medium(module: nn.Module, *_: Tensor) -> Score:
    def score(*given: Tensor) -> Any:
        torch.set_float32_matmul_precision("medium")
        found = module(*given)
        torch.set_float32_matmul_precision("highest")
        return found

    return score


def _dynamic(module: nn.Module, *_: Tensor, engine: str) -> Any:
    torch.backends.quantized.engine = engine
    quantize: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings(action="ignore"):  # deprecated, as quantized tensors are
        return quantize(module, {nn.Linear}, torch.qint8)


def _torchao(module: nn.Module, *_: Tensor) -> nn.Module:
    quantization: Any = importlib.import_module("torchao.quantization")
    quantization.quantize_(module, quantization.Int8DynamicActivationInt8WeightConfig())
    return module


def _compiled(module: nn.Module, *_: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, dynamic=True, options={"freezing": True})


def _ahead(module: nn.Module, *given: Tensor) -> Any:
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(module, given, dynamic_shapes=(batch, batch))
    with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
        options: Any = {"package_path": file.name, "inductor_configs": {"freezing": True}}
        torch._inductor.aoti_compile_and_package(program, **options)
        return torch._inductor.aoti_load_package(file.name)


def _halves(way: Way) -> Way:
    def make(*given: Any) -> Score:  # of all in bfloat16, the model among them
        score: Any = way(*(each.bfloat16() for each in given))
        return lambda *inputs: score(*(each.bfloat16() for each in inputs)).float()

    return make


WAYS: Final[dict[str, Way]] = {
    BASELINE: lambda module, *_: module,
    "float32, weights packed": partial(_replaced, make=_by_onednn),
    'float32, matmul precision "medium"': _medium,
    "bfloat16 linear layers": partial(_replaced, make=_in_bfloat16),
    "bfloat16, autocast": lambda module, *_: lambda *x: torch.autocast("cpu", torch.bfloat16)(module)(*x).float(),
    "bfloat16 model": _halves(lambda module, *_: module),
    "bfloat16 model, weights packed": _halves(partial(_replaced, make=_by_onednn)),
    **{f"int8, quantize_dynamic, {each}": partial(_dynamic, engine=each) for each in ("x86", "fbgemm", "onednn")},
    "int8, tierstore serve --dense int8": _own,
}
COMPILED: Final[dict[str, Way]] = {
    "float32, torch.compile": _compiled,
    "float32, AOTInductor": _ahead,
    "bfloat16 model, torch.compile": _halves(_compiled),
    "bfloat16 model, AOTInductor": _halves(_ahead),
    "int8, torchao": _torchao,
    "int8, torchao, torch.compile": lambda module, *_: _compiled(_torchao(module)),
}
"""By a C++ compiler, or by a package that tierstore does not bring."""
