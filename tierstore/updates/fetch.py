"""Lists and files of updates from a URL, by HTTP of the standard library. All of it waits for sockets: for threads."""

import contextlib
import http.client
import json
import logging
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import xxhash

from ..errors import DiskFullError, TierstoreError
from ..system.checks import excerpt, require_token
from ..system.files import free_bytes, translate_os_error, write_all
from ..system.killpoints import reach
from ..system.processes import is_loopback
from ..system.sizes import format_size
from .listing import LIST_NAME, MAX_LIST_BYTES, Listing, Offered

DEFAULT_PORT: Final = 8002
DEFAULT_PATH: Final = "/updates"
ROOM_BYTES: Final = 64 << 20  # left free on the file system, by each part that arrives
SILENT_SECONDS: Final = 5.0  # without a byte; then a source is left for another
ANSWER_SECONDS: Final = 10.0  # for a list, the head of a file, or a part of it to arrive
LEAST_BYTES_A_SECOND: Final = 1024  # after so many seconds
PATIENCE_SECONDS: Final = 60.0  # without a byte from any source
PAUSE_SECONDS: Final = 0.1
_MAX_PAUSE_SECONDS: Final = 2.0
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


class Source:
    """Whoever offers a list and files below a URL: a publisher, a replica, a plain file server. Without a path in the
    URL it is "/updates", as servers have it. ValueError: no such URL, or token. ``listing``: the last that was read;
    ``error``: why there is no newer one."""

    def __init__(self, url: str, token: str | None = None) -> None:
        parts = parse_url(url)
        self.url, self.listing, self.error = url, Listing(), ""
        self._tag, is_tls = "", parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        self._tls = ssl.create_default_context() if is_tls else None
        self._path = parts.path.rstrip("/") or DEFAULT_PATH
        port = DEFAULT_PORT if not parts.path.strip("/") else self._kind.default_port
        self._place = str(parts.hostname), parts.port or port
        self._headers = {} if token is None else {"Authorization": f"Bearer {require_token(token)}"}
        if token is not None and not is_tls and not is_loopback(str(parts.hostname)):
            why = "gets the token unencrypted, and anyone who listens may use it: serve with --tls-certificate and"
            _LOG.warning("%s %s --tls-key, and name it as https://", url, why)

    @contextlib.contextmanager
    def _get(self, name: str, **headers: Any) -> Iterator[tuple[http.client.HTTPResponse, "_Watch"]]:
        connection = self._kind(*self._place, timeout=SILENT_SECONDS)
        with contextlib.closing(connection), contextlib.ExitStack() as opened:
            raw = opened.enter_context(socket.create_connection(self._place, SILENT_SECONDS))
            watch = opened.enter_context(contextlib.closing(_Watch(raw)))
            connection.sock = self._tls.wrap_socket(raw, server_hostname=self._place[0]) if self._tls else raw
            connection.request("GET", f"{self._path}/{name}", headers=self._headers | headers)
            response = connection.getresponse()
            if response.status not in (200, 206, 304):
                said = excerpt(response.read(1000).decode(errors="replace"), 300)
                raise FetchError(f"{self.url}: {response.status} {said}")
            yield response, watch

    def poll(self) -> Listing:
        """Its list now; what it said before if it does not answer, and ``error`` says why."""
        try:
            known: dict[str, Any] = {"If-None-Match": self._tag} if self._tag else {}
            with self._get(LIST_NAME, **known) as (response, _):
                if response.status != 304:
                    self.listing = Listing.from_json(response.read(MAX_LIST_BYTES + 1))
                    self._tag = response.headers.get("ETag", "")
            self.error = ""
        except Exception as error:  # it may answer anything
            self.error = f"{self.url}: {excerpt(str(error) or type(error).__name__, 300)}"
        return self.listing

    def lookups(self) -> dict[int, int]:
        """How often rows were looked up at a server, by key, of the hottest ones and in a sample of queries. Errors as
        of ``read``, and ValueError."""
        with self._get("lookups") as (response, _):
            found = json.loads(response.read(_MAX_LOOKUPS_BYTES))["lookups"]
        return {int(key): int(count) for key, count in found}

    def read(self, offered: Offered, start: int) -> Iterator[bytes]:
        """A file from a byte on. OSError, HTTPException, FetchError: it breaks off."""
        with self._get(offered.id, Range=f"bytes={start}-") as (response, watch):
            left = 0 if response.status == 206 else start  # a plain file server may know no ranges
            begun, got = time.monotonic(), 0
            while data := response.read1(_PART_BYTES):
                watch.put_off()
                got += len(data)
                if (seconds := time.monotonic() - begun) > ANSWER_SECONDS and got < seconds * LEAST_BYTES_A_SECOND:
                    raise FetchError(f"{self.url}: {got} bytes came in {seconds:.0f} s")
                yield data[left:]
                left = max(0, left - len(data))


class _Watch(threading.Thread):
    """Shuts a connection ``ANSWER_SECONDS`` after it was made or put off, whatever drips from it: a TLS handshake, a
    head, or the length of a part."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(daemon=True)
        self._connected = connected.dup()  # TLS takes the other one
        self._is_over = threading.Event()
        self.put_off()
        self.start()

    def put_off(self) -> None:
        self._end = time.monotonic() + ANSWER_SECONDS

    def run(self) -> None:
        while not self._is_over.wait(max(0.0, self._end - time.monotonic())):
            if time.monotonic() >= self._end:
                with contextlib.suppress(OSError):
                    self._connected.shutdown(socket.SHUT_RDWR)
                return

    def close(self) -> None:
        self._is_over.set()
        self.join()
        self._connected.close()


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
            digest, have = xxhash.xxh64(), 0
            while data := file.read(_PART_BYTES):  # what an earlier transfer left
                digest.update(data)
                have += len(data)
            for data in self._rest(have, list(sources)):
                require_room(self._folder, len(data))
                write_all(file.fileno(), data, have)
                digest.update(data)
                have += len(data)
                reach("fetch: part written")
            if (have, digest.hexdigest()) == (self.offered.size_bytes, self.offered.id):
                os.fsync(file.fileno())
                return
            _LOG.warning("update %s was damaged on its way", self.offered.id)
            file.truncate(0)
            file.seek(0)
        raise FetchError(f"update {self.offered.id} was damaged on its way from each of {len(self._sources)} sources")

    def _rest(self, have: int, sources: list[Source]) -> Iterator[bytes]:
        """What is missing after so many bytes, from one source after the other."""
        grew_at, size, pause = time.monotonic(), self.offered.size_bytes, PAUSE_SECONDS
        while have < size:
            source, had, why = sources[0], have, "it has no more"
            try:
                for data in source.read(self.offered, had):
                    if self.is_stopped:
                        break
                    have += len(part := data[: size - have])
                    yield part
                    if have == size:
                        return
            except Exception as error:  # it may answer anything
                why = str(error) or type(error).__name__
            if self.is_stopped:
                raise FetchError(f"update {self.offered.id} is not wanted any more")
            sources.append(sources.pop(0))
            if have > had:
                grew_at, pause = time.monotonic(), PAUSE_SECONDS
            elif time.monotonic() - grew_at > PATIENCE_SECONDS:
                there = f"{have} of {size} bytes"
                raise FetchError(f"there is {there} of update {self.offered.id}: {source.url}: {why}")
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
