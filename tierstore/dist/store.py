"""A store whose tables are sharded over the ranks of a process group.

Each rank has a store of its own, in which every table is there in full shape and only the rows it owns are ever used:
a row that was never used takes no room. So rows keep their ids and their first values.

A commit is one of each rank's store. It has a number that all ranks count alike, kept in ``extra``. Opening goes to the
newest number that every rank has, so each rank keeps the version before until all have the new one.
"""

import contextlib
import copy
import itertools
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self

from torch import Tensor

from ..cache import AUTO
from ..config import TableConfig
from ..errors import TableError, TierstoreError
from ..io.cleaning import DEFAULT_SLACK
from ..kernels.threads import default_threads
from ..store import Store, Table, open_store
from .owners import Owners
from .plan import Exchange, Plan, Sharding, ShardingType
from .ranks import Ranks

_SECTION: Final = "tierstore.dist"
"""Of ``extra`` of each rank's store."""


class _Commits(NamedTuple):
    """What a rank's store has.

    Attributes:
        run: the identity of what was trained; "" if there is none yet.
        versions: those of the rank's store, by the number of the commit.
    """

    run: str
    versions: dict[int, int]

    @classmethod
    def of(cls, store: Store) -> "_Commits":
        if not store.version:
            return cls("", {})
        section = store.extra.get(_SECTION)
        if section is None:
            raise TierstoreError(
                f"{store.directory} is not a rank's part of a sharded store; open it by tierstore.open"
            )
        known = {int(number): version for number, version in section["versions"].items() if version in store.versions}
        return cls(section["run"], known | {section["number"]: store.version})


def open_sharded(
    directory: str | os.PathLike[str] | None = None,
    *,
    group: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    cold: Literal["lmdb", "memory"] = "lmdb",
    keep: int = 2,
    slack: float = DEFAULT_SLACK,
    ddr: int | str | None = None,
    hbm: int | str = 0,
    device: str = "cpu",
    policy: str = AUTO,
    threads: int | None = None,
) -> "ShardedStore":
    """Open this rank's part of the store in ``directory``, or create it; collective.

    Args:
        directory: of the ranks' stores; each has ``RANK-of-RANKS`` in it. Ranks may be on different disks or hosts.
        group: of ``torch.distributed``, with a backend for CPU tensors; None for all ranks.
        plan: how tables are sharded, or a file of it, as ``tierstore plan place`` writes them; the same on all ranks.
            Default: each table by rows over all ranks.
        keep: commits that stay, at least 2.
        ddr: of each rank, as for ``tierstore.open``; default: half the machine's memory, divided by the number of ranks
            on it (torchrun's LOCAL_WORLD_SIZE).
        threads: of each rank; default: the CPUs this process may use, divided likewise.
        device: "cpu".
        cold, slack, hbm, policy: of each rank, as for ``tierstore.open``.

    Raises:
        TierstoreError: the ranks' stores are of different runs, have no commit in common, or were written by another
            number of ranks. Others: as of ``tierstore.open``.
        TableError: the ranks' tables differ.
        ValueError: a wrong argument, or this process is not in the group. RuntimeError: another rank failed.
    """
    ranks = Ranks(group)
    with contextlib.ExitStack() as opened:  # closed again if any rank fails
        with ranks.together():
            if keep < 2:
                raise ValueError(
                    f"keep={keep}: a sharded store keeps at least 2 commits, as not all ranks may have the last"
                )
            if str(device) != "cpu":
                raise ValueError(f'device={str(device)!r}: ranks exchange rows on the CPU for now; leave it "cpu"')
            if isinstance(plan, (str, os.PathLike)):
                plan = Plan.load(plan)
            if plan is not None and plan.world_size != ranks.size:
                raise ValueError(f"the plan is for {plan.world_size} ranks, and there are {ranks.size}")
            on_host = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            local = open_store(
                None if directory is None else _own_folder(Path(directory), ranks),
                cold=cold,
                keep=keep,
                slack=slack,
                ddr=f"{50 / on_host:.3f}%" if ddr is None else ddr,
                hbm=hbm,
                device=device,
                policy=policy,
                threads=max(default_threads() // on_host, 1) if threads is None else threads,
            )
            opened.callback(local.close)
        made = ShardedStore(local, ranks, keep, {} if plan is None else plan.tables)
        opened.pop_all()
    return made


def _own_folder(folder: Path, ranks: Ranks) -> Path:
    found = [re.fullmatch(r"\d+-of-(\d+)", each.name) for each in folder.glob("*-of-*") if each.is_dir()]
    others = {int(match[1]) for match in found if match} - {ranks.size}
    if others:
        written_by = min(others)
        raise TierstoreError(f"{folder} was written by {written_by} ranks, and there are {ranks.size}: start as many")
    return folder / f"{ranks.rank}-of-{ranks.size}"


class ShardedStore:
    """This rank's part of a sharded store; made by ``open_sharded``. Methods marked collective are called by all ranks
    in the same order.

    Attributes:
        local: this rank's store. Read and write only rows that this rank owns in it; commit by ``commit``.
        ranks: the group.
        owners: of the rows.
        shardings: of the tables that all ranks have, by name.
    """

    def __init__(self, local: Store, ranks: Ranks, keep: int, planned: Mapping[str, Sharding]) -> None:
        self.local = local
        self.ranks = ranks
        self.owners = Owners(ranks)
        self._keep = keep
        self._planned = planned
        self.shardings: dict[str, Sharding] = {}
        with ranks.together():
            own = _Commits.of(local)
        self._number, self._attempt, self._run, self._versions = 0, 0, "", dict[int, int]()
        self._extra, self._tensors = dict[str, Any](), dict[str, Tensor]()
        self._agree(ranks.gather(own))

    def _agree(self, all_commits: Sequence[_Commits]) -> None:
        """Go to the newest commit that all ranks have."""
        runs = sorted({each.run for each in all_commits if each.run})
        common = set.intersection(*(set(each.versions) for each in all_commits))
        with self.ranks.together():
            if len(runs) > 1:
                raise TierstoreError(f"{self.local.directory}: the ranks' stores are of {len(runs)} different runs")
            if not common and any(len(each.versions) > 1 or max(each.versions, default=0) for each in all_commits):
                lost = [rank for rank, each in enumerate(all_commits) if not each.versions]
                raise TierstoreError(
                    f"{self.local.directory}: the ranks have no commit in common"
                    + (f"; rank {lost[0]} has none at all: is its directory there?" if lost else "")
                )
            self._versions = all_commits[self.ranks.rank].versions
            self._attempt = max(number for each in all_commits for number in (0, *each.versions))
            shardings = dict[str, Sharding]()
            if common:
                self._number = max(common)
                if self._versions[self._number] != self.local.version:
                    self.local.rollback(self._versions[self._number])
                self._note_agreed()
                saved = self.local.extra[_SECTION]["shardings"].items()
                shardings = {name: Sharding.from_json(fields, self.ranks.size) for name, fields in saved}
            tables = [(name, self.local[name].index, self.local[name].config) for name in shardings]
        self._require_alike(tables)
        self._take(shardings)
        self._run = runs[0] if runs else self.ranks.first(secrets.token_hex(8))
        if not common:
            self._commit(0, None, None)

    def _note_agreed(self) -> None:
        """Keep what the local commit holds, which all ranks have: a later one may not be all ranks'."""
        self._extra, self._tensors = self.local.extra["extra"], self.local.tensors()

    def _require_alike(self, tables: Sequence[tuple[Any, ...]]) -> None:
        """TableError in all ranks if they describe tables differently. Collective."""
        found = self.ranks.gather(list(tables))
        for rank, others in enumerate(found):
            for one, other in itertools.zip_longest(found[0], others):
                if one != other:
                    raise TableError(
                        f"ranks 0 and {rank} differ in a table: {one} and {other}. All ranks must create the same "
                        "tables in the same order, from the first on"
                    )

    def _take(self, shardings: dict[str, Sharding]) -> None:
        self.shardings = shardings
        self.owners.set({self.local[name]: each for name, each in shardings.items()})

    def create_table(
        self,
        config: TableConfig,
        *,
        sharding_type: ShardingType | None = None,
        ranks: Sequence[int] | None = None,
        exchange: Exchange | None = None,
    ) -> Table:
        """Add a table, or find it; collective, with the same arguments on all ranks.

        Args:
            sharding_type, ranks, exchange: see ``Sharding``. Default: as the plan has them, else "row_wise" over all
                ranks; a "table_wise" table is on the rank whose tables have the fewest bytes.

        Returns:
            the table as this rank's store has it. Read and write only rows that this rank owns in it.

        Raises:
            TableError: as ``Store.create_table``, or ranks differ in the arguments or the table's number; then nothing
                was created. ValueError, TypeError: no sharding, or not the one that is there.
            RuntimeError: another rank failed.
        """
        with self.ranks.together():
            sharding = self._sharding_of(config.name, sharding_type, ranks, exchange)
            index = self.local[config.name].index if config.name in self.local else len(self.local.tables)
        self._require_alike([(config.name, index, config, sharding)])
        with self.ranks.together():
            table = self.local.create_table(config)
        self._take({**self.shardings, config.name: sharding})
        return table

    def _sharding_of(self, name: str, sharding_type: Any, ranks: Any, exchange: Any) -> Sharding:
        known, planned = self.shardings.get(name), self._planned.get(name)
        default = known or planned
        if default is not None and sharding_type in (None, default.sharding_type):
            sharding_type, ranks = default.sharding_type, default.ranks if ranks is None else ranks
            exchange = default.exchange if exchange is None else exchange
        kind = sharding_type or "row_wise"
        places = self._default(kind) if ranks is None else ranks
        sharding = Sharding.checked(kind, places, exchange or "rows", self.ranks.size)
        if kind in ("column_wise", "data_parallel") or sharding.exchange == "pooled":
            raise NotImplementedError(f"{kind}, exchange={sharding.exchange!r}: not yet")
        if known is not None and known != sharding:
            raise ValueError(f"table {name!r} is sharded {known.sharding_type} over ranks {known.ranks}")
        return sharding

    def _default(self, sharding_type: str) -> Sequence[int]:
        if sharding_type == "row_wise":
            return range(self.ranks.size)
        used = [0.0] * self.ranks.size
        for name, sharding in self.shardings.items():
            for rank in sharding.ranks:
                used[rank] += self.local[name].size_bytes / len(sharding.ranks)
        return [used.index(min(used))]

    @property
    def tables(self) -> Mapping[str, Table]:
        """All tables by name, as this rank's store has them."""
        return self.local.tables

    @property
    def version(self) -> int:
        """Number of the last commit that all ranks have; 0 before the first."""
        return self._number

    @property
    def extra(self) -> dict[str, Any]:
        """What this rank gave to the last commit that all ranks have."""
        return copy.deepcopy(self._extra)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank gave to the last commit that all ranks have, on the CPU."""
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def commit(self, *, extra: dict[str, Any] | None = None, tensors: Mapping[str, Tensor] | None = None) -> int:
        """Make all ranks' rows one version, atomically and durably; collective.

        Args:
            extra, tensors: of this rank, as for ``Store.commit``.

        Returns:
            its number. All ranks have it; before, each has the last one still.

        Raises:
            RuntimeError: another rank could not commit; the last version stands, rows are still in memory, and a later
                commit may succeed. Others: as ``Store.commit``.
        """
        return self._commit(self._attempt + 1, extra, tensors)

    def _commit(self, number: int, extra: dict[str, Any] | None, tensors: Mapping[str, Tensor] | None) -> int:
        self._attempt = number
        self._versions = {each: version for each, version in self._versions.items() if version in self.local.versions}
        section = {
            "run": self._run,
            "number": number,
            "versions": {str(each): version for each, version in self._versions.items()},
            "shardings": {name: each.to_json() for name, each in self.shardings.items()},
        }
        failed = max(number - self._number - 1, 0)  # which must not push out the last one that all ranks have
        self.local.keep = self._keep + failed
        with self.ranks.together():
            self._versions[number] = self.local.commit(extra={_SECTION: section, "extra": extra or {}}, tensors=tensors)
        self._number = number
        self._note_agreed()
        return number

    def close(self) -> None:
        """Close this rank's store; what was not committed is lost."""
        self.local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
