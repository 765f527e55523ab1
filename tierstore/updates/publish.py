"""A store's versions as files in a folder, which replicas pull: the process that offers them, and a plain folder.

A new version is offered as what changed since the one that replicas show, and as a full copy when the changes since the
last copy are larger than that. With a canary, one version is on trial at a time.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ..errors import TierstoreError
from ..layout import KEY_ROW_BITS, MAX_TABLES
from ..store.directory import Opened
from ..system.files import make_directory
from ..system.killpoints import reach
from ..system.sizes import format_size
from .fetch import Source
from .listing import MADE_NAME, MAX_FILES, Folder, Listing, Offered, way
from .update_file import Origin
from .write import open_source, source_in, urgent_rows, write_update

_LOG: Final = logging.getLogger("tierstore.updates")
_MAX_OLDER: Final = 64
_MAX_KEY: Final = MAX_TABLES << KEY_ROW_BITS
_MAX_COUNT: Final = 1 << 50
LOOK_SECONDS: Final = 0.5


class Publisher:
    """Offers the versions of a store in a folder; ``step`` takes up what is new, within ``folder.held()``.

    Args:
        folder: default: ``STORE.updates``.
        urgent: share of the changed rows that is offered first, above 0 and below 1.
        canary: whose verdict a version needs before others are to show it.
        silent_seconds: after which it is said that the canary has not decided.
        lookups: servers that say how often rows are looked up, for the choice of urgent rows.
        say: told in a line what was done.

    Raises:
        ValueError: ``urgent``.
    """

    def __init__(
        self, store: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None, *,
        urgent: float | None = None, canary: Source | None = None, silent_seconds: float = 600.0,
        lookups: Sequence[Source] = (), say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        if urgent is not None and not 0 < urgent < 1:
            raise ValueError(f"urgent={urgent}: a share of the changed rows is above 0 and below 1, as 0.05")
        self._store, self._urgent = Path(store).absolute(), urgent
        self.folder = Folder(Path(folder or self._store.with_name(f"{self._store.name}.updates")).absolute())
        self._canary, self._silent_seconds, self._lookups, self._say = canary, silent_seconds, lookups, say
        self._waits_since = time.monotonic()
        self._is_told = False
        self._stop = threading.Event()

    @property
    def waits_seconds(self) -> float:
        """For how long a version has been on trial, seen by this process; 0 if none is."""
        return time.monotonic() - self._waits_since if self.folder.listing.trial else 0.0

    def step(self) -> bool:
        """Hear the canary, and offer the store's version if that is a new one; whether it was. Errors as of
        ``write_update``. TierstoreError: the folder is of another store, or the commit has no identity."""
        self._hear()
        if _is_whole(self.folder.listing, self.folder.listing.trial):
            return False
        with open_source(self._store) as opened:
            return self._offer(opened)

    def run(self) -> None:
        said = ""
        while True:
            try:
                self.step()
                said = ""
            except Exception as error:  # of one commit, or of what a server answers
                if said != (said := str(error) or type(error).__name__):
                    trace = None if isinstance(error, TierstoreError | OSError | ValueError) else error
                    _LOG.warning("nothing new is published: %s", said, exc_info=trace)
            if self._stop.wait(LOOK_SECONDS):
                return

    def stop(self) -> None:
        self._stop.set()

    # The canary

    def _hear(self) -> None:
        listing = self.folder.listing
        if self._canary is not None:
            listing = listing.judged(self._canary.poll().verdicts)
        trial, target, declined = listing.trial, listing.target, listing.declined
        verdict = listing.verdict_on(trial.commit_id) if trial else None
        if target is not None and target.commit_id in declined and listing.before is not None:
            self._say(f"version {target.version} was declined: back to version {listing.before.version}")
            back, serial = listing.before, _serial(listing)
            listing, trial = replace(listing, target=back, shown=back, before=None, trial=None, serial=serial), None
        if trial is not None and (self._canary is None or (verdict is not None and verdict.is_approved)):
            self._say(f"version {trial.version} is approved")
            listing = _kept(_showing(replace(listing, trial=None), trial))
        elif trial is not None and verdict is not None:
            self._say(f"version {trial.version} is declined: {verdict.why}")
            listing = replace(listing, trial=None, serial=_serial(listing))
        elif self._canary is not None and self.waits_seconds > self._silent_seconds and trial and not self._is_told:
            why = self._canary.error or "it has few requests, or its watch has not measured"
            told = f"no decision on version {trial.version} for {self.waits_seconds:.0f} s: {self._canary.url}: {why}"
            self._say(f"{told}. Others stay at version {target.version if target else 0}")
            self._is_told = True
        files = tuple(each for each in listing.files if each.commit_id not in declined)
        self.folder.put(replace(listing, files=files))
        reach("publish: canary heard")

    # New versions

    def _offer(self, opened: Opened) -> bool:
        listing, source = self.folder.listing, source_in(opened.manifest, opened.cold)
        target, new = listing.target, source.origin
        if target is not None and target.source != new.source:
            raise TierstoreError(f"{self.folder.path} has {target}, and this is {new}: choose another folder")
        if not new.commit_id:
            raise TierstoreError(f"{self._store}: an earlier release made {new}: commit once more with this one")
        if new.commit_id in listing.declined or (new.is_same(target) and _is_whole(listing, target)):
            return False
        base, urgent = _base(listing), "" if target is None or _is_whole(listing, target) else target.commit_id
        has_grown = base is not None and not base.is_same(new) and source.has_grown_from(base._replace(urgent=urgent))
        since = base.version if base is not None and has_grown else 0
        if since and self._urgent and all(each.commit_id != new.commit_id for each in listing.files):
            self._offer_urgent(opened, since, new)
        made = [self._make(opened, since)] if since else []
        if not made or self._lacks_copy(made[0], base):
            made.append(self._make(opened, 0))
        reach("publish: file made")
        self._put(new, made)
        sizes = ", ".join(
            f"{format_size(each.size_bytes)} {f'since version {each.since}' if each.since else 'whole'}"
            for each in made
        )
        self._say(f"version {new.version}: {sizes}{', on trial' if self.folder.listing.trial else ''}")
        return True

    def _offer_urgent(self, opened: Opened, since: int, new: Origin) -> None:
        try:
            rows = urgent_rows(self._store, since, self._urgent or 0.0, self._counts(), opened)
            if len(rows):
                self._put(new, [self._make(opened, since, only=rows)])
                reach("publish: urgent rows offered")
        except (TierstoreError, OSError, ValueError) as error:
            _LOG.warning("no urgent rows go first: %s", error)

    def _counts(self) -> Counter[int]:
        counts = Counter[int]()
        for server in self._lookups:
            try:
                found = server.lookups()
                if not all(0 <= key < _MAX_KEY and 0 <= count < _MAX_COUNT for key, count in found.items()):
                    raise ValueError("a key or a count cannot be")
                counts.update(found)
            except Exception as error:  # it may answer anything
                _LOG.warning("lookups at %s count for nothing: %s: %s", server.url, type(error).__name__, error)
        return counts

    def _make(self, opened: Opened, since: int, **settings: Any) -> Offered:
        make_directory(self.folder.path)
        made = self.folder.path / MADE_NAME
        made.unlink(missing_ok=True)
        update = write_update(self._store, made, since=since, version=opened, **settings)
        os.replace(made, self.folder.path / update.id)
        return Offered.of(update.id, update.size_bytes, update.header)

    def _lacks_copy(self, made: Offered, base: Origin | None) -> bool:
        listing = self.folder.listing
        found = way(listing.files, None, base) if base else None
        if not found or base is None or base.commit_id in listing.declined:
            return True
        return made.size_bytes + sum(each.size_bytes for each in found[1:]) > found[0].size_bytes or (
            len(found) > MAX_FILES // 4
        )

    def _put(self, new: Origin, made: Iterable[Offered]) -> None:
        listing = self.folder.listing
        listing = replace(listing, files=(*listing.files, *made))
        if self._canary is None or listing.target is None:
            listing = _showing(listing, new)
        elif not new.is_same(listing.target) and not new.is_same(listing.trial):
            listing = replace(listing, trial=new, serial=_serial(listing, new.version))
            self._waits_since, self._is_told = time.monotonic(), False
        self.folder.put(_kept(listing))


def _serial(listing: Listing, version: int = 0) -> int:
    return max(listing.serial + 1, version << 20)


def _is_whole(listing: Listing, version: Origin | None) -> bool:
    return version is not None and any(
        each.commit_id == version.commit_id and not each.is_urgent for each in listing.files
    )


def _base(listing: Listing) -> Origin | None:
    return listing.target if listing.before is None or _is_whole(listing, listing.target) else listing.before


def _showing(listing: Listing, new: Origin) -> Listing:
    if new.is_same(listing.target):
        return listing
    return replace(listing, target=new, shown=new, before=_base(listing), serial=_serial(listing, new.version))


def _kept(listing: Listing) -> Listing:
    """Files on the way to the target from nothing, and to what is on trial; of older changes as much as a full copy."""
    files, target, trial = listing.files, listing.target, listing.trial
    path = (way(files, None, target) if target else None) or []
    ends = {each.commit_id for each in (target, trial) if each}
    kept = {each.id for each in files if each.commit_id in ends} | {each.id for each in path}
    if not path:
        return replace(listing, files=files[-MAX_FILES:])
    left, end = path[0].size_bytes, path[0].commit_id
    for _ in range(_MAX_OLDER):
        older = next((each for each in files if each.commit_id == end and each.since and not each.is_urgent), None)
        if older is None or older.size_bytes > left:
            break
        left, end = left - older.size_bytes, older.since_commit_id
        kept.add(older.id)
    return replace(listing, files=tuple(each for each in files if each.id in kept))
