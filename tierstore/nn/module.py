"""What all modules over tables have in common: the parameter that stands for rows, and batches prepared ahead."""

import copy
import functools
import itertools
import sys
import traceback
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..lookup.gradients import note_pass
from ..optim.curvature import OF_THREAD
from ..store import Store, Table
from ..store.arguments import NOT_TRACED, refuse_traces
from ..system.checks import Unpicklable, require_int
from .function import Prepared, PreparedLookups, run_lookups

NO_COUNTERPART: Final = {
    "max_norm": "rows are not renormalized; leave it out",
    "norm_type": "rows are not renormalized; leave it out",
    "scale_grad_by_freq": "gradients are summed over a batch; leave it out",
    "sparse": "only rows that a batch looked up are updated anyway; leave it out",
}
"""Arguments of torch's modules."""
_NO_WEIGHT: Final = (
    "has no weight: rows are in the store. All rows, trained as torch would: emb(torch.arange(n)) of a "
    "TieredEmbedding; some, without gradient: table.read(ids); to set them: table.write(ids, rows), or "
    "TableConfig(init=...) for first values"
)
OF_TABLES: Final = {"table", "rows", "_store", "_prepared", "_has_padding_row", "_empty", "_written_at", "_replicated"}
"""Attributes of modules over a table that torch's do not have."""
_JOINS: Final = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "ReplicateModule", "DDP"}
# Names that wrappers give to what they wrap; the classes below call it ``module``.
_ADDED: Final = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_WRAPPERS: Final = {"DataParallel", "DistributedDataParallel", "AveragedModel"}

_CHANGE_GRADIENTS: Final = {
    clip_grad.__file__: "clipping does not reach them; optimizer.clip_grad_norm_(model.parameters(), max_norm) does",
    grad_scaler.__file__: "a GradScaler does not reach them, and they are trained by scaled gradients",
}
"""Files whose functions read ``grad`` of parameters to change it, with what is then wrong."""
_GRAD: Final[Any] = Tensor.grad  # torch's property, to which mypy knows no setter
_SEEN: Final = "_tierstore_seen"
"""An attribute of optimizers: by the ``id`` of a placeholder, its rows' updates as of the last step, and whether there
was more than one before that step."""


class Placeholder(nn.Parameter):
    """The parameter, without elements, that stands for a module's rows. It notices what torch does to gradients and
    would do to the rows'.

    Rows that are trained in backward have no gradient that clipping, a ``GradScaler`` or an optimizer's weight decay
    could change, and each pass is an update. Where torch would have applied these to rows, a warning names the way:
    Python shows it once for each place.

    Attributes:
        owner: gives the ``TieredModule``, while there is one.
    """

    owner: Callable[[], Any] = staticmethod(lambda: None)

    @classmethod
    def of(cls, module: nn.Module, *, requires_grad: bool) -> "Placeholder":
        _watch_steps()
        made = cls(torch.empty(0, dtype=torch.float32), requires_grad=requires_grad)
        made.owner = weakref.ref(module)
        return made

    @classmethod
    def in_place_of(cls, weight: nn.Parameter, given: "Placeholder") -> "Placeholder":
        """The weight itself, made a placeholder: optimizers and lists that have it go on without its old rows.
        ``given`` of a weight whose memory cannot be replaced, as on the meta device."""
        if weight.is_meta or weight.is_inference():
            return given
        weight.requires_grad_(given.requires_grad)
        if isinstance(weight, Placeholder):
            return weight
        if weight.grad is not None:
            warnings.warn("the gradient of a weight that becomes a table is dropped", RuntimeWarning, stacklevel=3)
            weight.grad = None
        weight.data = torch.empty(0, dtype=torch.float32)
        made: Any = weight
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    @property
    def grad(self) -> Tensor | None:
        reason = _CHANGE_GRADIENTS.get(sys._getframe(1).f_code.co_filename)
        if reason is not None and self.trained is not None:
            self.warn(reason)
        return super().grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @property
    def trained(self) -> Any:
        """The module, if backward trains its rows."""
        module = self.owner()
        if module is None or not self.requires_grad or not isinstance(module._store, Store):
            return None
        return None if module._store.readonly or module._store.optimizer_in_use else module

    def warn(self, reason: str) -> None:
        warnings.warn(
            f"rows of {self.owner()!r} are trained at the end of each backward pass: {reason}. With optimizer = "
            "store.optimizer(), backward collects gradients, and optimizer.step() trains rows as torch does",
            RuntimeWarning,
            stacklevel=1,  # one place, so that Python shows each text once
        )


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_post_hook(_at_step)


def _at_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Called after each step of any optimizer. What happens at two steps in turn is a habit."""
    before: dict[int, tuple[int, bool]] | None = optimizer.__dict__.get(_SEEN)
    if before is not None and not before:
        return  # it has no rows
    seen = optimizer.__dict__.setdefault(_SEEN, {})
    for group in optimizer.param_groups:
        for each in group["params"]:
            if not isinstance(each, Placeholder):
                continue
            if not seen:
                optimizer.register_state_dict_post_hook(_with_placeholders)
            tables = [] if (module := each.trained) is None else module._tables
            updates = sum(table._step for table in tables)
            last, was_more = seen.get(id(each), (updates, False))
            is_more = updates - last > len(tables)
            seen[id(each)] = updates, is_more
            decay = group.get("weight_decay")
            if before is None and tables and decay and not any(table.config.optimizer.weight_decay for table in tables):
                name = type(optimizer).__name__
                each.warn(f"weight_decay={decay} of {name} does not reach them, as that of a tierstore.optim rule does")
            if is_more and was_more:
                each.warn("several passes before a step are several updates, not one of accumulated gradients")


def _with_placeholders(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    callers = [each.f_globals.get("__name__") for each, _ in itertools.islice(traceback.walk_stack(None), 8)]
    if "torch.distributed.checkpoint.state_dict" in callers and state_dict["state"]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for place, each in enumerate(parameters):
            if isinstance(each, Placeholder):
                state_dict["state"].setdefault(place, {})


class TieredModule(Unpicklable, nn.Module, ABC):
    """Base of modules that look rows up.

    Attributes:
        rows: a parameter without elements that stands for the rows in autograd. ``requires_grad_(False)``, on it, the
            module or a model, freezes the tables; it is not in ``state_dict()``.
    """

    _replicated = "", 1  # by what, by how many: a reentrant checkpoint trains in backward, where nothing says so

    def __init__(self, store: Any) -> None:
        require_store(store)
        super().__init__()
        self.rows = Placeholder.of(self, requires_grad=not store.readonly)
        self._store = store
        self._prepared = PreparedLookups()

    @property
    @abstractmethod
    def _tables(self) -> Sequence[Table]:
        """A table of each pool that it looks up in."""

    @abstractmethod
    def _prepare(self, sources: Sequence[Tensor | None], *arguments: Any) -> Prepared:
        """The lookups of one call of ``forward`` with these arguments, whose tensors are ``sources``."""

    def _sources(self, *arguments: Any) -> Sequence[Tensor | None]:
        return arguments

    def _pooled_directly(self, *arguments: Any) -> Tensor | None:  # noqa: ARG002
        """``forward`` without gradients where one compiled call does it; None: ``_prepare`` must."""
        return None

    def _run(
        self, arguments: Sequence[Any], sources: Sequence[Tensor | None], shape: Sequence[int] | None = None
    ) -> Tensor:
        """``forward``: float32 of the shape that ``_prepare`` says, or of another with as many elements.
        ``torch.compile`` breaks its graph here: what is below has no tensors to trace."""
        is_loaded = "torch._dynamo" in sys.modules  # which takes a second, and comes with torch.compile
        return (_look_up_eagerly if is_loaded else _look_up)(self, arguments, sources, shape)

    def __prepare_scriptable__(self) -> None:  # called by torch.jit.script
        raise RuntimeError(NOT_TRACED)

    def _require_one_process(self, rows: Tensor) -> None:
        """RuntimeError if rows are trained in a module that joins processes' gradients, as DDP and FSDP do."""
        processes, kind = distributed.get_world_size(), "DTensor" if type(rows).__name__ == "DTensor" else None
        frame = sys._getframe(1)
        while frame is not None and kind is None:
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
            if owner is not None and joins_gradients(owner) and any(each is self for each in owner.modules()):
                kind, group = type(owner).__name__, getattr(owner, "process_group", None)
                processes = processes if group is None else group.size()
            frame = frame.f_back  # type: ignore[assignment]
        if kind is not None:
            self._replicated = kind, processes
        elif torch._C._current_graph_task_id() < 0:
            self._replicated = "", 1
        kind, processes = self._replicated
        if processes > 1 and torch.is_grad_enabled():
            raise RuntimeError(
                f"rows of the store at {self._store.directory} cannot be trained inside {kind} by {processes} "
                "processes: each would train rows of its own, and nothing would bring them together. "
                "Shard the tables over the processes (tierstore.dist), or train them in one. Tables that are not "
                'trained may be replicated: open their store with mode="r", or freeze the module by '
                "requires_grad_(False) before it is replicated"
            )

    is_collective = False
    """Whether ``tierstore.prefetch`` drives what ``ahead`` gives for a pass, in its place."""

    def gather(self, optimizers: Sequence[Any]) -> None:
        """Before a checkpoint: fetch weights, and their state in the optimizers, that other processes have trained."""

    def prepare(self, features: Any) -> Prepared:
        """Read a batch ahead of ``forward``, which must be given the same objects: its argument, or a tuple of them.
        Returns a ticket for the methods below, which ``tierstore.prefetch`` calls from its thread, too."""
        arguments = arguments_of(features)
        try:
            prepared = self._prepare(self._sources(*arguments), *arguments)
        except TypeError as error:
            if isinstance(features, tuple):
                error.add_note(
                    f"features= gave a tuple of {len(features)}: the arguments of one forward. Of several modules give "
                    "a list, with what each forward is given"
                )
            raise
        return self._prepared.put(arguments[0], prepared)

    def bring_in(self, ticket: Prepared) -> bool:
        """Bring the rows of a prepared batch in, as far as they stay until it is used; returns whether all do."""
        return ticket.stage()

    def forget(self, ticket: Prepared) -> None:
        """Release what the forward call has not used."""
        self._prepared.drop(ticket)

    def __copy__(self) -> "TieredModule":
        made = type(self).__new__(type(self))
        made.__dict__ = dict(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredModule":
        """A module of its own over the same tables, as averages of weights (EMA, SWA) make one."""
        shared = (self._store, *self._store.tables.values())
        memo |= {id(each): each for each in shared} | {id(self._prepared): PreparedLookups()}
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        made.rows.owner = weakref.ref(made)
        return made

    # What torch's own modules are asked to do with their weights.

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(f"{type(self).__name__} {_NO_WEIGHT}", name=name, obj=self)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # of a model that ties weights, which would not be looked up
            raise AttributeError(f"{type(self).__name__} {_NO_WEIGHT}", name=name, obj=self)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "TieredModule":  # noqa: ARG002
        wanted = fn(torch.empty(0, dtype=torch.float32, device=self._store.device))
        if wanted.dtype != torch.float32:
            raise TypeError(
                f"a module over tables gives float32, not {wanted.dtype}: convert its output, or leave it out of "
                'half() and double(); how rows are kept is TableConfig(dtype="float16") or tierstore.open(dtype=...)'
            )
        if wanted.device != self._store.device:
            raise ValueError(
                f"the rows of {self._store.directory} are looked up on {self._store.device}, which is chosen where the "
                f"store is opened: tierstore.open(..., device={str(wanted.device)!r}). Or move the other modules only, "
                "and their inputs"
            )
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "rows"]

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing: list[str], *others: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, *others)
        missing[:] = [name for name in missing if name != prefix + "rows"]
        for key in state_dict:
            path = key.removeprefix(prefix).split(".")
            if key.startswith(prefix) and path[-1] == "weight" and path[0] not in self._modules:
                told = f"{key!r} was not loaded: {type(self).__name__} {_NO_WEIGHT}, or load it before convert"
                warnings.warn(told, RuntimeWarning, stacklevel=2)


def joins_gradients(module: nn.Module) -> bool:
    """Whether it brings together what several processes have: gradients of its parameters, or their values."""
    return any(each.__name__ in _JOINS and each.__module__.startswith("torch.") for each in type(module).__mro__)


def plain_names(model: nn.Module) -> dict[str, str]:
    """By the name of each module, each of several: its name without what wrappers add."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules(remove_duplicate=False):
        parent, _, own = name.rpartition(".")
        is_added = own in _ADDED or (own == "module" and type(model.get_submodule(parent)).__name__ in _WRAPPERS)
        found[name] = ".".join(filter(None, [found.get(parent), None if is_added else own]))
    return found


def take_place(module: nn.Module, made: nn.Module) -> None:
    """``module`` becomes ``made``, so that whatever refers to it goes on with that. It keeps attributes of its own, and
    its weights become what stands for rows."""
    weights = list(module.parameters())
    module.__dict__ = {name: each for name, each in vars(module).items() if name not in OF_TABLES} | vars(made)
    module.__class__ = type(made)
    if isinstance(module, TieredModule):
        for each in [module.rows, *weights]:
            module._parameters["rows"] = rows = Placeholder.in_place_of(each, module.rows)
            rows.owner = weakref.ref(module)


def _look_up(
    module: TieredModule, arguments: Sequence[Any], sources: Sequence[Tensor | None], shape: Sequence[int] | None
) -> Tensor:
    refuse_traces(sources)
    rows: Any = module._parameters.get("rows")  # by its name it is looked for elsewhere first
    if rows is None:
        rows = module.rows  # as FSDP and nn.DataParallel keep parameters
    trainable = rows.requires_grad and not (module._store.readonly or OF_THREAD.evaluation.are_constant)
    if trainable and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        module._require_one_process(rows)
    batches = module._prepared
    prepared = batches.take(arguments[0], sources) if batches.waiting else None
    if prepared is None and not torch.is_grad_enabled():
        pooled = module._pooled_directly(*arguments)
        if pooled is not None:
            note_pass()
            return pooled
    prepared = prepared or module._prepare(sources, *arguments)
    return run_lookups(prepared, rows, prepared.shape if shape is None else shape, trainable=trainable)


_look_up.__qualname__ = f"_look_up ({NOT_TRACED})"  # all that torch 2.6 says of it
_look_up_eagerly: Final[Any] = torch._compile._disable_dynamo(_look_up)
_look_up_eagerly._torchdynamo_disable = True  # so before its first call, with what it says where no break may be
_look_up_eagerly._torchdynamo_disable_msg = NOT_TRACED


def arguments_of(features: Any) -> tuple[Any, ...]:
    return features if isinstance(features, tuple) else (features,)


def checked_table(table: Table) -> Table:
    if not hasattr(table, "lookup"):
        over_ranks = "; tierstore.dist has modules over tables of a sharded store" * (
            type(table).__name__ == "ShardedTable"
        )
        raise TypeError(f"table must be a Table, as store[name] gives, not {type(table).__name__}{over_ranks}")
    return table


def checked_padding(padding_idx: int, table: Table) -> int:
    """The row that it names, from the end if negative; ValueError if there is none. Of dynamic ids, itself."""
    if table.ids is not None:
        return require_int(padding_idx, "padding_idx", -(2**63), 2**63 - 1)
    rows = table.config.num_embeddings
    return require_int(padding_idx, "padding_idx", -rows, rows - 1) % rows


def require_store(store: object) -> None:
    """Whole or sharded."""
    if not hasattr(store, "commit"):
        raise TypeError(f"store must be an open store, as tierstore.open gives, not {type(store).__name__}")
