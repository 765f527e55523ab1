"""What all modules over tables have in common: the parameter that stands for rows, and batches prepared ahead."""

import copy
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, distributed, nn

from ..lookup.gradients import note_pass
from ..optim.curvature import OF_THREAD
from ..store import Table
from ..store.arguments import NOT_TRACED, refuse_traces
from ..system.checks import Unpicklable, require_int
from .function import Prepared, PreparedLookups, run_lookups
from .placeholder import Placeholder

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
