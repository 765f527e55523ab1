"""A program of torch.export, read from its file: what it takes and gives, by name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...nn.checkpoint import model_state
from ..messages import TensorSpec
from .dense import Dense, LowLinear, pack_linears

DTYPES: Final = {"FP32": torch.float32, "INT32": torch.int32, "INT64": torch.int64}
_DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items()}
_SMALLEST_BATCH: Final = 2
"""The lower bound that torch.export gives a dimension by itself: it takes 1, too."""


class Program(NamedTuple):
    """A program; each shape begins with -1, the batch. ``dicts``: names of the inputs in each argument that is a
    dict. ``weights``: parameters and buffers as the file has them. ``packed``: linear layers in fewer bits."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    module: Any
    in_spec: Any
    dicts: tuple[tuple[str, ...], ...]
    weights: dict[str, Tensor]
    packed: Sequence[LowLinear] = ()

    def weights_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its parameters and buffers as a commit has them, of the module that was exported or of one that this was a
        part of; {} if it has not all, or in several places."""
        return _found(self.weights, model_state(tensors))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these, or, if they are none, with the file's."""
        own = self.module.state_dict()
        with torch.no_grad():
            for name, each in (weights or self.weights).items():
                own[name].copy_(each)
        for layer in self.packed:
            layer.pack()

    @property
    def name(self) -> str:
        """The file's, without its suffix."""
        return self.path.stem

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Its outputs of a batch, in order."""
        args, kwargs = pytree.tree_unflatten(list(inputs), self.in_spec)
        return list(pytree.tree_leaves(self.module(*args, **kwargs)))


def load_program(path: Path, *, max_samples: int, dense: Dense = "float32") -> Program:
    """Read what ``torch.export.save`` wrote, and run it once. ValueError names what cannot be served."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; write one with torch.export.save")
    try:
        exported = torch.export.load(path)
    except Exception as error:
        message = f"{path} is no program that torch {torch.__version__} loads; write it with torch.export.save: {error}"
        raise ValueError(message) from error
    try:
        program = _described(path, exported, max_samples)
        return program._replace(packed=pack_linears(program.module, dense))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _described(path: Path, exported: Any, max_samples: int) -> Program:
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    signature, call = exported.graph_signature, exported.call_spec
    batches: set[Any] = set()
    inputs, outputs = (
        tuple(_spec(kind, name, values.get(place, place), batches) for name, place in zip(names, places, strict=True))
        for kind, names, places in (
            ("input", _input_names(exported), signature.user_inputs),
            ("output", _output_names(call.out_spec), signature.user_outputs),
        )
    )
    if not inputs or not outputs:
        raise ValueError("it takes or gives no tensor")
    if len(batches) > 1:
        raise ValueError(f"its batch is of several sizes, {batches}; give all inputs one torch.export.Dim for it")
    limits = exported.range_constraints.get(batches.pop())
    if limits is not None and (limits.lower > _SMALLEST_BATCH or limits.upper < max_samples):
        raise ValueError(
            f"it takes batches of {limits.lower} to {limits.upper} samples, and the server makes those of 1 to "
            f"{max_samples}; export it with torch.export.Dim('batch'), or serve with --max-batch-samples"
        )
    module = exported.module()
    weights = {name: each.clone() for name, each in module.state_dict().items()}
    program = Program(path, inputs, outputs, module, call.in_spec, _dicts(call.in_spec), weights)
    for samples in (1, 2):
        zeros = [torch.zeros(samples, *spec.shape[1:], dtype=DTYPES[spec.datatype]) for spec in inputs]
        try:
            with torch.inference_mode():
                program.run(zeros)
        except Exception as error:
            raise ValueError(f"it fails on {samples} samples of zeros: {error}") from error
    return program


def _found(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def is_there(prefix: str) -> bool:
        pairs = [(state.get(prefix + name), each) for name, each in wanted.items()]
        return all(has is not None and (has.shape, has.dtype) == (each.shape, each.dtype) for has, each in pairs)

    first = next(iter(wanted), "")
    prefixes = [name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")]
    whole = [prefix for prefix in prefixes if is_there(prefix)]
    return {name: state[whole[0] + name] for name in wanted} if len(whole) == 1 else {}


def _spec(kind: str, name: str, value: Any, batches: set[Any]) -> TensorSpec:
    """Of an input or output, whose batch dimension is added to ``batches``."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{kind} {name!r} is {value!r}; a served program takes and gives tensors only")
    found = f"{kind} {name!r} is {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value.dtype not in _DATATYPES:
        raise ValueError(f"{found}; float32, int32 and int64 are served: cast it in forward")
    if value.device.type != "cpu":
        raise ValueError(f"{found} on {value.device}; export the program on the CPU")
    batch, *rest = [*value.shape, None][: max(1, value.dim())]
    expression = batch.node.expr if isinstance(batch, torch.SymInt) else None
    if expression is None or not expression.is_Symbol:
        way_out = f"dynamic_shapes={{{name!r}: {{0: torch.export.Dim('batch')}}, ...}}"
        raise ValueError(f"{found}; its first dimension must be the dynamic batch: torch.export.export(..., {way_out})")
    if not all(type(size) is int for size in rest):
        raise ValueError(f"{found}; only its first dimension, the batch, may be dynamic")
    batches.add(expression)
    return TensorSpec(name, _DATATYPES[value.dtype], (-1, *rest))


def _paths(spec: Any) -> list[Any]:
    """The way to each leaf."""
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    return [path for path, _ in pytree.tree_leaves_with_path(tree)]


def _key(path: Any) -> str | None:
    last = path[-1] if path else None
    if isinstance(last, pytree.MappingKey):
        return str(last.key)
    return str(last.name) if isinstance(last, pytree.GetAttrKey) else None


def _dicts(in_spec: Any) -> tuple[tuple[str, ...], ...]:
    arguments: dict[Any, list[str]] = {}
    for path in _paths(in_spec):
        if len(path) > 2 and isinstance(path[-1], pytree.MappingKey):
            arguments.setdefault(path[:-1], []).append(str(path[-1].key))
    return tuple(map(tuple, arguments.values()))


def _input_names(exported: Any) -> list[str]:
    """Of each input its key if it lies in a dict, else its argument's name."""
    arguments = exported.module_call_graph[0].signature.forward_arg_names or []
    names = []
    for path, place in zip(_paths(exported.call_spec.in_spec), exported.graph_signature.user_inputs, strict=True):
        is_argument = len(path) == 2 and path[1].idx < len(arguments) if _key(path) is None else False
        names.append(_key(path) or (arguments[path[1].idx] if is_argument else str(place)))
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{count} inputs are named {name!r}; rename them")
    return names


def _output_names(spec: Any) -> list[str]:
    """Of each output its key; else "output", or "output_0" and so on of several."""
    paths = _paths(spec)
    plain = ["output"] if len(paths) == 1 else [f"output_{index}" for index in range(len(paths))]
    return [_key(path) or name for path, name in zip(paths, plain, strict=True)]
