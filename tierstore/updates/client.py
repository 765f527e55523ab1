"""The admin port of a replica's server, by HTTP of the standard library: what it has, updates to it and from it."""

import functools
import http.client
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from types import TracebackType
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from ..errors import TierstoreError
from ..system.checks import excerpt, require_token
from ..system.processes import disown_in_forks, is_loopback
from .apply import Applied
from .delta import Update
from .header import Origin

Progress = Callable[[int, int], None]
DEFAULT_PORT: Final = 8002
PART_BYTES: Final = 16 << 20
"""Sent by one request."""
_TIMEOUT_SECONDS: Final = 60.0
_APPLY_SECONDS: Final = 4 * 3600.0
ATTEMPTS: Final = 6
"""Of each request, where the connection breaks."""
FIRST_PAUSE_SECONDS: Final = 0.5
"""Before the second attempt; twice as long before each further one."""
_MAX_ANSWER_BYTES: Final = 64 << 20
_POLL_SECONDS: Final = 0.1
"""How often a server is asked how far it has fetched."""
_VERSION: Final = "([0-9]{1,13})-([0-9a-f]{16})?"
_KEPT: Final = re.compile(f"([0-9a-f]{{16}})-([1-9][0-9]{{0,15}})-{_VERSION}-{_VERSION}")


class PublishError(TierstoreError):
    """A server could not be reached, or refused."""


class FetchError(PublishError):
    """A server, which can be reached, could not get an update from its peers."""


class BrokenError(Exception):
    """The connection failed, or part of an update does not go on where the one before it ended."""


class Kept(NamedTuple):
    """An update file that a replica keeps after it was applied."""

    id: str
    size_bytes: int
    since: int
    """It changes this version of the source, and that commit; 0 and "" where it has every row."""
    since_commit_id: str
    version: int
    commit_id: str

    @property
    def name(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def of_name(cls, name: str) -> "Kept":
        """Inverse of ``name``; ValueError for what it did not make."""
        if (match := _KEPT.fullmatch(name)) is None:
            raise ValueError(f"{excerpt(name)} names no update")
        update_id, size, since, since_commit_id, version, commit_id = match.groups(default="")
        return cls(update_id, int(size), int(since), since_commit_id, int(version), commit_id)


class ReplicaState(NamedTuple):
    """What a replica says of itself."""

    origin: Origin | None
    """None if it is empty."""
    uploads: dict[str, dict[str, Any]]
    """By id, what is on its way in: ``received_bytes``, ``size_bytes``."""
    fetch: dict[str, Any]
    """The last that was fetched from peers: ``id``, ``is_running``, ``error``; empty for none."""
    kept: tuple[Kept, ...]
    declined: frozenset[str] = frozenset()
    """Identities of commits that it does not take, as it went back from them."""
    trial: dict[str, Any] | None = None
    """What a canary's publisher measured before the version that it shows, and still watches; None if none does."""

    def received(self, update_id: str) -> int:
        """Bytes of an update that are there."""
        if update_id in self.uploads:
            return int(self.uploads[update_id]["received_bytes"])
        return max((each.size_bytes for each in self.kept if each.id == update_id), default=0)


def parse_url(url: str) -> SplitResult:
    """Of an admin port. ValueError: no such URL, or one that others would be shown a password in."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"a URL of {parts.hostname} holds a user or a password: leave it out, and give a token file")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url}: write http://HOST:PORT or https://HOST:PORT")
    return parts


@functools.lru_cache(1024)  # once a process: peers are asked again and again
def _warn_of_plain_token(url: str) -> None:
    why = "gets the token unencrypted, and anyone who listens may change its rows: serve with --tls-certificate"
    logging.getLogger("tierstore.updates").warning("%s %s and --tls-key, and name it as https://", url, why)


class AdminClient:
    """The admin port of one server, "http://HOST:PORT" or https, port 8002 unless given, with the token that it wants.
    ValueError: no such URL, or token. ``attempts``: of each request, where the connection breaks."""

    def __init__(
        self, url: str, *, token: str | None = None, attempts: int = ATTEMPTS, timeout: float = _TIMEOUT_SECONDS
    ) -> None:
        self.url = url
        self._attempts = attempts
        self._timeout = timeout
        parts = parse_url(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(str(parts.hostname), parts.port or DEFAULT_PORT, timeout=timeout)
        self._path = parts.path.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {require_token(token)}"}
        if token is not None and parts.scheme == "http" and not is_loopback(str(parts.hostname)):
            _warn_of_plain_token(url)
        disown_in_forks(self)

    def state(self) -> ReplicaState:
        answer = self._ask("GET", "/admin/updates")
        try:
            names = ("source", "version", "commit_id", "urgent")
            origin = None if answer["source"] is None else Origin(*(answer[name] for name in names))
            uploads, fetch = dict(answer.get("uploads", {})), dict(answer.get("fetch") or {})
            kept, declined = tuple(map(Kept.of_name, answer.get("kept", []))), frozenset(answer.get("declined", []))
            return ReplicaState(origin, uploads, fetch, kept, declined, answer.get("trial"))
        except (KeyError, ValueError, TypeError) as error:
            raise PublishError(f"{self.url} does not answer as a tierstore server: {excerpt(answer)}") from error

    def origin(self) -> Origin | None:
        """What the replica has; None if it is empty."""
        return self.state().origin

    def send(self, update: Update, progress: Progress = lambda _done, _total: None) -> None:
        """Send the parts that the server has not; what has arrived stays there if this fails."""
        failures = 0
        with update.path.open("rb") as file:
            while (start := self._received(update)) < update.size_bytes:
                try:
                    for first in range(start, update.size_bytes, PART_BYTES):
                        progress(first, update.size_bytes)
                        self._send_part(file, first, update)
                except BrokenError as error:
                    # Bytes that arrived before the connection broke are progress.
                    failures = failures + 1 if self._received(update) == start else 0
                    self._pause(failures, error)
        progress(update.size_bytes, update.size_bytes)

    def _received(self, update: Update) -> int:
        return self.state().received(update.id)

    def _send_part(self, file: BufferedReader, start: int, update: Update) -> None:
        file.seek(start)
        part = file.read(PART_BYTES)
        if not part:
            raise PublishError(f"{update.path} became shorter while it was sent")
        content_range = f"bytes {start}-{start + len(part) - 1}/{update.size_bytes}"
        headers = {"Content-Type": "application/octet-stream", "Content-Range": content_range}
        self._try("PATCH", f"/admin/updates/{update.id}", part, headers, self._timeout)

    def fetch(self, update: Update, sources: Sequence[str], peers: Sequence[str], progress: Progress) -> bool:
        """Have the server get the update from the first of the sources that gives it; waits until it has it whole. True
        if it shows that version already. FetchError: no source gives it whole. ``peers``: whom it asks later for what
        it missed."""
        wanted = {"size_bytes": update.size_bytes, "from": list(sources), "peers": list(peers)}
        is_asked = False
        while True:
            state = self.state()
            fetch = state.fetch if state.fetch.get("id") == update.id else {}
            if is_asked and fetch.get("error"):
                raise FetchError(f"{self.url}: {fetch['error']}")
            received = state.received(update.id)
            progress(received, update.size_bytes)
            if update.header.shown.is_same(state.origin) or update.header.origin.is_same(state.origin):
                return True
            if not fetch.get("is_running"):  # or not any more: the server was started again
                if received == update.size_bytes:
                    return False
                self._ask("POST", f"/admin/updates/{update.id}/fetch", wanted)
                is_asked = True
            time.sleep(_POLL_SECONDS)

    def lookups(self) -> dict[int, int]:
        """How often rows were looked up, by key, of the hottest ones and in a sample of queries."""
        return {int(key): int(count) for key, count in self._ask("GET", "/admin/updates/lookups")["lookups"]}

    def status(self, seconds: int) -> dict[str, Any]:
        """What the status page shows, of up to so many last seconds."""
        return self._ask("GET", f"/status.json?seconds={seconds}")

    def set_trial(self, commit_id: str, before: Mapping[str, Any]) -> None:
        """Peers are not to get that commit from this server; "": they may again. ``before`` is kept, for ``state``."""
        self._ask("POST", "/admin/updates/trial", {"commit_id": commit_id, "before": dict(before)})

    def roll_back(self) -> int:
        """Have it go back, for good, from the version that it shows; the number of what it shows then."""
        return int(self._ask("POST", "/admin/updates/rollback", {}, timeout=_APPLY_SECONDS)["version"])

    def open(self, update_id: str, start: int) -> http.client.HTTPResponse:
        """An update from a byte on, as it arrives at the server. OSError or HTTPException: the connection breaks;
        PublishError: it has nothing of it. Valid until the next request."""
        headers = {**self._headers, "Range": f"bytes={start}-"}
        self._connection.request("GET", f"{self._path}/admin/updates/{update_id}", headers=headers)
        response = self._connection.getresponse()
        if response.status != 206:
            raise PublishError(f"{self.url}: {response.status} {excerpt(response.read(1000).decode(errors='replace'))}")
        return response

    def apply(self, update: Update, *, replaces: Origin | None = None, peers: Sequence[str] = ()) -> Applied:
        """Have the server show the update; waits until it does. If that is what the server has, it may go back.
        ``peers``: whom it asks later for what it missed."""
        query = f"?replaces={replaces.commit_id}" if replaces is not None else ""
        body = {"peers": list(peers)} if peers else {}
        answer = self._ask("POST", f"/admin/updates/{update.id}/apply{query}", body, timeout=_APPLY_SECONDS)
        return Applied(int(answer["version"]), int(answer["rows"]), bool(answer["was_there"]))

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """A request of JSON, tried again where the connection breaks: each may be asked twice."""
        data = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        failures = 0
        while True:
            try:
                return self._try(method, path, data, headers, timeout or self._timeout)
            except BrokenError as error:
                self._pause(failures := failures + 1, error)

    def _pause(self, failures: int, error: Exception) -> None:
        if failures >= self._attempts:
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
            raise BrokenError(str(error) or type(error).__name__) from error
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
            raise BrokenError(words)
        raise PublishError(f"{self.url}: {words}")

    def close(self) -> None:
        self._connection.close()

    disown = close  # in a forked process: answers on this connection are the parent's; the next request makes another

    def __enter__(self) -> "AdminClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
