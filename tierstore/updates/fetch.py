"""Lists and files of updates from a URL, by HTTP of the standard library. All of it waits for sockets: for threads."""

import contextlib
import functools
import http.client
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import xxhash

from ..errors import DiskFullError, FormatError, TierstoreError
from ..system.checks import excerpt, require_token
from ..system.files import free_bytes, translate_os_error, write_all
from ..system.killpoints import reach
from ..system.processes import is_loopback
from ..system.sizes import format_size
from .listing import LIST_NAME, MAX_LIST_BYTES, Listing, Offered

DEFAULT_PORT: Final = 8002
DEFAULT_PATH: Final = "/updates"
ROOM_BYTES: Final = 64 << 20
"""Left free on the file system, by each part that arrives."""
SILENT_SECONDS: Final = 5.0
"""A source that gives nothing for so long is left for another."""
ANSWER_SECONDS: Final = 10.0
"""For a list, or the head of a file, to arrive; and how long a file may come at less than ``LEAST_BYTES_A_SECOND``."""
LEAST_BYTES_A_SECOND: Final = 1024
PATIENCE_SECONDS: Final = 60.0
"""Without a byte from any source."""
PAUSE_SECONDS: Final = 0.1
_PART_BYTES: Final = 256 << 10
_LOG: Final = logging.getLogger("tierstore.updates")
_MAX_LOOKUPS_BYTES: Final = 4 << 20


class FetchError(TierstoreError):
    """A source could not be reached, or refused; or none gave a file whole."""


def parse_url(url: str) -> SplitResult:
    """Of a source. ValueError: no such URL, or one that others would be shown a password in."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"a URL of {parts.hostname} holds a user or a password: leave it out, and give a token file")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url}: write http://HOST:PORT or https://HOST:PORT")
    return parts


@functools.lru_cache(1024)  # once a process
def _warn_of_plain_token(url: str) -> None:
    why = "gets the token unencrypted, and anyone who listens may use it: serve with --tls-certificate and"
    _LOG.warning("%s %s --tls-key, and name it as https://", url, why)


class Source:
    """Whoever offers a list and files below a URL: a publisher, a replica, a plain file server. Without a path in the
    URL it is "/updates", as servers have it. ValueError: no such URL, or token. ``listing``: the last that was read;
    ``error``: why there is no newer one."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = parse_url(url)
        self.url, self.listing, self.error = url, Listing(), ""
        self._tag = ""
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._place = str(parts.hostname), parts.port or (DEFAULT_PORT if not parts.path.strip("/") else None)
        self._path = parts.path.rstrip("/") or DEFAULT_PATH
        self._headers = {} if token is None else {"Authorization": f"Bearer {require_token(token)}"}
        if token is not None and parts.scheme == "http" and not is_loopback(str(parts.hostname)):
            _warn_of_plain_token(url)

    @contextlib.contextmanager
    def _get(self, name: str, *, is_long: bool = False, **headers: Any) -> Iterator[http.client.HTTPResponse]:
        """The whole answer comes within ``ANSWER_SECONDS``; with ``is_long`` all but its body."""
        connection = self._kind(*self._place, timeout=SILENT_SECONDS)
        with contextlib.closing(connection), contextlib.ExitStack() as timed:
            connection.connect()
            timer = threading.Timer(ANSWER_SECONDS, _shut, [connection.sock])
            timer.daemon = True
            timed.callback(timer.cancel)
            timer.start()
            connection.request("GET", f"{self._path}/{name}", headers=self._headers | headers)
            response = connection.getresponse()
            if response.status not in (200, 206, 304):
                said = excerpt(response.read(1000).decode(errors="replace"), 300)
                raise FetchError(f"{self.url}: {response.status} {said}")
            if is_long:
                timer.cancel()
            yield response

    def poll(self) -> Listing:
        """Its list now; what it said before if it does not answer, and ``error`` says why."""
        try:
            known: dict[str, Any] = {"If-None-Match": self._tag} if self._tag else {}
            with self._get(LIST_NAME, **known) as response:
                if response.status != 304:
                    self.listing = Listing.from_json(response.read(MAX_LIST_BYTES + 1))
                    self._tag = response.headers.get("ETag", "")
            self.error = ""
        except (FetchError, FormatError, OSError, http.client.HTTPException) as error:
            self.error = f"{self.url}: {str(error) or type(error).__name__}"
        return self.listing

    def lookups(self) -> dict[int, int]:
        """How often rows were looked up at a server, by key, of the hottest ones and in a sample of queries. Errors as
        of ``read``, and ValueError."""
        with self._get("lookups") as response:
            found = json.loads(response.read(_MAX_LOOKUPS_BYTES))["lookups"]
        return {int(key): int(count) for key, count in found}

    def read(self, offered: Offered, start: int) -> Iterator[bytes]:
        """A file from a byte on. OSError, HTTPException, FetchError: it breaks off."""
        with self._get(offered.id, is_long=True, Range=f"bytes={start}-") as response:
            left = 0 if response.status == 206 else start  # a plain file server may know no ranges
            begun, got = time.monotonic(), 0
            while data := response.read1(_PART_BYTES):
                got += len(data)
                if (seconds := time.monotonic() - begun) > ANSWER_SECONDS and got < seconds * LEAST_BYTES_A_SECOND:
                    raise FetchError(f"{self.url}: {got} bytes came in {seconds:.0f} s")
                yield data[left:]
                left = max(0, left - len(data))


def _shut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def require_room(folder: Path, size_bytes: int) -> None:
    """DiskFullError unless so many bytes fit, and some stay free."""
    if (free := free_bytes(folder)) < size_bytes + ROOM_BYTES:
        raise DiskFullError(
            f"{folder}: {format_size(size_bytes)} more, and {format_size(free)} free, of which "
            f"{format_size(ROOM_BYTES)} stay so. Free some space; the transfer then goes on where it stopped"
        )


class Transfer:
    """A file on its way into a folder: what is there already, the rest from sources, at random. ``stop`` ends it."""

    def __init__(self, folder: Path, offered: Offered, sources: Sequence[Source]) -> None:
        self.offered = offered
        self.is_stopped = False
        self._folder = folder
        self._sources = random.sample(sources, len(sources))

    def stop(self) -> None:
        self.is_stopped = True

    def run(self) -> None:
        """Have it whole. Its digest is computed while it arrives. FetchError: no source gave it whole, or it was
        stopped. DiskFullError, TierstoreError."""
        whole, partial = (self._folder / f"{self.offered.id}{end}" for end in ("", ".partial"))
        if whole.exists():
            return
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(partial, flags, 0o600), "r+b", buffering=0) as file:
                self._fill(file)
            reach("fetch: checked")
            os.replace(partial, whole)
        except OSError as error:
            raise translate_os_error(error, partial) from error

    def _fill(self, file: Any) -> None:
        for sources in (self._sources, *([each] for each in self._sources)):  # the damaged bytes may be any one's
            self._digest, self._have = xxhash.xxh64(), 0
            while data := file.read(_PART_BYTES):  # what an earlier transfer left
                self._note(data)
            self._read_rest(file, list(sources))
            if (self._have, self._digest.hexdigest()) == (self.offered.size_bytes, self.offered.id):
                os.fsync(file.fileno())
                return
            _LOG.warning("update %s was damaged on its way", self.offered.id)
            file.truncate(0)
            file.seek(0)
        raise FetchError(f"update {self.offered.id} was damaged on its way from each of {len(self._sources)} sources")

    def _note(self, data: bytes) -> None:
        self._digest.update(data)
        self._have += len(data)

    def _read_rest(self, file: Any, sources: list[Source]) -> None:
        """Until all is there, from one source after the other."""
        grew_at, size = time.monotonic(), self.offered.size_bytes
        while (had := self._have) < size:
            source, why = sources[0], "it has no more"
            try:
                for data in source.read(self.offered, had):
                    self._require_wanted()
                    self._write(file, data[: size - self._have])
                    if self._have == size:
                        break
            except (FetchError, OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
            self._require_wanted()
            if self._have == size:
                return
            sources.append(sources.pop(0))
            if self._have > had:
                grew_at = time.monotonic()
            elif time.monotonic() - grew_at > PATIENCE_SECONDS:
                there = f"{self._have} of {size} bytes"
                raise FetchError(f"there is {there} of update {self.offered.id}: {source.url}: {why}")
            time.sleep(PAUSE_SECONDS)

    def _write(self, file: Any, data: bytes) -> None:
        require_room(self._folder, len(data))
        try:
            write_all(file.fileno(), data, self._have)
        except OSError as error:  # of this disk, not of the source
            raise translate_os_error(error, self._folder) from error
        self._note(data)
        reach("fetch: part written")

    def _require_wanted(self) -> None:
        if self.is_stopped:
            raise FetchError(f"update {self.offered.id} is not wanted any more")
