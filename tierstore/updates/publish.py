"""A store's changes to servers, each of which gets what it lacks."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from ..errors import TierstoreError
from ..system.output import require_parent
from ..system.sizes import format_size
from .client import AdminClient, PublishError
from .delta import Update, source_of, write_update
from .origin import Origin

Progress = Callable[[int, int], None]
Bar = Callable[[str], AbstractContextManager[Progress]]


class Published(NamedTuple):
    """What became of one server."""

    url: str
    version: int
    """Of the source, that it shows; 0 if that is not known."""
    rows: int
    size_bytes: int
    """Sent, with so many rows; 0 if it had everything."""
    seconds: float
    error: str = ""


def _no_bar(_what: str) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda _done, _total: None)


class _Publisher:
    """The updates of one store, each made once, however many servers lack it."""

    def __init__(self, directory: str | os.PathLike[str], work: Path, bar: Bar) -> None:
        self._directory = directory
        self._work = work
        self._bar = bar
        self.updates: dict[int, Update] = {}
        self.source = source_of(directory)

    def update(self, since: int) -> Update:
        """What changed since a version; see ``write_update``."""
        if since not in self.updates:
            with self._bar("compare") as show:
                update = write_update(self._directory, self._work / f"update-{since}", since=since, progress=show)
            self.updates[since] = self.updates.setdefault(update.header.since, update)
        return self.updates[since]

    def describe(self, since: int) -> list[str]:
        """What changed since a version, in words."""
        header = (update := self.update(since)).header
        which = f"changed since version {since}" if header.since else "ever written"
        if since and not header.since:
            which += f": nothing records what changed since {since}"
        counts = [
            f"  {config.name}: {rows:,} rows"
            for config, rows in zip(header.tables, header.rows_of_tables().values(), strict=True)
            if not config.is_dropped
        ]
        size = format_size(update.size_bytes)
        return [f"  version {header.origin.version}, {header.num_rows:,} rows {which}, {size}", *counts]

    def begin(self, url: str, origin: Origin | None, wanted: int | None) -> int:
        """The version that an update of a server begins at: the wanted one, unless that is None. PublishError if the
        server has rows of another store, or not the wanted version, or another commit of that number."""
        if origin is not None and origin.source != self.source.origin.source:
            raise PublishError(
                f"{url} has {origin}, and this is {self.source.origin}. A replica takes updates of one store; to have "
                "this one's, start that server with a new, empty directory"
            )
        since = origin.version if origin is not None and self.source.has_grown_from(origin) else 0
        if wanted and wanted != since:
            raise PublishError(
                f"{url} has {origin or 'nothing'}; {self.source.origin} was not made from that, or not from version "
                f"{wanted}: publish without --since, which sends what is missing there"
            )
        return since if wanted is None else wanted

    def send(self, url: str, *, since: int | None, token: str | None) -> Published:
        """Bring one server to the version; an error is part of the answer."""
        started = time.monotonic()
        try:
            with AdminClient(url, token=token) as client:
                origin = client.origin()
                if self.source.origin.is_same(origin):
                    return Published(url, self.source.origin.version, 0, 0, time.monotonic() - started)
                update = self.update(self.begin(url, origin, since))
                with self._bar("send") as show:
                    client.send(update, show)
                done = client.apply(update, replaces=origin)
                return Published(url, done.version, done.rows, update.size_bytes, time.monotonic() - started)
        except (TierstoreError, OSError) as error:
            return Published(url, 0, 0, 0, time.monotonic() - started, str(error))


def publish(
    directory: str | os.PathLike[str],
    to: Sequence[str],
    *,
    since: int | None = None,
    token: str | None = None,
    keep_file: str | os.PathLike[str] | None = None,
    bar: Bar = _no_bar,
) -> list[Published]:
    """Bring servers to a store's last version, one after another; one that fails does not keep the others from it.

    The update lies in the system's temporary directory (TMPDIR) meanwhile.

    Args:
        to: URLs of the servers' admin ports.
        since: the version that the servers have; default: what each says.
        keep_file: leave the (last) update there.
        bar: makes a progress bar, given its label.

    Raises:
        StoreNotFoundError, DamagedError: the store. ValueError: a URL. FileExistsError, FileNotFoundError:
            ``keep_file`` is there, or there is no directory for it.
    """
    with _publishing(directory, to, keep_file, bar) as publisher:
        return [publisher.send(url, since=since, token=token) for url in to]


def plan(
    directory: str | os.PathLike[str],
    to: Sequence[str],
    *,
    since: int | None = None,
    token: str | None = None,
    keep_file: str | os.PathLike[str] | None = None,
    bar: Bar = _no_bar,
) -> list[str]:
    """What ``publish`` would send, in words; without servers, to one that has ``since``, or nothing. PublishError: a
    server cannot be asked, or has not ``since``. Others as ``publish``."""
    with _publishing(directory, to, keep_file, bar) as publisher:
        lines = []
        for url in to:
            with AdminClient(url, token=token) as client:
                origin = client.origin()
            if publisher.source.origin.is_same(origin):
                lines.append(f"{url}: has version {publisher.source.origin.version} already")
                continue
            lines += [f"{url}:", *publisher.describe(publisher.begin(url, origin, since))]
        return lines if to else publisher.describe(since or 0)


@contextlib.contextmanager
def _publishing(
    directory: str | os.PathLike[str], to: Sequence[str], keep_file: str | os.PathLike[str] | None, bar: Bar
) -> Iterator[_Publisher]:
    """A publisher in a temporary directory, of whose updates the last one is kept."""
    if keep_file is not None:
        if os.path.lexists(keep_file):
            raise FileExistsError(f"{keep_file} exists; choose another name")
        require_parent(Path(keep_file))
    for url in to:  # a wrong URL is reported before anything is done
        AdminClient(url).close()
    with tempfile.TemporaryDirectory(prefix="tierstore-") as work:
        publisher = _Publisher(directory, Path(work), bar)
        yield publisher
        if keep_file is not None and publisher.updates:
            shutil.copyfile([*publisher.updates.values()][-1].path, keep_file)
