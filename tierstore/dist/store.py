"""A store whose tables are sharded over the ranks of a process group.

Each rank has a store of its own with all tables, of which it uses the rows, or columns, that it owns. A commit is one
of each rank's store, with a number that all ranks count alike and an identity that rank 0 draws, both in ``extra``.
Opening goes to the newest commit that every rank has, so each rank keeps the one before until all have the new one. A
version that not all ranks made stays, as the newest, until the next commit replaces it.
"""

import contextlib
import copy
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, get_args

import torch
from torch import Tensor

from ..cache.ddr import AUTO
from ..config import TableConfig
from ..errors import ClosedError, TableError, TierstoreError
from ..io.log import DEFAULT_SLACK
from ..kernels.threads import default_threads
from ..lookup.finite import CheckFinite
from ..store import Store, open_store
from ..store.lifetime import Shown
from ..store.optimizer import TieredOptimizer
from ..system.checks import require_choice
from .opening import OwnPart, open_to_read, require_alike
from .owners import Owners, ShardedTable, Towers, Wire, local_config, whole_config
from .parts import NO_COMMITS, SECTION, Commits, in_common
from .plan import Exchange, Plan, Sharding, ShardingType
from .ranks import Load, Precision, Ranks, ranks_on_host

_ALIKE: Final = (
    ("learning rate", "set the same on all ranks, and commit again"),
    ("number of updates since it was opened", "start all ranks again: they go on from the last commit that all have"),
)


class ShardedOptimizer(TieredOptimizer):
    """``TieredOptimizer`` of this rank's rows; ``clip_grad_norm_`` takes the norm over the rows of all ranks."""

    def __init__(self, store: "ShardedStore", dense: torch.optim.Optimizer | None) -> None:
        self._sharded = store
        super().__init__(store.local, dense)

    def _total_norm(self, others: Sequence[Tensor], norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Others, and rows that all ranks have, count once. Collective."""
        shared = [*others, *self._row_gradients(self._is_replicated)]
        own = self._row_gradients(lambda name: not self._is_replicated(name))
        with self._sharded.ranks.telling():
            norm = float(torch.nn.utils.get_total_norm(own, norm_type))
        norms = self._sharded.ranks.gather(norm, "clip_grad_norm_")
        norms.append(float(torch.nn.utils.get_total_norm(shared, norm_type)))
        return torch.nn.utils.get_total_norm([torch.tensor(norms)], norm_type, error_if_nonfinite)

    def _is_replicated(self, name: str) -> bool:
        return self._sharded.tables[name].sharding.sharding_type == "data_parallel"


def open_sharded(
    directory: str | os.PathLike[str] | None = None,
    *,
    group: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    towers: Sequence[Sequence[str]] | None = None,
    forward_precision: Precision = "fp32", backward_precision: Precision = "fp32",
    cold: Literal["lmdb", "memory"] = "lmdb", mode: Literal["r", "w"] = "w",
    keep: int = 2,
    slack: float = DEFAULT_SLACK,
    ddr: int | str | None = None, hbm: int | str = 0, device: str = "cpu", policy: str = AUTO,
    threads: int | None = None, check_finite: CheckFinite | None = None,
) -> "ShardedStore":  # fmt: skip
    """Open this rank's part of the store in ``directory``, or create it; collective.

    Args:
        directory: of the ranks' stores, ``RANK-of-RANKS``; ranks may be on different disks or hosts. If another number
            of ranks wrote it, each rank makes its part of theirs, which then move to ``replaced-at-N``.
        mode: "w" opens for reading and writing, or creates; "r" opens, read-only, the newest commit that all of as many
            ranks have, while others may train.
        group: of ``torch.distributed``, with a backend for CPU tensors; None for all ranks.
        plan: how tables are sharded, or a file of it; the same on all ranks. Default: see ``create_table``.
        towers: names of the tables of each host (by torchrun's LOCAL_WORLD_SIZE), which are on its ranks alone; the
            same on all ranks.
        forward_precision, backward_precision: how rows (or pooled rows) and gradients cross between ranks: "fp32",
            "bf16", "fp16" or "int8"; the same on all ranks.
        keep: commits that stay, at least 2.
        ddr, threads: of each rank, as for ``tierstore.open``; default: half the machine's memory, and the CPUs that
            this process may use, divided by the number of ranks on it (torchrun's LOCAL_WORLD_SIZE, or all).
        cold, slack, hbm, device, policy, check_finite: of each rank, as for ``tierstore.open``. If the group has a
            backend for such devices, as "cpu:gloo,cuda:nccl" has, rows and gradients go from device to device.

    Raises:
        TierstoreError: the ranks' stores are of different runs, or have no commit in common; parts were exchanged.
        StoreNotFoundError: one process wrote the store; or another number of ranks did, and not all of their parts are
            in ``directory``, or mode="r".
        StoreLockedError: ranks have it open for writing. DiskFullError: too little free space for new parts.
        TableError: the ranks' tables differ. RuntimeError: another rank failed. Others: as of ``tierstore.open``.
        ValueError: a wrong argument, ranks give different ones, a group as ``Ranks`` refuses, or towers as ``Towers``.
    """
    ranks, folder = Ranks(group), None if directory is None else Path(directory)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as opened:  # closed again if any rank fails
        with ranks.together():
            wire = _checked(mode, keep, Wire(forward_precision, backward_precision))
            planned = planned_tables(plan, ranks)
        require_alike(ranks, mode=mode, plan=planned, precision=wire, towers=towers)
        groups = None if towers is None else Towers.of(towers, ranks)
        if groups is not None:
            opened.callback(groups.close)
            with ranks.together():
                planned = groups.planned(planned)
        options = _options(ranks.size, ddr=ddr, hbm=hbm, device=device, policy=policy, threads=threads)
        options["check_finite"] = check_finite
        writing, own = dict[str, Any](cold=cold, keep=keep, slack=slack), None
        if folder is None or cold == "memory":
            with ranks.together():
                local = open_store(directory, mode=mode, **writing, **options)
                opened.callback(local.close)
        elif mode == "r":
            opened.callback((local := open_to_read(ranks, folder, options)).close)
        else:
            own = OwnPart(ranks, folder, planned, writing | options)
            held.callback(own.release)
            opened.callback((local := own.store).close)
        made = ShardedStore(local, Owners(ranks, wire, groups), planned)
        if own is not None:
            own.replace_others(made.version)
        opened.pop_all()
    return made


def _checked(mode: str, keep: int, wire: Wire) -> Wire:
    require_choice(mode, ("r", "w"), "mode")
    if keep < 2:
        raise ValueError(f"keep={keep}: a sharded store keeps at least 2 commits, as not all ranks may have the last")
    for name, precision in wire._asdict().items():
        require_choice(precision, get_args(Precision), f"{name}_precision")
    return wire


def _options(size: int, *, ddr: int | str | None, threads: int | None, **others: Any) -> dict[str, Any]:
    """Of ``open_store``, with a rank's share of its host by default."""
    on_host = ranks_on_host(size)
    others["ddr"] = f"{50 / on_host:.3f}%" if ddr is None else ddr
    others["threads"] = max(default_threads() // on_host, 1) if threads is None else threads
    return others


def planned_tables(plan: Plan | str | os.PathLike[str] | None, ranks: Ranks) -> Mapping[str, Sharding]:
    """Of a plan or its file. ValueError: it is of another number of ranks. Others as of ``Plan.load``."""
    if plan is None:
        return {}
    found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if found.world_size != ranks.size:
        raise ValueError(f"the plan is for {found.world_size} ranks, and there are {ranks.size}")
    return found.tables


class ShardedStore:
    """This rank's part of a sharded store; made by ``open_sharded``. Methods marked collective are called by all ranks
    in the same order.

    Attributes:
        local: this rank's store. Read and write only rows that this rank owns in it; commit by ``commit``.
        ranks, owners: the group, and which of them owns a row.
        tables: those that all ranks have, by name. unloaded: those that ``shard`` made, and has not filled.
        planned: how tables are sharded unless ``create_table`` says otherwise, by name.
        device, offsets_type, readonly, directory: of ``local``.
        shown: see ``Store``; no rank makes a lookup again by itself.
    """

    def __init__(self, local: Store, owners: Owners, planned: Mapping[str, Sharding]) -> None:
        self.local = local
        self.ranks = ranks = owners.ranks
        self.owners = owners
        self.tables: dict[str, ShardedTable] = {}
        self.shown = Shown()
        self.planned = planned
        self.unloaded = set[str]()
        self.device, self.offsets_type = local.device, local.offsets_type
        self.readonly, self.directory = local.readonly, local.directory
        with ranks.together():
            own = Commits.of(local)
        self._known, self._attempt, self._steps = NO_COMMITS, 0, dict[str, int]()
        self._extra, self._tensors = dict[str, Any](), dict[str, Tensor]()
        self._agree(ranks.gather(own, "open_sharded"))

    def _agree(self, all_commits: Sequence[Commits]) -> None:
        """Go to the newest commit that all ranks have."""
        runs = sorted({each.run for each in all_commits if each.run})
        common = in_common(all_commits)
        with self.ranks.together():
            if len(runs) > 1:
                raise TierstoreError(f"{self.local.directory}: the ranks' stores are of {len(runs)} different runs")
            if not common and any(len(each.versions) > 1 or max(each.versions, default=0) for each in all_commits):
                lost = [rank for rank, each in enumerate(all_commits) if not each.versions]
                raise TierstoreError(
                    f"{self.local.directory}: the ranks have no commit in common"
                    + (f"; rank {lost[0]} has none at all: is its directory there?" if lost else "")
                )
            self._attempt = max(each.last for each in all_commits)
            if common:
                own = all_commits[self.ranks.rank].versions[common[-1]]
                if own != self.local.version:
                    self.local.rollback(own)
                self._note_agreed()
            shardings = self._committed_shardings()
            self._require_within(shardings)
            found = [self._table(name, sharding) for name, sharding in shardings.items()]
        self._require_alike([(table.index, table.config, table.sharding) for table in found], "open_sharded")
        self._take(found)
        self.ranks.run = runs[0] if runs else self.ranks.first(secrets.token_hex(8))
        if not common:
            self._commit(0, None, None)

    def _require_within(self, shardings: Mapping[str, Sharding]) -> None:
        if self.owners.towers is not None:
            self.owners.towers.require_within(shardings.items())

    def _note_agreed(self) -> None:
        """Keep what the local commit holds, which all ranks have: a later one may not be all ranks'."""
        extra = self.local.extra
        self._known = Commits.read(extra[SECTION], self.local.version)
        self._extra, self._tensors = extra["extra"], self.local.tensors()

    def _committed_shardings(self) -> dict[str, Sharding]:
        return {name: Sharding.from_json(each, self.ranks.size) for name, each in self._known.shardings.items()}

    def _require_alike(self, tables: Sequence[tuple[Any, ...]], call: str) -> None:
        """TableError in all ranks if they describe tables differently. Collective."""
        found = self.ranks.gather(list(tables), call)
        for rank, others in enumerate(found):
            for one, other in itertools.zip_longest(found[0], others):
                if one != other:
                    raise TableError(
                        f"ranks 0 and {rank} differ in a table: {one} and {other}. All ranks must create the same "
                        "tables in the same order, from the first on"
                    )

    def _table(self, name: str, sharding: Sharding) -> ShardedTable:
        local = self.local[name]
        return ShardedTable(whole_config(local.config, sharding), sharding, local, self.ranks.rank)

    def _take(self, tables: Sequence[ShardedTable]) -> None:
        self.tables |= {table.name: table for table in tables}
        self._steps |= {table.name: table.local.state.step for table in tables}
        self.owners.set(self.tables.values())

    def create_table(
        self,
        config: TableConfig,
        *,
        sharding_type: ShardingType | None = None,
        ranks: Sequence[int] | None = None,
        exchange: Exchange | None = None,
        column_ranges: int | None = None,
    ) -> ShardedTable:
        """Add a table, or find it; collective, with the same arguments on all ranks.

        Args:
            sharding_type, ranks, exchange, column_ranges: see ``Sharding``. Default: as the plan has them, else
                "row_wise" over all ranks, or pooled over those of its tower's host. A "table_wise" table is on the one
                of these with the fewest bytes; "grid_shard" has a range of columns for each host.

        Raises:
            TableError: as ``Store.create_table``, or ranks differ in the arguments or the table's number; then nothing
                was created. ValueError, TypeError: no sharding, or not the one that is there.
            RuntimeError: another rank failed.
        """
        call = "create_table"
        with self.ranks.together(call):
            sharding = self._sharding_of(config.name, sharding_type, ranks, exchange, column_ranges)
            own = local_config(config, sharding, self.ranks.rank)
            index = self.local[config.name].index if config.name in self.local else len(self.local.tables)
        self._require_alike([(index, config, sharding)], call)
        with self.ranks.together(call):
            self.local.create_table(own)
        if config.name not in self.tables:
            self._take([self._table(config.name, sharding)])
        return self.tables[config.name]

    def _sharding_of(self, name: str, sharding_type: Any, ranks: Any, exchange: Any, column_ranges: Any) -> Sharding:
        known = self.tables[name].sharding if name in self.tables else None
        default = known or self.planned.get(name)
        if default is not None and sharding_type in (None, default.sharding_type):
            sharding_type, ranks = default.sharding_type, default.ranks if ranks is None else ranks
            exchange = default.exchange if exchange is None else exchange
            column_ranges = default.column_ranges if column_ranges is None else column_ranges
        kind, towers = sharding_type or "row_wise", self.owners.towers
        within = None if towers is None else towers.ranks_of(name)
        places = self._default(kind, within) if ranks is None else ranks
        if column_ranges is None:
            column_ranges = -(-len(places) // ranks_on_host(self.ranks.size)) if kind == "grid_shard" else 1
        usual: Exchange = "rows" if within is None or kind == "data_parallel" else "pooled"
        sharding = Sharding.checked(kind, places, exchange or usual, self.ranks.size, column_ranges)
        self._require_within({name: sharding})
        if known is not None and known != sharding:
            raise ValueError(f"table {name!r} is sharded {known.sharding_type} over ranks {list(known.ranks)}")
        return sharding

    def _default(self, sharding_type: str, within: range | None) -> Sequence[int]:
        """Ranks: of the fewest bytes so far. ``within``: those of the table's tower, if it is in one."""
        used, size = [0.0] * self.ranks.size, self.ranks.size
        for table in self.tables.values():
            for rank in table.sharding.ranks:
                used[rank] += table.config.size_bytes(table.layout.page_bytes) / len(table.shards)
        if sharding_type == "table_wise":
            return [min(within or range(size), key=used.__getitem__)]
        if within is not None and sharding_type != "data_parallel":
            return within
        if sharding_type in ("table_row_wise", "table_column_wise"):
            on_host = ranks_on_host(size)
            hosts = [range(first, min(first + on_host, size)) for first in range(0, size, on_host)]
            return min(hosts, key=lambda host: sum(used[rank] for rank in host))
        return range(size)

    def __getitem__(self, name: str) -> ShardedTable:
        try:
            return self.tables[name]
        except KeyError:
            raise TableError(f"there is no table {name!r}, but {sorted(self.tables)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self.tables

    def optimizer(self, dense: torch.optim.Optimizer | None = None) -> TieredOptimizer:
        """The tables' optimizers as torch has them; see ``Store.optimizer``. All ranks make one, and call its ``step``
        and ``zero_grad`` alike. ``grad`` of a table has the rows that this rank owns."""
        return self.local.use_optimizer(ShardedOptimizer(self, dense))

    def balance(self) -> list[Load]:
        """What each rank holds, and did since it opened the store, in order of the ranks. Collective."""
        with self.ranks.telling():
            own_rows = sum(len(table.rows) for table in self.tables.values())
            size_bytes = sum(table.local.size_bytes for table in self.tables.values())
            own = Load(own_rows, size_bytes, self.local.stats().ddr.lookups, self.owners.traffic)
        return self.ranks.gather(own, "balance")

    @property
    def recorder(self) -> Any:
        """What records this rank's lookups, or None."""
        return self.local.recorder

    @property
    def version(self) -> int:
        """Number of the last commit that all ranks have; 0 before the first."""
        return self._known.last

    @property
    def extra(self) -> dict[str, Any]:
        """What this rank gave to the last commit that all ranks have."""
        return copy.deepcopy(self._extra)

    @property
    def changed_tables(self) -> tuple[str, ...]:
        """Names of the tables whose rows this rank updated or wrote since the last commit."""
        return self.local.changed_tables

    def tensors(self) -> dict[str, Tensor]:
        """What this rank gave to the last commit that all ranks have, on the CPU."""
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def commit(self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None) -> int:
        """Make all ranks' rows one version, atomically and durably, and return its number; collective.

        Args:
            extra, tensors: of this rank, as for ``Store.commit``.

        Raises:
            RuntimeError: another rank could not commit; the last version stands, rows are still in memory, and a later
                commit may succeed. Others: as ``Store.commit``.
        """
        return self._commit(self._attempt + 1, extra, tensors)

    def _commit(self, number: int, extra: dict[str, Any] | None, tensors: Mapping[str, Tensor] | None) -> int:
        commit_id = self._agree_to_commit(number)
        self._attempt = number
        shardings = {name: each.sharding.to_json() for name, each in self.tables.items()}
        versions, ids = self._known.versions, self._known.ids | {number: commit_id}
        with self.ranks.together(f"end of commit {number}"):
            commits = Commits(self.ranks.run, versions, shardings, ids)
            last = versions.get(self.version, 0)
            self.local.dropped = [version for version in self.local.versions if version > last]  # not all ranks' commit
            self.local.commit(extra=commits.packed(self.ranks.rank, self.ranks.size, number, extra), tensors=tensors)
        self._note_agreed()
        return number

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the commits that this rank has, ascending, up to the last one that all ranks have."""
        return tuple(number for number, kept in self._known.versions.items() if kept in self.local.versions)

    def set_time(self, seconds: float) -> None:
        """As ``Store.set_time``, the same on all ranks; collective."""
        with self.ranks.together(f"set_time({seconds})"):
            self.local.set_time(seconds)

    def rollback(self, version: int) -> None:
        """Go back to a commit that all ranks keep; collective. Later ones, and what was not committed, are dropped.

        Tables that were created later stay, empty. After a kill all ranks open this commit, or all the last one.

        Raises:
            ValueError: it is not one of ``versions`` of all ranks. TableError: rows are in use by a batch in flight.
            RuntimeError: another rank failed, or asks for another commit. ClosedError: rows had other owners then, as
                an earlier release moved them: the store is at that commit, and is to be opened again.
        """
        call = f"rollback to {version}"
        kept = set.intersection(*map(set, self.ranks.gather(self.versions, call)))
        with self.ranks.together(call):
            self.local.require_writable()
            if version not in kept:
                numbers = ", ".join(map(str, sorted(kept))) or "none"
                raise ValueError(
                    f"version={version} is not kept by all ranks, but {numbers}. Open with keep=N to keep more"
                )
            self.local.rollback(self._known.versions[version])
        self._note_agreed()
        if any(self.tables[name].sharding != each for name, each in self._committed_shardings().items()):
            self.close()
            raise ClosedError(f"rows had other owners in commit {version}: open the store again, which is at it now")
        self._steps = {table.name: table.local.state.step for table in self.tables.values()}

    def _agree_to_commit(self, number: int) -> str:
        """The commit's identity. TableError, in all ranks, if they trained a table differently."""
        with self.ranks.telling():
            steps = {name: table.local.state.step - self._steps[name] for name, table in self.tables.items()}
            rates = {name: table.learning_rate for name, table in self.tables.items()}
        found: list[Any] = self.ranks.gather((secrets.token_hex(8), rates, steps), f"commit {number}")
        commit_id: str
        commit_id, *own = found[0]
        for rank, (_, *others) in enumerate(found):
            for (what, way), values, other in zip(_ALIKE, own, others, strict=True):
                if name := next((name for name, value in values.items() if other[name] != value), None):
                    raise TableError(
                        f"ranks 0 and {rank} differ in table {name!r}: its {what} is {values[name]} and {other[name]}; "
                        f"{way}"
                    )
        return commit_id

    def close(self) -> None:
        """Close this rank's store; what was not committed is lost, and logged as of ``Store.close``."""
        with contextlib.closing(self.owners):
            self.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.closing(self.owners):
            self.local.__exit__(kind, error, trace)
