"""A store's changes to servers, each of which gets what it lacks: by HTTP of the standard library."""

import contextlib
import http.client
import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from ..errors import TierstoreError
from ..system.excerpt import excerpt
from ..system.forks import disown_in_forks
from ..system.hosts import is_loopback
from ..system.output import require_parent
from ..system.sizes import format_size
from .apply import Applied
from .delta import Update, source_of, write_update
from .header import Origin

DEFAULT_PORT: Final = 8002
PART_BYTES: Final = 16 << 20
"""Sent by one request."""
_TIMEOUT_SECONDS: Final = 60.0
_APPLY_SECONDS: Final = 4 * 3600.0
ATTEMPTS: Final = 6
"""Of each request, where the connection breaks."""
FIRST_PAUSE_SECONDS: Final = 0.5
"""Before the second attempt; twice as long before each further one."""
_MAX_ANSWER_BYTES: Final = 1 << 20
_LOG: Final = logging.getLogger("tierstore.updates")


class PublishError(TierstoreError):
    """A server could not be reached, or refused."""


class AdminClient:
    """The admin port of one server, "http://HOST:PORT" or https, port 8002 unless given, with the token that it wants.
    ValueError: no such URL."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--to {url}: write http://HOST:PORT or https://HOST:PORT")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port or DEFAULT_PORT, timeout=_TIMEOUT_SECONDS)
        self._path = parts.path.rstrip("/")
        if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname):
            way_out = "serve with --tls-certificate and --tls-key, and publish to https://"
            _LOG.warning("%s gets the token unencrypted, and anyone who listens may change its rows: %s", url, way_out)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        disown_in_forks(self)

    def origin(self) -> Origin | None:
        """What the replica has; None if it is empty."""
        answer = self._ask("GET", "/admin/updates")
        try:
            if answer["source"] is None:
                return None
            return Origin(str(answer["source"]), int(answer["version"]), str(answer.get("commit_id", "")))
        except (KeyError, ValueError, TypeError) as error:
            raise PublishError(f"{self.url} does not answer as a tierstore server: {excerpt(answer)}") from error

    def send(self, update: Update, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """Send the parts that the server has not; what has arrived stays there if this fails."""
        failures = 0
        with update.path.open("rb") as file:
            while (start := self._received(update)) < update.size_bytes:
                try:
                    for first in range(start, update.size_bytes, PART_BYTES):
                        progress(first, update.size_bytes)
                        self._send_part(file, first, update)
                except _BrokenError as error:
                    # Bytes that arrived before the connection broke are progress.
                    failures = failures + 1 if self._received(update) == start else 0
                    self._pause(failures, error)
        progress(update.size_bytes, update.size_bytes)

    def _received(self, update: Update) -> int:
        uploads = self._ask("GET", "/admin/updates").get("uploads", {})
        return int(uploads[update.id]["received_bytes"]) if update.id in uploads else 0

    def _send_part(self, file: BufferedReader, start: int, update: Update) -> None:
        file.seek(start)
        part = file.read(PART_BYTES)
        if not part:
            raise PublishError(f"{update.path} became shorter while it was sent")
        content_range = f"bytes {start}-{start + len(part) - 1}/{update.size_bytes}"
        headers = {"Content-Type": "application/octet-stream", "Content-Range": content_range}
        self._try("PATCH", f"/admin/updates/{update.id}", part, headers, _TIMEOUT_SECONDS)

    def apply(self, update: Update, *, replaces: Origin | None = None) -> Applied:
        """Have the server show the update; waits until it does. If that is what the server has, it may go back."""
        query = f"?replaces={replaces.commit_id}" if replaces is not None else ""
        answer = self._ask("POST", f"/admin/updates/{update.id}/apply{query}", timeout=_APPLY_SECONDS)
        return Applied(int(answer["version"]), int(answer["rows"]), bool(answer["was_there"]))

    def _ask(self, method: str, path: str, *, timeout: float = _TIMEOUT_SECONDS) -> dict[str, Any]:
        """A request without a body, tried again where the connection breaks: each may be asked twice."""
        body, headers = (b"{}", {"Content-Type": "application/json"}) if method == "POST" else (None, {})
        for failures in itertools.count(1):
            try:
                return self._try(method, path, body, headers, timeout)
            except _BrokenError as error:
                self._pause(failures, error)
        raise AssertionError("unreachable")

    def _pause(self, failures: int, error: Exception) -> None:
        if failures >= ATTEMPTS:
            raise PublishError(f"{self.url}: {error}; publish again, which goes on where this stopped")
        time.sleep(FIRST_PAUSE_SECONDS * 2**failures / 2)

    def _try(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> dict[str, Any]:
        self._connection.timeout = timeout
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout)
        try:
            self._connection.request(method, self._path + path, body, {**self._headers, **headers})
            response = self._connection.getresponse()
            content = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise _BrokenError(str(error) or type(error).__name__) from error
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if isinstance(answer, dict) and response.status == 200:
            return answer
        said = answer.get("error") if isinstance(answer, dict) else None
        words = str(said or f"{response.status} {response.reason}")
        if response.status == 404 and path == "/admin/updates":
            words = "this server takes no updates: start it with --updates, and give --to its admin port"
        # Of this moment are: too slow a line, too many connections, or, of a part, an earlier connection that broke,
        # which the server may not have noticed yet.
        if response.status in (408, 503) or (method == "PATCH" and response.status == 409):
            raise _BrokenError(words)
        raise PublishError(f"{self.url}: {words}")

    def close(self) -> None:
        self._connection.close()

    def disown(self) -> None:
        """In a forked process: what is answered on this connection is the parent's. The next request makes another."""
        self.close()

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _BrokenError(Exception):
    """The connection failed, or part of an update does not go on where the one before it ended."""


Progress = Callable[[int, int], None]
Bar = Callable[[str], AbstractContextManager[Progress]]


class Published(NamedTuple):
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
        if since not in self.updates:
            with self._bar("compare") as show:
                update = write_update(self._directory, self._work / f"update-{since}", since=since, progress=show)
            self.updates[since] = self.updates.setdefault(update.header.since, update)
        return self.updates[since]

    def describe(self, since: int) -> list[str]:
        header = (update := self.update(since)).header
        which = f"changed since version {since}" if header.since else "ever written"
        if since and not header.since:
            which += f": nothing records what changed since {since}"
        counts = [
            f"  {config.name}: {rows:,} rows"
            for config, rows in zip(header.tables, header.rows_of_tables().values(), strict=True)
            if not config.is_hidden
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
    directory: str | os.PathLike[str], to: Sequence[str], *, since: int | None = None, token: str | None = None,
    keep_file: str | os.PathLike[str] | None = None, bar: Bar = _no_bar,
) -> list[Published]:  # fmt: skip
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
    directory: str | os.PathLike[str], to: Sequence[str], *, since: int | None = None, token: str | None = None,
    keep_file: str | os.PathLike[str] | None = None, bar: Bar = _no_bar,
) -> list[str]:  # fmt: skip
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
