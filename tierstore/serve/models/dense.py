"""A served model's linear layers in fewer bits, on the CPU."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import DamagedError
from ...kernels.quantized import quantize_rows, scale_sums

Dense = Literal["float32", "bfloat16", "int8"]
"""What the linear layers of a model compute in."""
WEIGHTS_MIN: Final = 1 << 14
"""Of a layer in fewer bits. A smaller one is not faster in them, and stays float32."""


class _LowLinear(nn.Module):
    """``weight`` [N, K] and ``bias`` are the float32 parameters; ``pack`` takes over what they are now."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.pack()

    def pack(self) -> None:
        raise NotImplementedError


class Bfloat16Linear(_LowLinear):
    """Inputs, parameters and results are rounded to bfloat16."""

    instructions = "AVX512_BF16"
    is_fast = staticmethod(torch.cpu._is_avx512_bf16_supported)

    def pack(self) -> None:
        self._parameters16 = self.weight.detach().bfloat16(), self.bias.detach().bfloat16()

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs.bfloat16(), *self._parameters16).float()

    @staticmethod
    def stored(name: str, weight: Tensor) -> dict[str, Tensor]:
        return {name: weight.bfloat16()}

    @staticmethod
    def taken(name: str, tensors: dict[str, Tensor]) -> Tensor:
        return tensors.pop(name).float()


class Int8Linear(_LowLinear):
    """Weights have one scale for each output, inputs one for each sample. Sums are exact, so a sample's result has the
    same bits whatever else is in its batch. A weight is stored as ``.levels``, int8 [N, K], and ``.scales``, float32
    [N]."""

    instructions = "AVX512_VNNI"
    is_fast = staticmethod(torch.cpu._is_vnni_supported)

    def pack(self) -> None:
        self._levels, self._scales = _quantized(self.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        levels, scales = _quantized(inputs.reshape(-1, inputs.shape[-1]).contiguous())
        sums = torch._int_mm(levels, self._levels.t())
        out = np.empty(sums.shape, np.float32)
        scale_sums(sums.numpy(), scales, self._scales, self.bias.detach().numpy(), out)
        return torch.from_numpy(out).reshape(*inputs.shape[:-1], len(self.weight))

    @staticmethod
    def stored(name: str, weight: Tensor) -> dict[str, Tensor]:
        levels, scales = _quantized(weight)
        return {f"{name}.levels": levels, f"{name}.scales": torch.from_numpy(scales)}

    @staticmethod
    def taken(name: str, tensors: dict[str, Tensor]) -> Tensor:
        levels, scales = tensors.pop(f"{name}.levels"), tensors.pop(f"{name}.scales", torch.empty(0))
        if scales.shape != levels.shape[:1]:
            raise DamagedError(f"{name}.levels of a commit is {list(levels.shape)}, .scales {list(scales.shape)}")
        return levels * scales.unsqueeze(1)


def _quantized(rows: Tensor) -> tuple[Tensor, Any]:
    """int8 [n, K] and a float32 scale of each row."""
    levels, scales, values = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32), rows.numpy()
    quantize_rows(values, values.view(np.int32), levels, scales)
    return torch.from_numpy(levels), scales


LowLinear = Bfloat16Linear | Int8Linear
"""``nn.Linear`` in fewer bits: float32 [..., K] to float32 [..., N].

``is_fast``: whether the processor has the ``instructions`` without which float32 is faster. ``stored`` gives what a
commit has in place of a weight; ``taken`` takes that out of its tensors, for a weight that packs to the same.
"""
LOW: Final[Mapping[str, type[LowLinear]]] = {"bfloat16": Bfloat16Linear, "int8": Int8Linear}
"""By type, from more to fewer bytes."""
_MARKS: Final = {("", torch.bfloat16): "bfloat16", (".levels", torch.int8): "int8"}
"""What a commit has after ``.weight``, and its dtype, of a layer of each type."""


def lowered(tensors: Mapping[str, Tensor], layers: Mapping[str, str]) -> dict[str, Tensor]:
    """A commit's tensors, the weights of some layers in their types."""
    found = dict(tensors)
    for layer, dtype in layers.items():
        name = f"model.{layer}.weight"
        found |= LOW[dtype].stored(name, found.pop(name))
    return found


def in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back from ``lowered``. DamagedError: levels without their scales."""
    found = dict(tensors)
    for layer, dtype in low_layers(tensors).items():
        name = f"model.{layer}.weight"
        found[name] = LOW[dtype].taken(name, found)
    return found


def low_layers(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The types of a commit's layers that are not in float32."""
    found = {}
    for name, each in tensors.items():
        layer, weight, rest = name.removeprefix("model.").rpartition(".weight")
        if weight and name.startswith("model.") and (dtype := _MARKS.get((rest, each.dtype))):
            found[layer] = dtype
    return found


def pack_linears(model: nn.Module, dense: Dense, layers: Mapping[str, str] = MappingProxyType({})) -> list[LowLinear]:
    """Put a ``LowLinear`` in the place of a model's large linear layers, or of those of a
    ``torch.export.ExportedProgram``'s module, and return them; for "float32" only of ``layers``, in their types.
    ValueError: there are none to replace, or the processor is slow at it."""
    if dense == "float32":
        named = [(name, each) for name, each in model.named_modules() if name in layers and type(each) is nn.Linear]
        for name, each in named:
            model.set_submodule(name, LOW[layers[name]](each.weight, each.bias))
        return [each for each in model.modules() if isinstance(each, LowLinear)]
    low = LOW[dense]
    if not low.is_fast():
        found = f"torch {torch.__version__} finds no {low.instructions} on this processor"
        raise ValueError(f"dense={dense!r}: {found}, without which float32 is faster; serve with --dense float32")
    made: list[LowLinear] = []

    def packed(weight: Any, bias: Any) -> LowLinear | None:
        if weight.dtype != torch.float32 or weight.numel() < WEIGHTS_MIN:
            return None
        made.append(low(weight, bias))
        return made[-1]

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (new := packed(child.weight, child.bias)):
                setattr(parent, name, new)
    if isinstance(model, torch.fx.GraphModule):
        _replace_nodes(model, packed)
    if not made:
        large = f"no linear layer of at least {WEIGHTS_MIN:,} weights"
        raise ValueError(f"dense={dense!r}: the model has {large}, and smaller ones are faster in float32: serve it so")
    return made


def _replace_nodes(module: torch.fx.GraphModule, packed: Callable[[Any, Any], LowLinear | None]) -> None:
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        inputs, *parameters = [each for each in node.args if each is not None]
        if any(each.op != "get_attr" for each in parameters):
            continue
        weight, bias = [*(attrgetter(each.target)(module) for each in parameters), None][:2]
        if new := packed(weight, bias):
            module.add_submodule(f"low_{node.name}", new)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.call_module(f"low_{node.name}", (inputs,)))
            module.graph.erase_node(node)
    module.recompile()
