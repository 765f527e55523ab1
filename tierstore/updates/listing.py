"""What a publisher or a replica offers: update files, what replicas are to show, and what canaries found of it.

Lists of others are not trusted.

A folder has the files, named by their ids, ``ID.partial`` of one that still arrives, and ``list.json``. Any plain file
server can offer it.
"""

import contextlib
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from ..errors import FormatError, TierstoreError, TruncatedError
from ..io.files import ROW_FILE_NAME
from ..settings.sections import converted
from ..store.manifest import MANIFEST_NAME, parts_in
from ..store.version import ORIGIN_KEY, is_commit_id
from ..system.checks import excerpt, require_int
from ..system.files import make_directory, names_in, output_locked, read_plain_file, write_text
from .update_file import Origin, UpdateHeader, origin_of

_LOG: Final = logging.getLogger("tierstore.updates")
LIST_NAME: Final = "list.json"
MADE_NAME: Final = "made"
_LOCK_NAME, _BAD_NAME = "lock", f"{LIST_NAME}.bad"
# Names of what may be deleted in a folder once the list does not name it.
_PASSING: Final = re.compile(rf"[0-9a-f]{{16}}(\.partial)?|{MADE_NAME}(\.partial)?|{LIST_NAME}\.partial")
MAX_LIST_BYTES: Final = 1 << 20
MAX_FILES: Final = 256
MAX_NAMED: Final = 64  # verdicts, and commits that were gone back from: the newest
_MAX_FILE_BYTES: Final = 1 << 40
_MAX_NUMBER: Final = 1 << 62
_MAX_WHY: Final = 300
_MAX_FIGURES: Final = 16
Figures = tuple[float | None, ...]  # as of ``Measures``


def _require_ids(*ids: str) -> None:
    if not all(map(is_commit_id, ids)):
        raise ValueError(f"{excerpt(ids)}: an id is 16 hex digits")


def _told(figures: Figures) -> Figures:
    return tuple(None if each is None or not math.isfinite(each) else each for each in figures[:_MAX_FIGURES])


@dataclass(frozen=True, slots=True)
class Offered:
    """An update file. ``id``: XXH64 of its bytes. Its rows are those changed since a commit; every row if
    ``since_commit_id`` is empty; only some of the changed ones if it is urgent."""

    id: str
    size_bytes: int
    since: int
    since_commit_id: str
    version: int
    commit_id: str
    is_urgent: bool = False

    def __post_init__(self) -> None:
        require_int(self.size_bytes, "size_bytes", 1, _MAX_FILE_BYTES)
        for name in ("since", "version"):
            require_int(getattr(self, name), name, 0, _MAX_NUMBER)
        _require_ids(self.id, self.commit_id, *([self.since_commit_id] if self.since or self.is_urgent else []))

    @classmethod
    def of(cls, file_id: str, size_bytes: int, header: UpdateHeader) -> "Offered":
        ends = header.since, header.since_commit_id, header.origin.version, header.origin.commit_id
        return cls(file_id, size_bytes, *ends, header.is_urgent)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a canary found of a version, and its measures before and with it. A long ``why`` is cut."""

    version: int
    commit_id: str
    is_approved: bool
    why: str = ""
    before: Figures = ()
    after: Figures = ()

    def __post_init__(self) -> None:
        _require_ids(self.commit_id)
        require_int(self.version, "version", 0, _MAX_NUMBER)
        object.__setattr__(self, "why", self.why[:_MAX_WHY])
        for name in ("before", "after"):
            object.__setattr__(self, name, _told(getattr(self, name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Attributes:
    serial: of what is wanted, from its publisher; the greater one is the newer.
    target, trial: what a publisher wants replicas, and canaries, to show.
    shown, before: the version that is served, or that replicas are to show, and the one before it.
    left: identities of commits that an operator went back from, on this server.
    trial_of: a canary's commit on trial; ``trial_before``: its measures before that.
    """

    files: tuple[Offered, ...] = ()
    serial: int = 0
    target: Origin | None = None
    trial: Origin | None = None
    shown: Origin | None = None
    before: Origin | None = None
    verdicts: tuple[Verdict, ...] = ()
    left: tuple[str, ...] = ()
    trial_of: str = ""
    trial_before: Figures = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "trial_before", _told(self.trial_before))

    @property
    def declined(self) -> set[str]:
        return {each.commit_id for each in self.verdicts if not each.is_approved}

    def verdict_on(self, commit_id: str) -> Verdict | None:
        return next((each for each in self.verdicts if each.commit_id == commit_id), None)

    def judged(self, verdicts: Iterable[Verdict]) -> "Listing":
        """With further verdicts in their order, between those that are here too; of two on a commit, one that declines
        it holds. The last ones stay. Lists that are merged again and again come to rest."""
        found = list(self.verdicts)
        at = len(found)
        for each in reversed(tuple(verdicts)):
            place = next((place for place, other in enumerate(found) if other.commit_id == each.commit_id), None)
            if place is not None and each.is_approved >= found[place].is_approved:
                at = place
                continue
            if place is not None:
                del found[place]
                at -= place < at
            found.insert(at, each)
        return replace(self, verdicts=tuple(found[-MAX_NAMED:]))

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Listing":
        """Inverse of ``to_json``. FormatError for anything that it did not write."""
        try:
            if len(text) > MAX_LIST_BYTES:
                raise ValueError("it is too long")
            found = json.loads(text, parse_constant=int)  # no NaN, which is equal to nothing
            for name in ("target", "trial", "shown", "before"):
                found[name] = found[name] and origin_of({ORIGIN_KEY: Origin(*found[name])._asdict()})
            kinds: dict[str, Any] = {"files": tuple[Offered, ...], "verdicts": tuple[Verdict, ...], "serial": int}
            kinds |= {"left": tuple[str, ...], "trial_of": str, "trial_before": Figures}
            made = cls(**found | {name: converted(found[name], kind, name) for name, kind in kinds.items()})
            _require_ids(*made.left)
            require_int(made.serial, "serial", 0, _MAX_NUMBER)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise FormatError(f"no list of updates: {excerpt(str(error), 200)}") from error
        if len(made.files) > MAX_FILES or max(len(made.verdicts), len(made.left)) > MAX_NAMED:
            raise FormatError("no list of updates: it has too many entries")
        return made


def way(
    files: Sequence[Offered], own: Origin | None, target: Origin, here: Collection[str] = ()
) -> list[Offered] | None:
    """The files that bring a replica to a version, in order; None if some are missing. Urgent rows of that version go
    first, by themselves. A full copy is among them only if deltas alone do not lead there. ``here``: ids of files that
    have arrived, or begun to."""
    steps, new = {target.commit_id: 0}, {target.commit_id}  # deltas from a commit to that one
    while new:
        new = {each.since_commit_id for each in files if each.commit_id in new and each.since and not each.is_urgent}
        new -= steps.keys()
        steps |= dict.fromkeys(new, max(steps.values()) + 1)
    found, end = list[Offered](), "" if own is None else own.commit_id
    if end not in steps:
        wholes = [each for each in files if not each.since and each.commit_id in steps]
        wholes.sort(key=lambda each: (each.id not in here, steps[each.commit_id], each.size_bytes))
        found, end = wholes[:1], wholes[0].commit_id if wholes else ""
    while end and end != target.commit_id:
        found += [
            each for each in files
            if each.since_commit_id == end and not each.is_urgent and steps.get(each.commit_id, -1) == steps[end] - 1
        ][:1]  # fmt: skip
        end = found[-1].commit_id
    is_here = end != "" and all(each.id in here for each in found)
    if own is not None and not own.urgent and not is_here:
        for each in files:
            if each.is_urgent and (each.since_commit_id, each.commit_id) == (own.commit_id, target.commit_id):
                return [each]
    return found if end else None


class Folder:
    """The files and the list of one publisher or replica, which alone writes there. Its methods wait for the disk;
    ``listing``, ``text`` and ``tag`` are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_read = False
        self._set(Listing())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Have it as a publisher's own, and read the list. TierstoreError: another publisher has it, or there are files
        of others."""
        for each in (place := self.path.resolve(), *place.parents):
            if parts_in(each) or ((each / MANIFEST_NAME).exists() and (each / ROW_FILE_NAME).exists()):
                raise TierstoreError(f"{self.path} is in the store {each}: choose a folder of its own for updates")
        names = names_in(self.path) if self.path.exists() else set[str]()
        others = sorted(each for each in names - {LIST_NAME, _BAD_NAME, _LOCK_NAME} if not _PASSING.fullmatch(each))
        if others and self._read() is None:
            raise TierstoreError(f"{self.path} has {excerpt(others[0])} and no list of updates: choose an empty folder")
        make_directory(self.path)
        refusal = f"{self.path}: another tierstore publish writes there; end it, or choose another folder"
        with output_locked(self.path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, refusal):
            self.open()
            yield

    def open(self) -> None:
        """Read the list; one that is none is put aside. TierstoreError: it cannot be read now."""
        found = self._read()
        with contextlib.suppress(FileNotFoundError):
            if found is None:
                os.replace(self.path / LIST_NAME, self.path / _BAD_NAME)
                _LOG.warning("%s has no list of updates; it is %s now, and a new one begins", self.path, _BAD_NAME)
        self._set(found or Listing())
        self._is_read = True

    def _read(self) -> Listing | None:
        try:
            return Listing.from_json(read_plain_file(self.path / LIST_NAME, MAX_LIST_BYTES))
        except (FileNotFoundError, FormatError, TruncatedError):
            return None

    def _set(self, listing: Listing) -> None:
        self.listing, self.text = listing, listing.to_json()
        self.tag = f'"{xxhash.xxh64_hexdigest(self.text)}"'

    def put(self, listing: Listing) -> None:
        """Replace the list, then delete files that it does not name. DiskFullError, TierstoreError. FormatError: it
        could not be read again."""
        if not self._is_read:
            self.open()
            if self.listing != Listing():
                raise TierstoreError(f"{self.path}: the list could not be read at first, and was now")
        if listing != self.listing:
            Listing.from_json(listing.to_json())
            make_directory(self.path)
            write_text(self.path / LIST_NAME, listing.to_json().decode(), force=True)
            self._set(listing)
            named = {name for each in listing.files for name in (each.id, f"{each.id}.partial")}
            for name in names_in(self.path) - named:
                if _PASSING.fullmatch(name):
                    (self.path / name).unlink(missing_ok=True)


MIN_REQUESTS: Final = 100  # fewer tell nothing of the 99th percentile, or of a share of one in a hundred
_WORST: Final = 1e300  # more is never good: servers report the largest float for a log loss that is NaN


class Measures(NamedTuple):
    """How a server fares; None of what it cannot tell. Failed requests are errors, and those that were refused before
    a model was asked; latency is from arrival to answer, the wait for a batch included."""

    log_loss: float | None = None
    failed_share: float | None = None
    seconds_p99: float | None = None


class Canary(NamedTuple):
    """For how long a version on trial is watched, and how much worse than before its server may fare: the settings
    ``canary_*`` of a server. What is compared is of the minute before, at most."""

    seconds: int
    loss: float
    errors: float
    p99: float

    def worse(self, before: Measures, after: Measures) -> str:
        """What got worse beyond its bound, in words; "" if nothing did."""
        bounds = (
            ("the log loss", f"--canary-loss {self.loss:g}", 1 + self.loss, 0.0),
            ("the share of failed requests", f"--canary-errors {self.errors:g}", 1.0, self.errors),
            ("the 99th percentile of latency, in seconds,", f"--canary-p99 {self.p99:g}", 1 + self.p99, 0.0),
        )
        found = []
        for (what, flag, factor, more), was, now in zip(bounds, before, after, strict=True):
            most = _WORST if was is None else min(was * factor + more, _WORST)
            if now is not None and not now <= most:
                told = [f"{each:.5g}" if each is not None and each <= _WORST else "no number" for each in (now, was)]
                found.append(f"{what} is {told[0]}, was {told[1]}, and {flag} allows {most:.5g}")
        return "; ".join(found)
