"""A whole model over a store: tiered modules in the place of its ``nn.Embedding`` and ``nn.EmbeddingBag``, and back."""

import copy as copying
import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from .. import optim
from ..config import TableConfig, require_names
from ..errors import TableError
from ..exchange.rows import chunks, write_rows
from ..exchange.tensor_files import state_tensors
from ..init import Initializer, Normal
from ..layout import MAX_ROWS
from ..pool.converting import raw_weights
from ..store import Store, Table
from ..store.version import TableState
from ..system.checks import require_int
from .embedding import TieredEmbedding, TieredEmbeddingBag
from .module import OF_TABLES, TieredModule, joins_gradients, plain_names, take_place

Embedding = nn.Embedding | nn.EmbeddingBag
Rules = optim.Optimizer | Mapping[str, optim.Optimizer] | torch.optim.Optimizer
"""One for all tables, by name, or what trains the weights."""
_ROOT: Final = "embedding"  # the table's name where the model itself is the embedding
_COUNTERPARTS: Final[dict[str, tuple[Any, tuple[str, ...]]]] = {
    "SGD": (optim.SGD, ()),
    "Adagrad": (optim.Adagrad, ("eps", "initial_accumulator_value")),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, ("eps", "initial_accumulator_value")),  # TorchRec's
    **dict.fromkeys(("Adam", "AdamW", "SparseAdam"), (optim.Adam, ("betas", "eps"))),
}
"""Of torch's optimizers, by class: the update rule, and the options that it takes besides rate and weight decay."""
_NO_COUNTERPART: Final = {"momentum": 0, "lr_decay": 0, "amsgrad": False, "maximize": False}  # the only values taken


class Rule(NamedTuple):
    """How a weight is trained: by a rule, None if none was given; of a torch optimizer also that, and what gives the
    parameter group."""

    rule: optim.Optimizer | None
    weight: Tensor
    source: torch.optim.Optimizer | None = None
    follows: Callable[[], Mapping[str, Any] | None] | None = None

    @property
    def state(self) -> Mapping[str, Any]:
        """The torch optimizer's, of the weight."""
        return {} if self.source is None else self.source.state.get(self.weight, {})

    def state_rows(self, config: TableConfig, start: int, stop: int) -> Any:
        """float32 [stop - start, state_dim]; None if there is none."""
        parts, state = state_tensors(config.optimizer, config.embedding_dim), self.state
        if not parts or any(part.name not in state for part in parts):
            return None
        columns = [state[part.name][start:stop].detach().cpu().float().reshape(stop - start, -1) for part in parts]
        return torch.cat(columns, dim=1).contiguous().numpy()

    def rule_of(self, known: TableConfig | None) -> optim.Optimizer:
        """``known``: of the store's table. A rate that is a torch optimizer's is not compared."""
        rule = self.rule or optim.SGD()
        return rule if known is None or self.follows is None else replace(rule, lr=known.optimizer.lr)

    def hand_over(self, table: Table) -> None:
        """The table is trained so, and the optimizer forgets its state."""
        table.follows = self.follows
        _ = table.learning_rate  # takes that of now, should the optimizer go before a step
        if self.source is not None:
            self.source.state.pop(self.weight, None)


def rules_of(given: Rules | None, name: str, weight: Tensor) -> Rule:
    """ValueError: there is none for this weight, or it has no counterpart. TypeError: ``given`` is something else."""
    if given is None or isinstance(given, torch.optim.Optimizer):
        in_backward = getattr(weight, "_in_backward_optimizers", [])  # of torch.distributed.optim
        if len(in_backward) > 1:
            raise ValueError("several optimizers train it in backward; give optimizer={name: tierstore.optim....}")
        for source in in_backward if given is None else [given]:
            for place, group in enumerate(source.param_groups):
                if any(each is weight for each in group["params"]):
                    return Rule(_rule_of(source, group), weight, source, _following(source, place))
        if given is None or not weight.requires_grad:
            return Rule(None, weight)
        raise ValueError("the optimizer does not train its weight; give optimizer={name: tierstore.optim....}")
    if isinstance(given, optim.Optimizer):
        return Rule(given, weight)
    if not isinstance(given, Mapping) or not all(isinstance(each, optim.Optimizer) for each in given.values()):
        raise TypeError(
            "optimizer must be a tierstore.optim.Optimizer, a dict of those by module name, or a torch optimizer, not "
            f"{type(given).__name__}"
        )
    if name not in given:
        raise ValueError(f"optimizer has no rule for it, but for {list(given)}")
    return Rule(given[name], weight)


def _following(optimizer: torch.optim.Optimizer, place: int) -> Callable[[], Mapping[str, Any] | None]:
    """Gives a parameter group as it is then. An optimizer that loads a state makes others, in the same places."""
    known, group = weakref.ref(optimizer), optimizer.param_groups[place]
    kept = {name: group[name] for name in ("betas", "eps", "weight_decay") if name in group}

    def there() -> Mapping[str, Any] | None:
        optimizer = known()
        group = None if optimizer is None else optimizer.param_groups[place]
        if group is not None and any(group[name] != value for name, value in kept.items()):
            told = f"rows follow an optimizer's lr, but keep {kept} of it, which changed: give cycle_momentum=False"
            warnings.warn(told, RuntimeWarning, stacklevel=2)
        return group

    return there


def _rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> optim.Optimizer:
    kind = type(optimizer).__name__
    if type(optimizer) is not getattr(torch.optim, kind, type(optimizer)):
        raise ValueError(f"{type(optimizer).__module__}.{kind} is not torch's; give optimizer= a tierstore.optim rule")
    for option, default in _NO_COUNTERPART.items():
        if group.get(option, default) != default:
            raise ValueError(f"{option}={group[option]} of torch.optim.{kind} has no counterpart: leave it out")
    if kind not in _COUNTERPARTS:
        raise ValueError(
            f"{kind} has no counterpart: give optimizer= SGD, Adagrad, RowWiseAdagrad or Adam of tierstore.optim"
        )
    rule, options = _COUNTERPARTS[kind]
    made: optim.Optimizer = rule(
        lr=float(group.get("initial_lr", group["lr"])),
        weight_decay=float(group.get("weight_decay", 0)),
        decoupled=kind == "AdamW" or group.get("decoupled_weight_decay", False),
        **{name: group[name] if name == "betas" else float(group[name]) for name in options},
    )
    return made


class Weight(NamedTuple):
    """A weight that becomes a table, and the modules that look it up: several if they share it."""

    name: str
    weight: Tensor
    modules: list[Embedding]

    @property
    def modes(self) -> list[Any]:
        """Of the bags among the modules, distinct."""
        return sorted({module.mode for module in self.modules if isinstance(module, nn.EmbeddingBag)})

    @property
    def mode(self) -> Any:
        return (*self.modes, "sum")[0]


class _Move(NamedTuple):
    of: Weight
    config: TableConfig
    trained: Rule
    is_copied: bool


def convert(
    model: nn.Module, store: Store, *, min_rows: int = 1, names: Collection[str] | None = None, prefix: str = "",
    optimizer: Rules | None = None, init: Initializer | None = None, copy: bool = True,
) -> nn.Module:  # fmt: skip
    """Make each ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model a tiered module; returns the model.

    It stays the same object, for lists and closures that refer to it; so does its weight, without elements. A table has
    the name of its module, such as ``"user.embedding"``, unless ``names`` has another; wrappers, as of
    ``torch.compile``, add nothing to it. Rows are copied in chunks of 8 MiB. A weight on the meta device is never made
    whole: its table's first values are those of ``init``. Modules that share a weight share a table. Mode,
    ``padding_idx``, ``requires_grad``, ``training`` and other attributes stay.

    Args:
        model: changed in place. Its other modules stay as they are.
        store: open for writing; or for reading, with ``copy=False``.
        min_rows: modules with fewer rows stay.
        names: modules to convert, as ``model.named_modules()`` names them, or a dict from these to the names of their
            tables; default: all with ``min_rows`` rows.
        prefix: of the tables' names, so that a second model has tables of its own.
        optimizer: the update rule of each table. A ``tierstore.optim.Optimizer`` for all; or a dict of those by module
            name; or the ``torch.optim.Optimizer`` of the weights: SGD without momentum, Adagrad, Adam, AdamW or
            SparseAdam. Then settings and state come along, and the rate is its ``lr`` at each update, as schedules set
            it. Default: what ``apply_optimizer_in_backward`` gave a weight, else SGD.
        init: first values of rows that are not copied; default: normal with std 1, as torch's modules have them.
        copy: whether to copy rows. With False tables keep the store's rows of an earlier run, and the model's are
            dropped with their optimizer state, but for tables that such a run did not have.

    Raises:
        ValueError: modules cannot be converted: each is named with its reason. TableError: the store has a table of
            that name which is another, which another model trains, or whose rows would be overwritten. Then nothing was
            changed. ReadOnlyError, DiskFullError, ClosedError: the model was not changed.
    """
    if not isinstance(store, Store):
        raise TypeError(f"store must be a Store, as tierstore.open gives, not {type(store).__name__}")
    require_int(min_rows, "min_rows", 0, MAX_ROWS)
    chosen = list(_chosen(model, min_rows, names))
    tables = _tables(model, chosen, names if isinstance(names, Mapping) else {})
    moves = _moves(model, chosen, tables, store, optimizer, init or Normal(std=1.0), prefix, copy=copy)
    made: list[tuple[Embedding, Any]] = []
    for move in moves:
        table, trained = store.create_table(move.config), move.trained
        for start, stop in chunks(table) if move.is_copied else ():
            weights = raw_weights(move.of.weight.detach()[start:stop].cpu().contiguous())
            write_rows(table, start, weights, trained.state_rows(move.config, start, stop))
        if move.is_copied and "step" in trained.state:
            table.restore(TableState(int(trained.state["step"]), table.learning_rate))
        for module in move.of.modules:
            kind = TieredEmbedding if isinstance(module, nn.Embedding) else TieredEmbeddingBag
            tiered: Any = kind(table, **_options(module))
            tiered.requires_grad_(module.weight.requires_grad and tiered.rows.requires_grad).train(module.training)
            made.append((module, tiered))
    for module, tiered in made:
        take_place(module, tiered)
        if tiered.rows.requires_grad:
            tiered.table.converted = weakref.ref(module)
    for move in moves:
        move.trained.hand_over(store[move.config.name])
    return model


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
    plain = copying.deepcopy(model)
    for module in list(plain.modules()):
        if isinstance(module, TieredEmbedding | TieredEmbeddingBag):
            take_place(module, _of_torch(module, weights))
    return plain


def _options(module: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("padding_idx", "include_last_offset") if hasattr(module, name)}


def _of_torch(module: TieredEmbedding | TieredEmbeddingBag, weights: dict[Table, nn.Parameter]) -> nn.Module:
    made: Embedding
    table, rows, dim = module.table, module.num_embeddings, module.embedding_dim
    if (weight := weights.get(table)) is None:
        weight = weights[table] = nn.Parameter(torch.empty((rows, dim), device=table.store.device))
        for start, stop in chunks(table):
            weight.data[start:stop] = table.read(torch.arange(start, stop))
    options = _options(module) | {"_weight": weight}
    if isinstance(module, TieredEmbeddingBag):
        made = nn.EmbeddingBag(rows, dim, mode=module.mode, **options)
    else:
        made = nn.Embedding(rows, dim, **options)
        if module.padding_idx is not None:  # which gives zeros until it is written
            with torch.no_grad():
                weight[module.padding_idx] = module.forward(torch.tensor(module.padding_idx))
    made.weight = weight
    weight.requires_grad_(module.rows.requires_grad or table.store.readonly)
    return made.train(module.training)


def _chosen(model: nn.Module, min_rows: int, names: Collection[str] | None) -> Iterator[tuple[str, Embedding]]:
    """Modules to convert by plain name; one that has several names comes several times."""
    require_names(names, "names")
    plain = plain_names(model)
    found = {
        plain[name]: each
        for name, each in model.named_modules(remove_duplicate=False)
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
    }
    names = None if names is None else [plain.get(name, name) for name in names]
    if unknown := [name for name in names or () if name not in found]:
        raise ValueError(f"names: {unknown[0]!r} is no nn.Embedding or nn.EmbeddingBag of the model: {list(found)}")
    for name, module in found.items():
        if module.num_embeddings >= min_rows if names is None else name in names:
            yield name, module


def _tables(model: nn.Module, chosen: Iterable[tuple[str, Embedding]], names: Mapping[str, str]) -> dict[int, str]:
    """The names given to tables, by the ``id`` of weights. TypeError: one is no str. ValueError: a weight has two."""
    plain = plain_names(model) if names else {}
    given = {plain.get(name, name): table for name, table in names.items()}
    found = dict[int, str]()
    for name, module in chosen:
        if not isinstance(table := given.get(name, ""), str):
            raise TypeError(f"names: {name!r} has a table's name {table!r}, which is no str")
        if name in given and (known := found.setdefault(id(module.weight), table)) != table:
            raise ValueError(f"names: {name!r} shares its weight, so one table has two names, {known!r} and {table!r}")
    return found


def weights_of(model: nn.Module, chosen: Iterable[tuple[str, Embedding]]) -> tuple[list[Weight], dict[str, str]]:
    """Those of the modules given by name; and by the name of a module, why its weight cannot be a table."""
    found, refused = dict[int, Weight](), dict[str, str]()
    for name, module in chosen:
        own = found.setdefault(id(module.weight), Weight(name or _ROOT, module.weight, []))
        if module not in own.modules:
            own.modules.append(module)
            if reason := _reason(module):
                refused[name] = reason
    ours = {id(module) for own in found.values() for module in own.modules}
    names = {_memory(own.weight): own.name for own in found.values()}
    for owner_name, owner in model.named_modules():
        if joins_gradients(owner):
            refused[owner_name] = f"is a {type(owner).__name__}: give its module before it is wrapped"
        for part, tensor in [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]:
            if (shared := names.get(_memory(tensor))) is not None and id(owner) not in ours:
                there = f"{owner_name}.{part}".lstrip(".")
                refused[shared] = f"its weight is {there} of the model, too: look those rows up in both places"
    for own in found.values():
        if len(own.modes) > 1:
            refused[own.name] = f"bags that share its weight pool by {' and '.join(own.modes)}; a table has one mode"
    return list(found.values()), refused


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
    if taken := [name for name in vars(module) if name in OF_TABLES or hasattr(TieredEmbeddingBag, name)]:
        return f"{', '.join(taken)} was set on it, which a module over a table has of its own: rename or remove it"
    if [*module._parameters] != ["weight"] or module._buffers or module._modules:
        return "it has other parameters, buffers or modules than torch's own"
    return hung_on(module) or hung_on(module.weight)


def hung_on(what: nn.Module | Tensor) -> str:
    """Why something else cannot take the place of a module or a weight; "" if it can."""
    if isinstance(what, nn.Module):
        whose, names = "it", [name for name in vars(what) if name.endswith("_hooks")]
    elif type(what) is nn.Parameter and what.layout == torch.strided:
        whose, names = "its weight", ["_backward_hooks", "_post_accumulate_grad_hooks"]
    else:
        return f"its weight is a {what.layout} {type(what).__name__}, not a dense nn.Parameter"
    hooks = [name for name in names if getattr(what, name)]
    return f"{whose} has hooks ({', '.join(hooks)}), which would be lost: register them after this" if hooks else ""


def _memory(tensor: Tensor) -> Any:
    has_none = tensor.is_meta or not tensor.numel() or type(tensor) not in (Tensor, nn.Parameter)
    return id(tensor) if has_none else tensor.untyped_storage().data_ptr()


def _moves(
    model: nn.Module, chosen: Iterable[tuple[str, Embedding]], tables: Mapping[int, str], store: Store,
    optimizer: Rules | None, init: Initializer, prefix: str, *, copy: bool,
) -> list[_Move]:  # fmt: skip
    """The table of each weight. ValueError, TableError if one cannot be; nothing was changed."""
    weights, refused = weights_of(model, chosen)
    moves: list[_Move] = []
    for each in weights if not refused else ():
        if not each.weight.is_meta and each.weight.device != store.device:
            refused[each.name] = f"it is on {each.weight.device}, but the store's results are on {store.device}"
        try:
            trained = rules_of(optimizer, each.name, each.weight)
        except ValueError as error:
            refused[each.name] = str(error)
            continue
        name, (rows, dim) = f"{prefix}{tables.get(id(each.weight), each.name)}", each.weight.shape
        if any(move.config.name == name for move in moves):
            refused[each.name] = f"names= gives its table the name {name!r}, which another table has: give it another"
            continue
        known = store[name].config if name in store else None
        is_asked = trained.rule is not None or (copy and not each.weight.is_meta)
        shape: dict[str, Any] = {"num_embeddings": rows, "embedding_dim": dim, "pooling": each.mode}
        if known is None or is_asked or any(getattr(known, key) != value for key, value in shape.items()):
            known = TableConfig(name=name, **shape, init=init, optimizer=trained.rule_of(known))
        is_new = not each.weight.is_meta and not store.has_rows_of(name)
        moves.append(_Move(each, known, trained, is_copied=is_new and (copy or store.version > 0)))
    if refused:
        said = "".join(f"\n  {name or _ROOT!r}: {reason}" for name, reason in refused.items())
        raise ValueError(f"nothing was converted. Change these modules, or name the others in names=[...]:{said}")
    for move in moves:
        table, name = store.find_or_require(move.config), move.config.name
        if copy and not move.is_copied and not move.of.weight.is_meta:
            raise TableError(
                f"{store.directory} has rows of table {name!r} from before, which those of the model would overwrite: "
                "copy=False takes the store's, as in convert(model, store, copy=not store.version), if they are this "
                "model's; prefix= gives another model tables of its own"
            )
        if table is None or not move.of.weight.requires_grad or store.readonly or table.converted is None:
            continue
        gc.collect()
        module = table.converted()
        if module is not None and module.rows.requires_grad:
            raise TableError(
                f"table {name!r} is trained by another converted model, and {move.of.name!r} would train it, too: "
                "prefix= gives this model tables of its own; after requires_grad_(False) it may look up the other's. "
                "A model that is of no use any more must be let go of (del model; notebooks keep results in Out)"
            )
    return moves
