"""A served model's linear layers in int8, on the CPU."""

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import DamagedError
from ...kernels.int8 import quantize_rows, scale_sums

Dense = Literal["float32", "int8"]
"""What the linear layers of a model compute in."""
WEIGHTS_MIN: Final = 1 << 14
"""Of a layer in int8. A smaller one is not faster in it, and stays float32."""


class Int8Linear(nn.Module):
    """``nn.Linear`` in int8: float32 [..., K] to float32 [..., N].

    Weights have one scale for each output, inputs one for each sample. Sums are exact, so a sample's result has the
    same bits whatever else is in its batch. ``weight`` and ``bias`` are the float32 parameters; ``pack`` takes over
    what they are now.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias
        self.pack()

    def pack(self) -> None:
        self._levels, self._scales = _quantized(self.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        levels, scales = _quantized(inputs.reshape(-1, inputs.shape[-1]).contiguous())
        sums = torch._int_mm(levels, self._levels.t())
        out = np.empty(sums.shape, np.float32)
        scale_sums(sums.numpy(), scales, self._scales, self.bias.detach().numpy(), out)
        return torch.from_numpy(out).reshape(*inputs.shape[:-1], len(self.weight))


def _quantized(rows: Tensor) -> tuple[Tensor, Any]:
    """int8 [n, K] and a float32 scale of each row."""
    levels, scales, values = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32), rows.numpy()
    quantize_rows(values, values.view(np.int32), levels, scales)
    return torch.from_numpy(levels), scales


def in_int8(tensors: Mapping[str, Tensor], layers: Collection[str]) -> dict[str, Tensor]:
    """A commit's tensors, the weights [N, K] of some layers as ``.levels``, int8 [N, K], and ``.scales``, float32 [N].
    ``in_float32`` gives weights that an ``Int8Linear`` packs to the same levels."""
    found = dict(tensors)
    for name in (f"model.{each}.weight" for each in layers):
        levels, scales = _quantized(found.pop(name))
        found |= {f"{name}.levels": levels, f"{name}.scales": torch.from_numpy(scales)}
    return found


def in_float32(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The way back from ``in_int8``. DamagedError: levels without their scales."""
    found = dict(tensors)
    for name in (f"model.{each}.weight" for each in layers_in_int8(tensors)):
        levels, scales = found.pop(f"{name}.levels"), found.pop(f"{name}.scales", torch.empty(0))
        if scales.shape != levels.shape[:1]:
            raise DamagedError(f"{name}.levels of a commit is {list(levels.shape)}, .scales {list(scales.shape)}")
        found[name] = levels * scales.unsqueeze(1)
    return found


def layers_in_int8(tensors: Collection[str]) -> set[str]:
    """Of a commit with such tensors."""
    begin, end = "model.", ".weight.levels"
    return {each[len(begin) : -len(end)] for each in tensors if each.startswith(begin) and each.endswith(end)}


def pack_linears(model: nn.Module, dense: Dense, layers: Collection[str] = ()) -> list[Int8Linear]:
    """Put ``Int8Linear`` in the place of a model's linear layers, or of those of a ``torch.export.ExportedProgram``'s
    module, and return them; for "float32" only of ``layers``. ValueError: there are none to replace, or the processor
    is slow at it."""
    if dense == "float32":
        named = [(name, each) for name, each in model.named_modules() if name in layers and type(each) is nn.Linear]
        for name, each in named:
            model.set_submodule(name, Int8Linear(each.weight, each.bias))
        return [each for each in model.modules() if isinstance(each, Int8Linear)]
    if not torch.cpu._is_vnni_supported():
        found = f"torch {torch.__version__} finds no AVX512_VNNI on this processor"
        raise ValueError(f"dense={dense!r}: {found}, without which float32 is faster; serve with --dense float32")
    made: list[Int8Linear] = []

    def packed(weight: Any, bias: Any) -> Int8Linear | None:
        if weight.dtype != torch.float32 or weight.numel() < WEIGHTS_MIN:
            return None
        made.append(Int8Linear(weight, bias))
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


def _replace_nodes(module: torch.fx.GraphModule, packed: Callable[[Any, Any], Int8Linear | None]) -> None:
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        inputs, *parameters = [each for each in node.args if each is not None]
        if any(each.op != "get_attr" for each in parameters):
            continue
        weight, bias = [*(attrgetter(each.target)(module) for each in parameters), None][:2]
        if new := packed(weight, bias):
            module.add_submodule(f"int8_{node.name}", new)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.call_module(f"int8_{node.name}", (inputs,)))
            module.graph.erase_node(node)
    module.recompile()
