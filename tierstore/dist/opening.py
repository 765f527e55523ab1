"""A rank's part of a sharded store, opened: as it is, or made of the parts that another number of ranks wrote.

A kill at any instant loses nothing, for these reasons:

1. Each part that another number of ranks wrote is opened for writing by one rank: nobody else trains on it.
2. Of the sets of parts, the one with the newest commit that all its parts have is the run. A set without a commit is
   none; a set that lacks a part and has a newer commit is an error.
3. A new part is made in a folder within its place and gets its manifest last. So a part is there whole, at the commit
   that it was made of, or not at all.
4. Only when all ranks have opened theirs at that commit are the others moved into ``replaced-at-N``, where they are a
   sharded store of their own. Nothing is deleted.
"""

import contextlib
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import DamagedError, StoreLockedError, StoreNotFoundError, TierstoreError
from ..store import Store, open_store
from ..store.directory import Opened, open_files
from ..store.manifest import MANIFEST_NAME, parts_in
from ..system.checks import excerpt
from ..system.files import make_directory, output_errors, require_room, sync_directory
from ..system.killpoints import reach
from .parts import NO_COMMITS, Commits, Source, in_common, newer_set, open_parts, part_sets, read_commits
from .plan import Sharding
from .ranks import Ranks
from .reshard import WORK_NAME, made_id, resized, share_bytes, stored_rows, write_part

_LOG: Final = logging.getLogger("tierstore")
_ATTEMPTS: Final = 10
"""To open a commit that all ranks have before their writers drop it."""
_Mark = tuple[int, int]
"""Tells the ranks that see a part in one folder from those that have a copy of it: inode and time of its manifest."""


def require_alike(ranks: Ranks, **settings: Any) -> None:
    """ValueError in all ranks, which names the setting, if one differs. Collective."""
    gathered = ranks.gather(settings, "open_sharded")
    for rank, others in enumerate(gathered):
        for name, own in gathered[0].items():
            if others[name] != own:
                differing = f"{excerpt(own)} and {excerpt(others[name])}"
                raise ValueError(f"{name} of ranks 0 and {rank} differs: {differing}; give all ranks the same")


def open_to_read(ranks: Ranks, folder: Path, options: Mapping[str, Any]) -> Store:
    """This rank's part, open for reading at the newest commit that all ranks have. Collective. Errors as of
    ``open_sharded``."""
    path = folder / f"{ranks.rank}-of-{ranks.size}"
    for _ in range(_ATTEMPTS):
        with ranks.together():
            others = {size: parts for size, parts in part_sets(folder).items() if size != ranks.size}
            if others and not (path / MANIFEST_NAME).exists():
                raise _written_by_others(folder, max(others), ranks.size)
            own = read_commits(path)
        gathered = ranks.gather(own, "open_sharded")
        store, newest = None, max(in_common(gathered), default=None)
        with ranks.together():
            if newest is None:
                raise TierstoreError(f"{folder}: the ranks have no commit in common yet")
            if (newer := newer_set(folder, others, newest)) is not None:
                raise _written_by_others(folder, newer.size, ranks.size)
            with contextlib.suppress(StoreNotFoundError):
                store = open_store(path, mode="r", version=own.versions[newest], **options)
        if all(ranks.gather(store is not None)):
            assert store is not None
            return store
        if store is not None:
            store.close()
    raise TierstoreError(
        f"{folder}: each time, the ranks that write dropped a commit before all could open it; try again"
    )


def _written_by_others(folder: Path, size: int, own_size: int) -> StoreNotFoundError:
    return StoreNotFoundError(
        f"{folder} was written by {size} ranks, and {own_size} are to read it: start {size}, or read whole tables in "
        f'each process by tierstore.open({str(folder)!r}, mode="r")'
    )


class _Seen(NamedTuple):
    """What a rank found in its folder: parts of other numbers of ranks that it opened, and why not others; commits of
    its own part, without shardings; names of the parts that may move, and of those that did, with their folder's."""

    held: set[_Mark]
    refused: dict[_Mark, str]
    own: Commits
    moving: set[str]
    moved: set[str]


class OwnPart:
    """This rank's part in a folder, open for writing. Other parts there are held until ``release``.

    Args:
        planned: how tables are to be sharded if the part is made of others. options: of ``open_store``.

    Attributes:
        store: the caller's to close.
        source: of which set of parts the ranks' parts were made; None if they were there, or are new.

    Errors are those of ``open_sharded``.
    """

    def __init__(self, ranks: Ranks, folder: Path, planned: Mapping[str, Sharding], options: Mapping[str, Any]) -> None:
        self._ranks = ranks
        self._folder = folder
        self._path = folder / f"{ranks.rank}-of-{ranks.size}"
        self._planned = planned
        self._options = options
        self._held: dict[Path, Opened] = {}
        self.source: Source | None = None
        with contextlib.ExitStack() as opened:
            opened.callback(self.release)
            self.store = self._open()
            opened.pop_all()

    def _open(self) -> Store:
        ranks, local = self._ranks, None
        with contextlib.ExitStack() as opened:
            with ranks.together():
                self._require_sharded()
                held, refused = self._hold()
                if (self._path / MANIFEST_NAME).exists():
                    local = opened.enter_context(contextlib.closing(open_store(self._path, **self._options)))
                own = NO_COMMITS if local is None else Commits.of(local)
                moving = {path.name for path in (*self._held, self._path) if path.exists()}
                moved = {f"{path.parent.name}/{path.name}" for path in self._folder.glob("replaced-at-*/*-of-*")}
            gathered = ranks.gather(_Seen(held, refused, own._replace(shardings={}), moving, moved))
            all_held = set[_Mark]().union(*(each.held for each in gathered))
            for each in gathered:
                for mark in each.refused.keys() - all_held:
                    raise StoreLockedError(each.refused[mark])
            reach("reshard: other parts held")
            all_own = [each.own for each in gathered]
            self.source = self._choose(all_own)
            number = self.source.number if self.source else max(in_common(all_own), default=0)
            moving = set[str]().union(*(each.moving for each in gathered))
            moved = set[str]().union(*(each.moved for each in gathered))
            names = (f"replaced-at-{number}" + (f".{count}" if count else "") for count in itertools.count())
            self._aside = self._folder / next(name for name in names if not moved & {f"{name}/{p}" for p in moving})
            if self.source is not None:
                opened.close()
                local = None
                self._make(self.source, own)
            with ranks.together():
                if local is None:
                    local = opened.enter_context(contextlib.closing(open_store(self._path, **self._options)))
            opened.pop_all()
        return local

    def _require_sharded(self) -> None:
        """StoreNotFoundError if one process wrote a store here, or a copy to here was cut short."""
        folder, size = self._folder, self._ranks.size
        if (folder / MANIFEST_NAME).exists():
            raise StoreNotFoundError(
                f"{folder} was written by one process: go on in one, without torchrun, divide it by tierstore reshard "
                f"{folder} NEW_DIR --ranks {size}, or choose another folder"
            )
        if (folder / WORK_NAME).exists():
            raise StoreNotFoundError(
                f"{folder} holds {WORK_NAME}, of a copy that was cut short: make it again by tierstore reshard"
            )

    def _hold(self) -> tuple[set[_Mark], dict[_Mark, str]]:
        """Open for writing the parts of other numbers of ranks, unless other ranks of this run have; which it opened,
        and why others were refused."""
        found = [part for part in parts_in(self._folder) if part.size != self._ranks.size]
        first = self._ranks.rank * len(found) // self._ranks.size  # so that each rank gets some
        held, refused = set[_Mark](), dict[_Mark, str]()
        for part in found[first:] + found[:first]:
            mark = _mark(part.path)
            try:
                self._held[part.path] = open_files(part.path, readonly=False)
            except StoreLockedError as error:
                refused[mark] = (
                    f"{error} It is a part of {part.size} ranks: {self._ranks.size} may go on from it when their run "
                    "has ended"
                )
            except DamagedError:
                pass  # if it matters, newer_set says so
            else:
                held |= {mark, _mark(part.path)}  # an open may write a manifest that was cut short
        return held, refused

    def _choose(self, all_own: Sequence[Commits]) -> Source | None:
        """The parts of another number of ranks that are the run, or None: those of as many ranks as there are, if any.
        All ranks must have them."""
        ranks, folder, last = self._ranks, self._folder, max(each.last for each in all_own)
        number = max(in_common(all_own), default=0)
        with ranks.together():
            others = {size: parts for size, parts in part_sets(folder).items() if size != ranks.size}
            found = newer_set(folder, others, number)
            if found is not None and last and {each.run for each in all_own if each.last} != {found.commits[0].run}:
                raise TierstoreError(
                    f"{folder} has parts of different runs of {found.size} and of {ranks.size} ranks: keep those of "
                    "one, and move the others away"
                )
            if found is not None and not number and last > found.number:
                raise TierstoreError(
                    f"{folder} has commit {found.number} of {found.size} ranks, and parts of {ranks.size} ranks with "
                    f"commits up to {last}, but none in common: bring back what is missing, or move them away"
                )
        sources = ranks.gather(None if found is None else (found.number, found.size))
        if len(set(sources)) > 1:
            raise StoreNotFoundError(
                f"{folder}: the ranks see different parts, (commit, number of ranks): {sources}. Copy the parts of all "
                "hosts into the folder of each"
            )
        return found

    def _make(self, source: Source, own: Commits) -> None:
        """This rank's part, of the others; one that was made before a kill stays."""
        ranks = self._ranks
        with contextlib.ExitStack() as opened:
            with ranks.together():
                parts = opened.enter_context(open_parts(self._folder, source))
                plan = resized(parts, ranks.size, self._planned)
                is_there = own.ids.get(own.last) == made_id(parts, plan) != ""
                stored = stored_rows(parts, parts.paths[ranks.rank :: ranks.size])
            all_stored = sum(ranks.gather(stored), Counter[str]())
            device = socket.gethostname(), os.stat(self._folder).st_dev
            needed = 0 if is_there else share_bytes(parts, plan, ranks.rank, all_stored)
            needs = ranks.gather((device, needed))
            with ranks.together():
                require_room(self._path, sum(each for other, each in needs if other == device))
            with ranks.together():
                if not is_there:
                    names = {each.name for each in self._path.iterdir()} if self._path.exists() else set[str]()
                    if names and (MANIFEST_NAME in names or WORK_NAME not in names):  # more than a part cut short
                        with output_errors(self._path):
                            self._move_aside(self._path)
                        reach("reshard: stale part set aside")
                    write_part(parts, self._path, ranks.rank, plan)
                    reach("reshard: part written")

    def replace_others(self, version: int) -> None:
        """Move the parts of other numbers of ranks away, now that all ranks show a version of theirs. Collective.
        TierstoreError: it is not the one that they were made of."""
        with self._ranks.together():
            if self.source is not None and version != self.source.number:
                raise TierstoreError(
                    f"{self._folder}: the ranks opened commit {version} of the new parts, which were made of "
                    f"{self.source.number}; the parts of {self.source.size} ranks are as they were"
                )
        reach("reshard: parts opened")
        for path in list(self._held):
            self._held.pop(path).cold.close()
            try:
                self._move_aside(path)
            except OSError as error:  # it stays where it is, and the next opening tries again
                _LOG.warning("%s, a part of another number of ranks, cannot be moved away: %s", path, error)
            reach("reshard: replaced part set aside")
        reach("reshard: done")

    def _move_aside(self, path: Path) -> None:
        make_directory(self._aside)
        os.rename(path, self._aside / path.name)
        sync_directory(self._aside)
        sync_directory(self._folder)

    def release(self) -> None:
        """Hold other parts no more."""
        for opened in self._held.values():
            opened.cold.close()


def _mark(path: Path) -> _Mark:
    found = (path / MANIFEST_NAME).stat()
    return found.st_ino, found.st_mtime_ns
