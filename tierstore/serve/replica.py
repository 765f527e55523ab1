"""A replica: follows sources, applies what they offer, and offers it to others.

One task takes the sources' lists as they come, fetches the files that lead to the wanted version, and has them applied
by a process of its own. Whatever waits for a disk or a socket runs in a thread. A canary takes versions on trial.
"""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from starlette.routing import Route

from ..errors import DiskFullError, TierstoreError
from ..system.checks import excerpt
from ..system.killpoints import reach
from ..system.processes import child_options
from ..updates.fetch import Source, Transfer, require_room
from ..updates.listing import MAX_NAMED, MIN_REQUESTS, Canary, Folder, Listing, Measures, Offered, Verdict, way
from ..updates.update_file import Origin, origin_of
from .metrics import WINDOW_SECONDS
from .offer import UpdateError, offer_routes

_LOG: Final = logging.getLogger("tierstore.serve")
POLL_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = (4.0, 64.0)  # after a failure on the way to a version: at first, and after many
_WRITE_LIMIT_SECONDS: Final = 4 * 3600.0
_FULL: Final = 507
_MAX_KEPT: Final = 64
_MAX_KEPT_BYTES: Final = 1 << 30  # of files, the last one counted, which is kept in any case
_REFUSED: Final = 422
_UNKNOWN: Final = Measures()
_MAX_REMEMBERED: Final = 1024  # files that were refused, and commits that could not be shown: the newest
_LISTS_SECONDS: Final = 0.25
"""For which a step waits for lists. A later list counts in a later step, which does not wait for it again."""
_MAX_POLLS: Final = 64


class Writer:
    """The process that writes a replica, which this one has open for reading; started when needed, and if it ended.
    ``start`` and ``close`` wait for the system: for threads."""

    def __init__(self) -> None:
        self._process: Any = None
        self._starting = threading.RLock()

    def start(self) -> None:
        with self._starting:
            if self._process is None or self._process.poll() is not None:
                self.close()
                code, parent = "from tierstore.updates import apply; apply.answer_lines()", str(os.getpid())
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True,
                    **child_options(subprocess.PIPE, TIERSTORE_PARENT=parent),
                )  # fmt: skip

    async def ask(self, *request: str) -> dict[str, Any]:
        """Its answer; one at a time. UpdateError: it refuses, or ended."""
        try:
            await asyncio.to_thread(self.start)
            async with asyncio.timeout(_WRITE_LIMIT_SECONDS):
                outcome: dict[str, Any] = json.loads(await asyncio.to_thread(self._exchange, json.dumps(request)))
        except (OSError, ValueError) as error:
            await asyncio.to_thread(self.close)
            raise UpdateError(500, f"the process that writes ended: {error}", is_passing=True) from error
        except asyncio.CancelledError:
            await asyncio.to_thread(self.close)  # its answer would be taken for the next one's
            raise
        if "error" in outcome:
            raise UpdateError(
                _FULL if outcome["is_full"] else _REFUSED, outcome["error"],
                is_passing=not outcome["is_refused"], faults=outcome["faults"],
            )  # fmt: skip
        return outcome

    def _exchange(self, line: str) -> str:
        process = self._process
        if process is None:
            raise ValueError("it was closed")
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer: str = process.stdout.readline()
        return answer

    def close(self) -> None:
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:
                pass


class Replica:
    """Follows sources for the replica that a server has open for reading.

    Args:
        extra: gives ``Store.extra`` of the version that the server shows; empty if there is none.
        refresh: has the server move to the replica's newest commit.
        lookups: gives row keys and how often each was looked up.
        canary: takes versions on trial; None: takes what others are to show.
        measure: how the server fared in the last seconds with a commit; None while its watch has not measured that.
    """

    def __init__(
        self, directory: Path, sources: Sequence[Source], *, extra: Callable[[], Mapping[str, Any]],
        refresh: Callable[[], Awaitable[object]], lookups: Callable[[], Sequence[tuple[int, int]]] = tuple,
        canary: Canary | None = None, measure: Callable[[int, str], Measures | None] = lambda *_: None,
    ) -> None:  # fmt: skip
        self._directory, self._sources = directory.absolute(), list(sources)
        self.folder = Folder(self._directory / "incoming")
        self._extra, self._refresh, self._lookups = extra, refresh, lookups
        self._canary, self._measure = canary, measure
        self._writer = Writer()
        self._turn = asyncio.Lock()  # of what changes the replica
        self._transfer: tuple[Transfer, asyncio.Task[None]] | None = None
        self._pollers = ThreadPoolExecutor(_MAX_POLLS, "polls")
        self._polls: dict[Source, asyncio.Future[Listing]] = {}
        self._refused: deque[str] = deque(maxlen=_MAX_REMEMBERED)  # ids of files that cannot be applied
        self._unfit: deque[str] = deque(maxlen=_MAX_REMEMBERED)  # commits that cannot be shown
        self._cut_off: Origin | None = None  # urgent rows are of a commit that is lost: only a full copy leads on
        self._shown_at = self._judge_at = 0.0
        self._said = ""

    def routes(self) -> list[Route]:
        return offer_routes(self.folder, self._lookups)

    @property
    def own(self) -> Origin | None:
        return origin_of(self._extra())

    async def run(self) -> None:
        try:
            await asyncio.to_thread(self._writer.start)
            with contextlib.suppress(TierstoreError, OSError):  # of a full disk; later steps say so
                await self.begin()
            retry, most = _RETRY_SECONDS
            while True:
                try:
                    pause = 0.0 if await self.step() else POLL_SECONDS
                    retry = _RETRY_SECONDS[0]
                except Exception as error:
                    trace = None if isinstance(error, TierstoreError | OSError) else error
                    self._say(str(error), trace)
                    pause, retry = retry, min(2 * retry, most)
                await asyncio.sleep(pause)
        finally:
            await self.end()

    async def end(self) -> None:
        await self._stop_transfer()
        self._pollers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._writer.close)

    def _say(self, what: str, trace: Exception | None = None) -> None:
        """Log something once, not at each step."""
        if what != self._said:
            _LOG.warning("the replica does not move on: %s", what, exc_info=trace)
        self._said = what

    async def begin(self) -> None:
        await asyncio.to_thread(self.folder.open)
        await asyncio.to_thread(self.folder.put, replace(self.folder.listing, shown=self.own))

    async def step(self) -> bool:
        """Do one thing towards the version that the sources want shown; whether there may be more to do."""
        async with self._turn:
            await self._poll()
            own, listing = self.own, self.folder.listing
            if own is not None and await self._went_back(own, listing):
                return True
            target = self._target(own, listing)
            if target is None:
                return False
            if target == own:
                await self._stop_transfer()
                return await self._judge(target)
            files = await self._fetched(own, target)
            return files is not None and await self._apply(files, own, target)

    async def _poll(self) -> None:
        loop, idle = asyncio.get_running_loop(), [each for each in self._sources if each not in self._polls]
        begun = {each: loop.run_in_executor(self._pollers, each.poll) for each in idle}
        if begun:
            await asyncio.wait(begun.values(), timeout=_LISTS_SECONDS)
        self._polls = {each: poll for each, poll in (self._polls | begun).items() if not poll.done()}
        lists = [each.listing for each in self._sources]
        if errors := [each.error for each in self._sources if each.error]:
            self._say("; ".join(errors))
        known = self.folder.listing
        for found in lists:
            known = known.judged(found.verdicts)
        own, stores = self.own, {each.target.source: each.target for each in lists if each.target is not None}
        if own is not None and (others := stores.keys() - {own.source}):
            raise UpdateError(
                409, f"the sources have {stores[min(others)]}, and this is {own}. A replica takes updates of one "
                "store; to have another one's, start the server with a new, empty directory",
            )  # fmt: skip
        if len(stores) > 1:
            raise UpdateError(409, f"the sources offer several stores, {', '.join(sorted(stores))}: name those of one")
        newest = max((known, *lists), key=lambda each: each.serial)
        if newest.target is not None and newest is not known:
            known = replace(known, serial=newest.serial, target=newest.target, trial=newest.trial)
        await asyncio.to_thread(self.folder.put, known)

    def _target(self, own: Origin | None, listing: Listing) -> Origin | None:
        """What this server is to show; None: what it shows, whatever that is."""
        avoided, target = {*listing.left, *listing.declined, *self._unfit}, listing.target
        if self._canary is not None and own is not None and listing.trial is not None:
            target = target if listing.trial.commit_id in avoided else listing.trial
        return None if target is None or target.commit_id in avoided else target

    async def _went_back(self, own: Origin, listing: Listing) -> bool:
        """Go back from a version that was declined, or that is not wanted any more where it follows the wanted one."""
        shown = {own.commit_id, own.urgent} - {""}
        is_declined = shown & {*listing.declined, *listing.left}
        is_over = listing.before is not None and listing.before == self._target(own, listing)
        if not (is_declined or is_over) or own.commit_id in self._unfit:
            return False
        try:
            await self._go_back(own)
        except UpdateError as error:
            if error.is_passing:
                raise
            self._unfit.append(own.commit_id)  # a full copy brings it elsewhere
            self._say(str(error))
            return False
        return True

    async def _go_back(self, own: Origin) -> Origin:
        origin = Origin(**await self._writer.ask("rollback", own.urgent or own.commit_id, str(self._directory)))
        reach("rollback: written")
        await self._refresh()
        if self.own == own:
            raise UpdateError(503, "the server stops, and shows the version before when it starts", is_passing=True)
        await self._put(before=None)
        _LOG.info("went back from %s to %s", own, origin)
        return origin

    async def roll_back(self) -> int:
        """Show the version before the current one, and never this one again; its number at the source. Of a canary it
        is declined for all. UpdateError: that cannot be done now."""
        async with self._turn:
            own, known = self.own, self.folder.listing
            if own is None:
                raise UpdateError(_REFUSED, "there is no version yet")
            left = own.urgent or own.commit_id
            await self._decline(own, "an operator went back from it")
            reach("rollback: declined")
            try:
                origin = await self._go_back(own)
            except UpdateError as error:
                if not error.is_passing:  # it was refused
                    await asyncio.to_thread(self.folder.put, known)
                raise
            self._unfit = deque((each for each in self._unfit if each != left), _MAX_REMEMBERED)
        return origin.version

    async def _decline(self, own: Origin, why: str, before: Measures = _UNKNOWN, after: Measures = _UNKNOWN) -> None:
        known, left = self.folder.listing, own.urgent or own.commit_id
        known = replace(known, left=(*(each for each in known.left if each != left), left)[-MAX_NAMED:])
        if self._canary is not None:
            known = known.judged([Verdict(own.version, left, False, why, before, after)])
            _LOG.warning("version %d is declined: %s", own.version, why)
        await asyncio.to_thread(self.folder.put, known)

    async def _fetched(self, own: Origin | None, target: Origin) -> list[Offered] | None:
        """The files that lead to a version, once they are here; None while they are not."""
        own_files = self.folder.listing.files
        whole = await asyncio.to_thread(lambda: [each for each in own_files if self._path(each).exists()])
        offered = {
            each.id: each for each in (*whole, *(each for source in self._sources for each in source.listing.files))
        }
        # A canary takes a version as a whole.
        is_urgent_fit = self._canary is None
        usable = [each for each in offered.values() if each.id not in self._refused and each.is_urgent <= is_urgent_fit]
        files = way(usable, None if own == self._cut_off else own, target, {each.id for each in own_files})
        if files is None:
            await self._stop_transfer()
            self._say(f"nobody offers what leads from {own or 'nothing'} to {target}")
            return None
        if self._transfer is not None and self._transfer[0].offered not in files:
            await self._stop_transfer()
        if self._transfer is None:
            lacking = [each for each in files if each not in whole]
            if not lacking:
                return files
            await self._start_transfer(lacking[0], files)
        assert self._transfer is not None
        task = self._transfer[1]
        if (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
            self._transfer = None
            task.result()
            return await self._fetched(own, target)
        return None

    def _path(self, offered: Offered) -> Path:
        return self.folder.path / offered.id

    async def _start_transfer(self, offered: Offered, files: Sequence[Offered]) -> None:
        """Fetch a file, from those that have it. It is offered from now on, as far as it has come."""
        known = self.folder.listing
        listed = [*(each for each in known.files if each not in files), *files[: files.index(offered) + 1]]
        await self._put(files=tuple(listed), way=files)
        try:
            await asyncio.to_thread(require_room, self.folder.path, offered.size_bytes)
        except DiskFullError:
            await self._put(files=tuple(files[: files.index(offered) + 1]), way=files)
            await asyncio.to_thread(require_room, self.folder.path, offered.size_bytes)
        having = [each for each in self._sources if offered in each.listing.files]
        transfer = Transfer(self.folder.path, offered, having)
        self._transfer = transfer, asyncio.create_task(asyncio.to_thread(transfer.run))

    async def _stop_transfer(self) -> None:
        if self._transfer is not None:
            (transfer, task), self._transfer = self._transfer, None
            transfer.stop()
            await asyncio.wait({task})
            with contextlib.suppress(Exception):
                task.result()

    async def _put(self, *, way: Sequence[Offered] = (), **changes: Any) -> None:
        """Replace parts of the list. Files stay that lead to what is shown, as far as there is place for them, and
        those of the way to what comes next."""
        known = replace(self.folder.listing, shown=self.own, **changes)
        end, kept, total = "" if known.shown is None else known.shown.commit_id, set(way), 0
        if known.shown is not None:
            kept |= {each for each in known.files if each.is_urgent and each.commit_id == known.shown.urgent}
        for place in range(_MAX_KEPT):
            last = next((each for each in known.files if each.commit_id == end and not each.is_urgent), None)
            if last is None or (place and total + last.size_bytes > _MAX_KEPT_BYTES):
                break
            kept.add(last)
            total, end = total + last.size_bytes, last.since_commit_id
        if not way:  # what had begun to arrive, before this process or before an urgent version
            ends = {each.commit_id for each in (known.target, known.trial) if each}
            kept |= {each for each in known.files if each.commit_id in ends}
        known = replace(known, files=tuple(each for each in known.files if each in kept))
        await asyncio.to_thread(self.folder.put, known)

    async def _apply(self, files: Sequence[Offered], own: Origin | None, target: Origin) -> bool:
        """Apply files as one version, and show it; if that fails, the one before stays. False: a canary waits."""
        listing = self.folder.listing
        if self._canary is not None and own is not None and target == listing.trial:
            window = min(self._canary.seconds, WINDOW_SECONDS)
            before = await asyncio.to_thread(self._measure, window, own.commit_id + own.urgent)
            if before is None or before == Measures():
                self._say(f"the canary has fewer than {MIN_REQUESTS} requests, or its watch has not measured {own}")
                return False
            listing = replace(listing, trial_of=target.commit_id, trial_before=tuple(before))
            await asyncio.to_thread(self.folder.put, listing)
        started, commit = time.monotonic(), "" if own is None else own.commit_id
        try:
            paths = [str(self._path(each)) for each in files]
            applied = await self._writer.ask("apply", commit, str(self._directory), *paths)
        except UpdateError as error:
            faults = {each.id: error.faults.get(str(self._path(each))) for each in files}
            if own is not None and own.urgent and files[0].since and faults[files[0].id] == "refused":
                self._cut_off, faults[files[0].id] = own, None  # it may fit after a full copy
            for path in [self._path(each) for each in files if faults[each.id] == "damaged"]:  # fetched again
                await asyncio.to_thread(path.unlink, missing_ok=True)
            self._refused.extend(each for each, fault in faults.items() if fault == "refused")
            kept = tuple(each for each in files if each.id not in self._refused)
            if error.http_status == _FULL:
                await self._put(files=kept, way=kept)
            elif len(kept) < len(files):
                await self._put(files=tuple(each for each in listing.files if each.id not in self._refused), way=kept)
            if faults[files[-1].id] == "refused" and self._canary is not None and target == listing.trial:
                await self._decline(target, f"it cannot be applied: {excerpt(str(error), 300)}")
            raise
        reach("update: applied")
        await self._show(applied, target)
        if self.own == own:  # the server stops, and shows it when it starts
            return False
        reach("update: shown")
        self._shown_at, self._judge_at, self._said = time.monotonic(), 0.0, ""
        await self._put(before=own and own._replace(urgent=""))
        reach("update: file kept")
        _LOG.info("version %d: %d rows in %.1f s", applied["version"], applied["rows"], time.monotonic() - started)
        return True

    async def _show(self, applied: Mapping[str, Any], target: Origin) -> None:
        try:
            await self._refresh()
        except Exception as error:
            self._unfit.append(target.commit_id)
            if not applied["was_there"]:  # what is shown and what the replica has are the same again
                with contextlib.suppress(UpdateError):  # of a first version there is none before
                    await self._writer.ask("rollback", "", str(self._directory))
            if self._canary is not None and target == self.folder.listing.trial:
                await self._decline(target, f"it cannot be shown: {excerpt(str(error), 300)}")
            raise

    async def _judge(self, own: Origin) -> bool:
        """Compare what is on trial with before, once it was shown for long enough; whether there is a new verdict."""
        known, canary, now = self.folder.listing, self._canary, time.monotonic()
        if canary is not None and own == known.trial and known.trial_of != own.commit_id:
            known = replace(known, trial_of=own.commit_id, trial_before=())  # it was shown before: nothing to compare
            await asyncio.to_thread(self.folder.put, known)
            self._shown_at, self._judge_at = now, 0.0
        if canary is None or known.trial_of != own.commit_id or known.verdict_on(own.commit_id) is not None:
            return False
        window = min(canary.seconds, WINDOW_SECONDS)
        self._shown_at = self._shown_at or now  # an earlier process may have shown it first
        self._judge_at = self._judge_at or self._shown_at + window + 1  # servers count whole seconds
        if now < self._judge_at:
            return False
        self._judge_at = now + (window if now < self._shown_at + canary.seconds else POLL_SECONDS)
        before = Measures(*known.trial_before)
        after = await asyncio.to_thread(self._measure, window, own.commit_id) or Measures()
        if worse := canary.worse(before, after):
            await self._decline(own, worse, before, after)
            reach("canary: declined")
            return True
        pairs = zip(before._fields, before, after, strict=True)
        if lacking := [name for name, was, now in pairs if was is not None and now is None]:
            self._say(f"the canary cannot judge {own} yet: {', '.join(lacking)} of it is not measured")
        elif now >= self._shown_at + canary.seconds:
            verdict = Verdict(own.version, own.commit_id, True, "", tuple(before), tuple(after))
            await asyncio.to_thread(self.folder.put, known.judged([verdict]))
            reach("canary: approved")
            return True
        return False
