"""A whole model over a store: tiered modules in the place of its ``nn.Embedding`` and ``nn.EmbeddingBag``, and back."""

import copy as copying
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .. import optim
from ..config import TableConfig, require_names
from ..errors import TableError
from ..exchange.keys import StateTensor, state_tensors
from ..exchange.rows import chunks, write_rows
from ..init import Initializer, Normal
from ..layout import MAX_ROWS
from ..pool.transfers import raw_weights
from ..store import Store, Table
from ..store.version import TableState
from ..system.checks import require_int
from .embedding import TieredEmbedding, TieredEmbeddingBag
from .module import TieredModule

Rules = optim.Optimizer | Mapping[str, optim.Optimizer] | torch.optim.Optimizer
"""One for all tables, by name, or what trains the weights."""


def rules_of(given: Rules | None, name: str, weight: Tensor) -> tuple[optim.Optimizer | None, Mapping[str, Any]]:
    """(the rule, None if none is given; the optimizer's state of the weight). ValueError: there is none for this
    weight, or it has no counterpart. TypeError: ``given`` is something else."""
    if given is None or isinstance(given, optim.Optimizer):
        return given, {}
    if isinstance(given, torch.optim.Optimizer):
        for group in given.param_groups:
            if any(each is weight for each in group["params"]):
                return _rule_of(type(given).__name__, group), given.state.get(weight, {})
        if not weight.requires_grad:
            return None, {}
        raise ValueError("the optimizer does not train its weight; give optimizer={name: tierstore.optim....}")
    if not isinstance(given, Mapping) or not all(isinstance(each, optim.Optimizer) for each in given.values()):
        raise TypeError(
            "optimizer must be a tierstore.optim.Optimizer, a dict of those by module name, or a torch optimizer, not "
            f"{type(given).__name__}"
        )
    if name not in given:
        raise ValueError(f"optimizer has no rule for it, but for {list(given)}")
    return given[name], {}


def _rule_of(kind: str, group: Mapping[str, Any]) -> optim.Optimizer:
    for option, default in (("momentum", 0), ("lr_decay", 0), ("amsgrad", False), ("maximize", False)):
        if group.get(option, default) != default:
            raise ValueError(f"{option}={group[option]} of torch.optim.{kind} has no counterpart: leave it out")
    common: dict[str, Any] = {"lr": float(group["lr"]), "weight_decay": float(group.get("weight_decay", 0))}
    if kind == "SGD":
        return optim.SGD(**common)
    if kind in ("Adagrad", "RowWiseAdagrad"):  # the second is TorchRec's
        rule = optim.Adagrad if kind == "Adagrad" else optim.RowWiseAdagrad
        first = float(group["initial_accumulator_value"])
        return rule(**common, eps=group["eps"], initial_accumulator_value=first)
    if kind in ("Adam", "AdamW", "SparseAdam"):
        decoupled = kind == "AdamW" or group.get("decoupled_weight_decay", False)
        return optim.Adam(**common, betas=tuple(group["betas"]), eps=group["eps"], decoupled=decoupled)
    raise ValueError(
        f"{kind} has no counterpart: give optimizer= SGD, Adagrad, RowWiseAdagrad or Adam of tierstore.optim"
    )


__all__ = ["convert", "plain_model"]

Embedding = nn.Embedding | nn.EmbeddingBag
_ROOT: Final = "embedding"
"""The table's name where the model itself is the embedding."""


@dataclass(kw_only=True)
class Weight:
    """A weight that becomes a table, and the modules that look it up: several if they share it."""

    name: str
    weight: Tensor
    modules: list[Embedding] = field(default_factory=list)

    @property
    def modes(self) -> list[Any]:
        """Of the bags among the modules, distinct."""
        return sorted({module.mode for module in self.modules if isinstance(module, nn.EmbeddingBag)})


class _Move(NamedTuple):
    """A weight, the table that it becomes, and the state of the optimizer that trained it."""

    of: Weight
    config: TableConfig
    state: Mapping[str, Any]


def convert(
    model: nn.Module,
    store: Store,
    *,
    min_rows: int = 1,
    names: Collection[str] | None = None,
    optimizer: "Rules | None" = None,
    init: Initializer | None = None,
    copy: bool = True,
) -> nn.Module:
    """Put a tiered module in the place of each ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model.

    A table has the name of its module, such as ``"user.embedding"``. Rows are copied in chunks of 8 MiB. A weight on
    the meta device is never made whole: its table's first values are those of ``init``. Modules that share a weight
    share a table. Mode, ``padding_idx``, ``requires_grad`` and ``training`` stay.

    Args:
        model: changed in place. Its other modules stay as they are.
        store: open for writing; or for reading, with ``copy=False``.
        min_rows: modules with fewer rows stay.
        names: modules to convert, as ``model.named_modules()`` names them; default: all with ``min_rows`` rows.
        optimizer: the update rule of each table. A ``tierstore.optim.Optimizer`` for all; or a dict of those by module
            name; or the ``torch.optim.Optimizer`` of the weights: SGD without momentum, Adagrad, Adam, AdamW or
            SparseAdam. Then rate, settings and state come along, and the weights leave that optimizer.
        init: first values of rows that are not copied; default: normal with std 1, as torch's modules have them.
        copy: whether to copy rows. With False the rows are the store's, also of tables that it has from an earlier run;
            weights and optimizer state of the model are dropped.

    Returns:
        the model; its successor if the model itself is an embedding.

    Raises:
        ValueError: modules cannot be converted: each is named with its reason. Nothing was changed.
        TableError: the store has a table of that name which is another, or whose rows would be overwritten. Nothing
            was changed. ReadOnlyError, DiskFullError, ClosedError: the model was not changed.
    """
    if not isinstance(store, Store):
        raise TypeError(f"store must be a Store, as tierstore.open gives, not {type(store).__name__}")
    require_int(min_rows, "min_rows", 0, MAX_ROWS)
    weights, refused = weights_of(model, _chosen(model, min_rows, names))
    _require_none(refused)
    moves = _moves(weights, store, optimizer, init or Normal(std=1.0), copy=copy)
    made: dict[int, nn.Module] = {}
    for move in moves:
        table = store.create_table(move.config)
        if copy and not move.of.weight.is_meta:
            _copy_rows(table, move)
        made |= {id(module): _tiered(module, table) for module in move.of.modules}
    if isinstance(optimizer, torch.optim.Optimizer):
        leave(optimizer, weights)
    return replaced(model, made)


def plain_model(model: nn.Module) -> nn.Module:
    """A copy of a model with ``nn.Embedding`` and ``nn.EmbeddingBag`` in the place of tiered modules.

    For an ONNX or TorchScript export, or where tierstore is not installed. All rows are in memory at once, as float32.
    The model itself is not changed.

    Raises:
        ValueError: a tiered module is no ``TieredEmbedding`` or ``TieredEmbeddingBag`` of a whole store; it is named.
        TableError: a table has dynamic ids, which modules of torch do not find.
    """
    for name, module in model.named_modules():
        if isinstance(module, TieredModule) and not isinstance(getattr(module, "table", None), Table):
            raise ValueError(f"{name!r} is a {type(module).__name__}, which has no counterpart in torch")
        if isinstance(module, TieredEmbedding | TieredEmbeddingBag) and module.table.ids is not None:
            raise TableError(
                f"table {module.table.name!r} has dynamic ids, which modules of torch do not find: keep {name!r} as it "
                "is, or export the table's rows with their ids (tierstore export)"
            )
    weights: dict[Table, nn.Parameter] = {}
    made: dict[int, nn.Module] = {}
    plain = copying.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, TieredEmbedding | TieredEmbeddingBag):
            if module.table not in weights:
                weights[module.table] = nn.Parameter(_rows_of(module.table))
            made[id(module)] = _of_torch(module, weights[module.table])
    return replaced(plain, made)


def _chosen(model: nn.Module, min_rows: int, names: Collection[str] | None) -> Iterator[tuple[str, Embedding]]:
    """Modules to convert by name; one that has several names comes several times."""
    require_names(names, "names")
    found = {
        name: each
        for name, each in model.named_modules(remove_duplicate=False)
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    if unknown := [name for name in names or () if name not in found]:
        raise ValueError(f"names: {unknown[0]!r} is no nn.Embedding or nn.EmbeddingBag of the model: {list(found)}")
    for name, module in found.items():
        if module.num_embeddings >= min_rows if names is None else name in names:
            yield name, module


def weights_of(model: nn.Module, chosen: Iterable[tuple[str, Embedding]]) -> tuple[list[Weight], dict[str, str]]:
    """Those of the modules given by name; and by the name of a module, why its weight cannot be a table."""
    found: dict[int, Weight] = {}
    refused: dict[str, str] = {}
    for name, module in chosen:
        own = found.setdefault(id(module.weight), Weight(name=name or _ROOT, weight=module.weight))
        if module not in own.modules:
            own.modules.append(module)
            if reason := _reason(module):
                refused[name] = reason
    ours = {id(module) for own in found.values() for module in own.modules}
    names = {_memory(own.weight): own.name for own in found.values()}
    for owner_name, owner in model.named_modules():
        if isinstance(owner, DistributedDataParallel):
            refused[owner_name] = "is a DistributedDataParallel: give its module before it is wrapped"
        for part, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if _memory(tensor) in names and id(owner) not in ours:
                there = f"{owner_name}.{part}".lstrip(".")
                refused[names[_memory(tensor)]] = (
                    f"its weight is {there} of the model, too: look those rows up in both places"
                )
    for own in found.values():
        if len(own.modes) > 1:
            refused[own.name] = f"bags that share its weight pool by {' and '.join(own.modes)}; a table has one mode"
    return list(found.values()), refused


def _require_none(refused: Mapping[str, str]) -> None:
    if refused:
        said = "".join(f"\n  {name or _ROOT!r}: {reason}" for name, reason in refused.items())
        raise ValueError(f"nothing was converted. Change these modules, or name the others in names=[...]:{said}")


def _reason(module: Embedding) -> str:
    """Why a module cannot be converted; "" if it can."""
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        return f"is a {type(module).__name__}, which may compute something else than torch's own"
    if module.max_norm is not None:
        return "max_norm: rows of a table are not renormalized"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq: gradients of a table are summed over a batch"
    if module.weight.dtype != torch.float32:
        return f"its weight is {module.weight.dtype}, but a tiered module gives float32: convert model.float()"
    hooks = [name for name, value in vars(module).items() if name.endswith("_hooks") and value]
    if hooks:
        return f"it has hooks ({', '.join(hooks)}), which would be lost: register them after this"
    return ""


def _memory(tensor: Tensor) -> Any:
    """Equal of tensors that share memory."""
    return id(tensor) if tensor.is_meta or not tensor.numel() else tensor.untyped_storage().data_ptr()


def _moves(
    weights: list[Weight], store: Store, optimizer: "Rules | None", init: Initializer, *, copy: bool
) -> list[_Move]:
    """The table of each weight. ValueError, TableError if one cannot be; nothing was changed."""
    refused: dict[str, str] = {}
    moves: list[_Move] = []
    for each in weights:
        if not each.weight.is_meta and each.weight.device != store.device:
            refused[each.name] = f"it is on {each.weight.device}, but the store's results are on {store.device}"
        try:
            rule, state = rules_of(optimizer, each.name, each.weight)
        except ValueError as error:
            refused[each.name] = str(error)
            continue
        shape, pooling = tuple(each.weight.shape), (*each.modes, "sum")[0]
        known = store[each.name].config if each.name in store and rule is None and not copy else None
        if known is None or (known.num_embeddings, known.embedding_dim, known.pooling) != (*shape, pooling):
            known = TableConfig(
                name=each.name, num_embeddings=shape[0], embedding_dim=shape[1], pooling=pooling, init=init,
                optimizer=rule or optim.SGD(),
            )  # fmt: skip
        moves.append(_Move(each, known, state))
    _require_none(refused)
    for move in moves:
        store.find_or_require(move.config)
        if copy and store.has_rows_of(move.config.name):
            raise TableError(
                f"{store.directory} has rows of table {move.config.name!r} from before, which those of the model would "
                "overwrite: copy=False takes the store's, as in convert(model, store, copy=not store.version)"
            )
    return moves


def _copy_rows(table: Table, move: _Move) -> None:
    parts = state_tensors(table.config.optimizer, table.layout.dim)
    has_state = bool(parts) and all(part.name in move.state for part in parts)
    for start, stop in chunks(table):
        weights = raw_weights(move.of.weight.detach()[start:stop].cpu().contiguous())
        write_rows(table, start, weights, state_rows(move.state, parts, start, stop) if has_state else None)
    if "step" in move.state:
        table.restore(TableState(int(move.state["step"]), table.learning_rate))


def state_rows(state: Mapping[str, Any], parts: tuple[StateTensor, ...], start: int, stop: int) -> Any:
    columns = [state[part.name][start:stop].detach().cpu().float().reshape(stop - start, -1) for part in parts]
    return torch.cat(columns, dim=1).contiguous().numpy()


def leave(optimizer: torch.optim.Optimizer, weights: list[Weight]) -> None:
    gone = {id(each.weight) for each in weights}
    for group in optimizer.param_groups:
        group["params"] = [each for each in group["params"] if id(each) not in gone]
    for each in weights:
        optimizer.state.pop(each.weight, None)


def _tiered(module: Embedding, table: Table) -> nn.Module:
    made: TieredModule
    if isinstance(module, nn.Embedding):
        made = TieredEmbedding(table, padding_idx=module.padding_idx)
    else:
        last, padding = module.include_last_offset, module.padding_idx
        made = TieredEmbeddingBag(table, include_last_offset=last, padding_idx=padding)
    made.requires_grad_(module.weight.requires_grad and made.rows.requires_grad)
    return made.train(module.training)


def _of_torch(module: TieredEmbedding | TieredEmbeddingBag, weight: nn.Parameter) -> nn.Module:
    rows, dim = weight.shape
    made: Embedding
    if isinstance(module, TieredEmbeddingBag):
        last, padding = module.include_last_offset, module.padding_idx
        made = nn.EmbeddingBag(
            rows, dim, mode=module.mode, include_last_offset=last, padding_idx=padding, _weight=weight
        )
    else:
        padding = module.padding_idx
        made = nn.Embedding(rows, dim, padding_idx=padding, _weight=weight)
        if padding is not None:  # which gives zeros until it is written
            with torch.no_grad():
                weight[padding] = module.forward(torch.tensor(padding))
    made.weight = weight
    weight.requires_grad_(module.rows.requires_grad or module.table.store.readonly)
    return made.train(module.training)


def _rows_of(table: Table) -> Tensor:
    out = torch.empty((table.config.num_embeddings, table.layout.dim), device=table.store.device)
    for start, stop in chunks(table):
        out[start:stop] = table.read(torch.arange(start, stop))
    return out


def replaced(model: nn.Module, made: Mapping[int, nn.Module]) -> nn.Module:
    """The model with modules made by the id of those that they replace."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if id(child) in made:
                parent._modules[name] = made[id(child)]
    return made.get(id(model), model)
