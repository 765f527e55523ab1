"""A model of one's own: a program of torch.export, read from its file, its rows from the store's tiers."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...ids import of_strings
from ...nn.checkpoint import model_state
from ...nn.collection import TieredEmbeddingBagCollection
from ...nn.jagged import KeyedJaggedTensor
from ...settings.sections import nearest
from ...store import Store, Table
from ...system.checks import excerpt
from ...train.checkpoint import saved_config
from ..base import Model, Outputs, Pause
from ..messages import DATATYPES, InferTensor, ModelMetadata, TensorSpec
from .dense import Dense, LowLinear, pack_linears
from .jagged import (
    Dropped,
    Features,
    JaggedIds,
    Merged,
    check_inputs,
    invalid,
    lengths_name,
    lengths_of,
    merge,
    parts_of,
    require_finite,
)
from .lookups import feature_inputs, limits_of

DTYPES: Final = {"FP32": torch.float32, "INT32": torch.int32, "INT64": torch.int64}
_DATATYPES: Final = {dtype: datatype for datatype, dtype in DTYPES.items()}
_SMALLEST_BATCH: Final = 2
"""The lower bound that torch.export gives a dimension by itself: it takes 1, too."""


class Program(NamedTuple):
    """A program; each shape begins with -1, the batch. ``weights``: parameters and buffers as the file has them.
    ``packed``: linear layers in fewer bits. ``texts``: arguments of ``ids.of_strings`` for each feature, where requests
    may have texts."""

    path: Path
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    module: Any
    in_spec: Any
    weights: dict[str, Tensor]
    packed: Sequence[LowLinear] = ()
    texts: Mapping[str, Mapping[str, Any]] = {}

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
    extra = {"of_strings": ""}
    try:
        exported = torch.export.load(path, extra_files=extra)
    except Exception as error:
        message = f"{path} is no program that torch {torch.__version__} loads; write it with torch.export.save: {error}"
        raise ValueError(message) from error
    try:
        program = _described(path, exported, max_samples)
        return program._replace(packed=pack_linears(program.module, dense), texts=_texts(extra["of_strings"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _texts(given: str | bytes) -> dict[str, dict[str, Any]]:
    """Of the extra file "of_strings"; {} without one."""
    try:
        texts = json.loads(given or '{"": {}}')
    except ValueError:
        texts = None
    if not texts or not isinstance(texts, dict) or not all(isinstance(each, dict) for each in texts.values()):
        wanted = 'JSON: for each feature arguments of tierstore.ids.of_strings, as {"item": {"seed": 7}, "user": {}}'
        raise ValueError(f"extra file of_strings is {excerpt(given)}; it must be {wanted}")
    return texts if given else {}


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
    program = Program(path, inputs, outputs, module, call.in_spec, weights)
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


_OTHER_INPUTS: Final = ("values", "lengths")
_OTHER_MODELS: Final = re.compile(r"(ranking|pooled|rows)|(pooled|rows)\..*")
"""Names that are not free, whether or not the store has such a model now."""


class Exported(Model):
    """A model named like its file. An input of the program that is named like a feature of the store gets that
    feature's rows, every other comes with the request, with values INT64 [N] and lengths INT32 [F, B] as of "pooled".
    ``features``: inputs that get rows; None for all that can. ValueError: the program's inputs and the store's features
    do not fit."""

    def __init__(
        self, store: Store, program: Program, dropped: Dropped | None, *, features: Sequence[str] | None = None
    ) -> None:
        if _OTHER_MODELS.fullmatch(program.name):
            raise ValueError(f"{program.path}: {program.name!r} is the name of another model; rename the file")
        owners = {name: table for table in store.tables.values() for name in table.config.feature_names}
        _require_features(program, owners, features)
        if features is not None:
            owners = {name: owners[name] for name in features}
        self._program = program
        self._specs = {spec.name: spec for spec in program.inputs if spec.name in owners}
        self._dense = [spec for spec in program.inputs if spec.name not in owners]
        self._tables = {name: owners[name] for name in self._specs}
        self.tables = list(self._tables.values())
        for spec in program.inputs:
            _require_fit(program, spec, owners)
        pooled = [table.name for name, table in self._tables.items() if len(self._specs[name].shape) == 2]
        self._collection = TieredEmbeddingBagCollection(store, tables=list(dict.fromkeys(pooled)))
        self._features = Features(program.name, limits_of(self._tables), dropped)
        self._texts = _texts_of(program, self._tables, store) if program.texts else {}
        self.metadata = ModelMetadata(
            name=program.name,
            inputs=(*self._dense, *feature_inputs(len(self._specs))),
            outputs=program.outputs,
            parameters={"features": ",".join(self._specs)} | ({"may_be_bytes": "values"} if self._texts else {}),
        )

    def take_weights(self, found: Mapping[str, Tensor]) -> None:
        """Compute with these dense weights, ``Program.weights_of`` a commit, or the file's. Not during ``run``."""
        self._program.load(found)
        where = "of the version" if found else "of the file"
        self.metadata = replace(self.metadata, parameters={**self.metadata.parameters, "dense_weights": where})

    @property
    def features(self) -> list[str]:
        return self._features.names

    def parse(self, inputs: Mapping[str, InferTensor]) -> JaggedIds:
        inputs = check_inputs(inputs, self.metadata.inputs, texts=bool(self._texts))
        num_samples = inputs["lengths"].data.shape[1]
        dense = []
        for spec in self._dense:
            array = np.array(inputs[spec.name].data, DATATYPES[spec.datatype])
            require_finite(spec.name, array)
            if len(array) != num_samples:
                raise invalid(spec.name, f"has {len(array)} samples; {lengths_name(inputs)!r} has {num_samples}")
            dense.append(array)
        if inputs["values"].datatype == "BYTES":
            inputs = {**inputs, "values": self._ids_of(inputs)}
        jagged = self._features.parse(inputs)
        for spec, lengths in zip(self._specs.values(), jagged.lengths, strict=True):
            if len(spec.shape) == 3 and lengths.max() > spec.shape[1]:
                what = f"has {lengths.max()} at sample {lengths.argmax()} of feature {spec.name!r}"
                raise invalid(lengths_name(inputs), f"{what}; the model takes up to {spec.shape[1]} ids a sample")
        return jagged._replace(dense=dense)

    def _ids_of(self, inputs: Mapping[str, InferTensor]) -> InferTensor:
        """Of values that are texts."""
        texts, ids, first = inputs["values"].data.tolist(), list[Any](), 0
        counts = lengths_of(inputs, len(texts), "values").sum(1).tolist()
        for (name, rows), count in zip(limits_of(self._tables).items(), counts, strict=True):
            try:
                found = of_strings(texts[first : first + count], num_embeddings=rows, **self._texts[name])
            except ValueError as error:
                raise invalid("values", f"of feature {name!r} from position {first} on: {error}") from None
            ids.append(found.numpy())
            first += count
        return InferTensor("INT64", np.concatenate(ids))

    def run(self, queries: Sequence[JaggedIds], pause: Pause | None = None) -> list[Outputs]:
        batch = merge(queries)
        dense = [np.concatenate(parts) for parts in zip(*(query.dense for query in queries), strict=True)]
        given = {spec.name: torch.from_numpy(each) for spec, each in zip(self._dense, dense, strict=True)}
        with torch.inference_mode():
            parts = [self._rows(part) for part in parts_of(batch, pause)]
            given |= (
                parts[0] if len(parts) == 1 else {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
            )
            found = self._program.run([given[spec.name] for spec in self._program.inputs])
            arrays = [each.contiguous().numpy() for each in found]
        return [
            {
                spec.name: InferTensor(spec.datatype, array[first:last])
                for spec, array in zip(self._program.outputs, arrays, strict=True)
            }
            for first, last in zip(batch.samples[:-1], batch.samples[1:], strict=True)
        ]

    def _rows(self, batch: Merged) -> dict[str, Tensor]:
        rows = self._pooled(batch)
        for place, (name, spec) in enumerate(self._specs.items()):
            if len(spec.shape) == 3:
                rows[name] = _padded(self._tables[name], batch, place, spec.shape[1])
        return rows

    def _pooled(self, batch: Merged) -> dict[str, Tensor]:
        """float32 [B, D] of each feature that is pooled, by name."""
        names = list(self._specs)
        others = [name for name in self._collection.feature_names if name not in self._specs]  # of the same tables
        empty = np.full(len(others) * int(batch.samples[-1]), len(batch.values))
        offsets = torch.from_numpy(np.concatenate([batch.offsets, empty]))
        jagged = KeyedJaggedTensor([*names, *others], torch.from_numpy(batch.values), offsets=offsets)
        found = self._collection(jagged).to_dict() if self._collection.feature_names else {}
        return {name: found[name].contiguous() for name, spec in self._specs.items() if len(spec.shape) == 2}


def _require_features(program: Program, known: Mapping[str, Any], features: Sequence[str] | None) -> None:
    """ValueError if a feature that the program must have is missing."""
    names = [spec.name for spec in program.inputs]
    for name in features or ():
        if name not in known:
            hint = nearest(name, known, all_are="its features are")
            raise ValueError(f"{program.path}: input {name!r} takes rows, and the store has no such feature; {hint}")
    if not known.keys() & names:
        hint = nearest("", known, all_are="the store's features are")
        raise ValueError(f"{program.path}: none of its inputs ({', '.join(names)}) is named like a feature; {hint}")


def _texts_of(program: Program, tables: Mapping[str, Table], store: Store) -> dict[str, dict[str, Any]]:
    """Arguments of ``of_strings`` for each feature: the program's, else those of the run that trained the store.
    ValueError unless it names each feature, and no other, and says nothing else than the run."""
    if program.texts.keys() != tables.keys():
        raise ValueError(f"{program.path}: file of_strings names {[*program.texts]}; its features are {[*tables]}")
    run, texts = saved_config(store.extra, str(store.directory)), dict[str, dict[str, Any]]()
    for name, rows in limits_of(tables).items():
        try:
            own = {} if run is None or name not in run.data.sparse_columns else {"seed": run.data.hash_seed}
            if run is not None and own and run.data.hashing == "mod":
                raise ValueError('the run has data.hashing = "mod", where texts have no rows: leave the file out')
            if run is not None and own and rows is not None:
                own["column"] = run.data.sparse_columns.index(name)
            texts[name] = {**own, **program.texts[name]}
            if any(texts[name][key] != value for key, value in own.items()):
                raise ValueError(f"{program.texts[name]} is not what the run trained by, {own}: leave it out")
            of_strings((), num_embeddings=rows, **texts[name])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{program.path}: extra file of_strings, feature {name!r}: {error}") from None
    return texts


def _require_fit(program: Program, spec: TensorSpec, owners: Mapping[str, Table]) -> None:
    """ValueError unless the input takes the rows of its feature, or comes with requests."""
    found = f"{program.path}: input {spec.name!r} is {spec.datatype} {list(spec.shape)}"
    table = owners.get(spec.name)
    if table is None:
        if spec.name in _OTHER_INPUTS:
            raise ValueError(f"{found}; requests carry ids by the name {spec.name!r}: rename it")
        return
    dim = table.config.embedding_dim
    if spec.datatype != "FP32" or len(spec.shape) not in (2, 3) or spec.shape[-1] != dim:
        raise ValueError(
            f"{found}; rows of table {table.name!r} have {dim} numbers: export it with float32 [batch, {dim}] for "
            f"pooled rows, or [batch, K, {dim}] for up to K rows a sample"
        )


def _padded(table: Table, batch: Merged, place: int, width: int) -> Tensor:
    """float32 [B, K, D]: the rows of each sample, then zeros."""
    num_samples = int(batch.samples[-1])
    offsets = batch.offsets[place * num_samples : (place + 1) * num_samples + 1]
    lengths = np.diff(offsets)
    rows = table.read(torch.from_numpy(batch.values[offsets[0] : offsets[-1]])).to(torch.float32)
    padded = torch.zeros(num_samples, width, table.config.embedding_dim)
    slots = np.arange(len(rows)) - np.repeat(offsets[:-1] - offsets[0], lengths)
    padded[torch.from_numpy(np.repeat(np.arange(num_samples), lengths)), torch.from_numpy(slots)] = rows
    return padded
