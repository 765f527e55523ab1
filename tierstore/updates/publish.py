"""A store's changes to servers: to a few of them from here, and to the others from those.

The servers that begin at one version are a chain. The publisher sends the update to the first; each other one fetches
it from the one before it while that still receives it, or from the next one before that if that fails. So the update
crosses each link once, and all have it a little later than the first: docs/updates.md has the arithmetic.

Urgent rows may go first, as a version of their own between the servers' and the next. A canary may be first, too.
"""

import contextlib
import logging
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import TierstoreError
from ..system.killpoints import reach
from ..system.sizes import format_size
from .canary import WAY_OUT, WINDOW_SECONDS, Canary, Measures, measure, watch
from .client import AdminClient, FetchError, Progress, PublishError, ReplicaState, parse_url
from .delta import Update, open_source, source_in, source_of, write_update
from .header import Origin
from .urgent import urgent_rows

_LOG: Final = logging.getLogger("tierstore.updates")
_ASKED: Final = 3
_ASK_SECONDS: Final = 10.0
"""For a server's first answer, so often: one that is gone does not hold up the others."""

Bar = Callable[[str], AbstractContextManager[Progress]]


class Published(NamedTuple):
    url: str
    version: int
    """Of the source, that it shows; 0 if that is not known."""
    rows: int = 0
    size_bytes: int = 0
    """Sent, with so many rows; 0 if it had everything."""
    seconds: float = 0.0
    error: str = ""


def _no_bar(_what: str) -> AbstractContextManager[Progress]:
    return contextlib.nullcontext(lambda _done, _total: None)


class _Publisher:
    """The updates of one store, each made once, however many servers lack it."""

    def __init__(
        self, directory: str | os.PathLike[str], urls: Sequence[str], work: Path, bar: Bar, token: str | None
    ) -> None:
        self._directory = directory
        self._urls = urls  # which are each other's peers
        self._token = token
        self._work = work
        self._bar = bar
        self._sending = threading.RLock()
        self._is_stopped = False
        self._version: Any = None  # or a store that is open at it
        self._updates: dict[int, Update] = {}
        self.source = source_of(directory)

    def update(self, since: int) -> Update:
        if since not in self._updates:
            with self._bar("compare") as show:
                update = self._write("update", since, progress=show)
            self._updates[since] = self._updates.setdefault(update.header.since, update)
        return self._updates[since]

    def _write(self, name: str, since: int, **settings: Any) -> Update:
        path = self._work / f"{name}-{since}"
        update = write_update(self._directory, path, since=since, version=self._version, **settings)
        if self._version is not None and not self.source.origin.is_same(update.header.origin):
            raise PublishError(f"{self._directory} is at {update.header.origin} by now: publish again")
        return update

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

    def begin(self, url: str, state: ReplicaState, wanted: int | None) -> int:
        """The version that an update of a server begins at: the wanted one, unless that is None. PublishError if the
        server has rows of another store, or not the wanted version, or another commit of that number, or went back from
        the version to be published."""
        origin = state.origin
        if self.source.origin.commit_id in state.declined:
            raise PublishError(f"{url} went back from {self.source.origin}; commit again, and publish that")
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

    def publish(self, urls: Sequence[str], since: int | None, fan_out: int, urgent: float | None) -> list[Published]:
        """Bring servers to the version; errors are part of the answer. One that shows it on trial is on trial no
        more."""
        origins: dict[str, Origin | None] = {}
        begins: dict[str, int] = {}  # the version that a server's update begins at
        lookups: dict[str, Mapping[int, int]] = {}

        def ask(url: str) -> Published:
            with self._client(url) as client:
                state = client.state()
                origins[url] = state.origin
                if not self.source.origin.is_same(state.origin):
                    begins[url], lookups[url] = self.begin(url, state, since), client.lookups() if urgent else {}
                elif state.trial is not None:
                    client.set_trial("", {})
            return Published(url, self.source.origin.version)

        with ThreadPoolExecutor(len(urls)) as pool:

            def bring(update: Update, chain: list[str]) -> Iterator[Published]:
                one = partial(self._bring, update, chain, iter(chain[fan_out:]), fan_out, origins)
                return pool.map(partial(_tried, one), chain)

            try:
                done = dict(zip(urls, pool.map(partial(_tried, ask), urls), strict=True))
                for begin in dict.fromkeys(begins.values()):
                    chain = [url for url in urls if begins.get(url) == begin]
                    if urgent and begin and (rows := self._urgent(begin, urgent, lookups.values())):
                        for each in bring(rows, chain):
                            if each.error:
                                _LOG.warning("urgent rows come with the rest: %s", each.error)
                        reach("publish: urgent rows shown")
                    try:
                        update = self.update(begin)
                    except (TierstoreError, OSError) as error:
                        done |= {url: Published(url, 0, error=str(error)) for url in chain}
                    else:
                        done |= zip(chain, bring(update, chain), strict=True)
            except BaseException:
                self._is_stopped = True  # Ctrl-C: threads that send or wait for bytes end at their next part
                raise
        return [done[url] for url in urls]

    def _client(self, url: str) -> AdminClient:
        """To ask a server that may be gone."""
        return AdminClient(url, token=self._token, attempts=_ASKED, timeout=_ASK_SECONDS)

    def _urgent(self, since: int, share: float, lookups: Iterable[Mapping[int, int]]) -> Update | None:
        """The most urgent of the rows that changed since a version; None if there are none."""
        try:
            rows = urgent_rows(self._directory, since, share, sum(map(Counter, lookups), Counter()))
            return self._write("urgent", since, only=rows) if len(rows) else None
        except (TierstoreError, OSError) as error:
            _LOG.warning("no urgent rows go first: %s", error)
            return None

    def prepare(self, urls: Sequence[str], since: int | None) -> None:
        """Make what servers lack before a canary is watched: afterwards the trainer may have dropped the version, and
        nobody has watched later ones. ``publish`` reports what could not be made."""
        with open_source(Path(self._directory).absolute()) as self._version:
            self.source = source_in(*self._version[:2])
            for url in urls:
                with contextlib.suppress(TierstoreError, OSError), self._client(url) as client:
                    if not self.source.origin.is_same((state := client.state()).origin):
                        self.update(self.begin(url, state, since))
        self._version = self.source.origin.version

    def try_on(self, canary: Canary, since: int | None) -> Published:
        """Bring the canary to the version, and watch it; if it gets worse, it goes back, which is an error. One that a
        publisher left on trial, as it was killed, is compared with what that one measured before."""
        url, own = canary.url, self.source.origin
        done = Published(url, own.version)
        with self._client(url) as client:
            state = client.state()
            if own.is_same(state.origin):
                if state.trial is None:
                    return done
                before = Measures(**state.trial)
            elif state.origin is None:
                raise PublishError(f"{url} is empty, so there is no before to compare with: publish without --canary")
            else:
                update = self.update(self.begin(url, state, since))
                shown, seconds = state.origin, min(canary.seconds, WINDOW_SECONDS)
                before = measure(client, shown.version, seconds, shown.commit_id + shown.urgent)
                if before.log_loss == math.inf:  # nothing is worse
                    before = before._replace(log_loss=None)
                if before == Measures():
                    raise PublishError(f"{url} cannot be a canary: it has few requests, and watches no loss. {WAY_OUT}")
                client.set_trial(own.commit_id, before._asdict())
                done = self._bring(update, [url], iter(()), 1, {url: state.origin}, url)
            reach("publish: canary shows it")
            if worse := watch(client, done.version, before, canary, own.commit_id):
                with contextlib.suppress(PublishError):  # of a second attempt, where the first one's answer was lost
                    if own.is_same(client.origin()):
                        client.roll_back()
                back = client.origin()
                went = f"could not go back from {back}" if back is None or own.is_same(back) else f"went back to {back}"
                return Published(url, 0, error=f"{went}: {worse}")
            client.set_trial("", {})
            reach("publish: canary passed")
            return done

    def _bring(
        self, update: Update, chain: list[str], spares: Iterator[str], fan_out: int,
        origins: Mapping[str, Origin | None], url: str,
    ) -> Published:  # fmt: skip
        """Bring an update to one server of those that it is for, which are ``fan_out`` chains."""
        place = chain.index(url)
        parents = sorted(range(place), key=lambda other: ((place - other) % fan_out, place - other))
        others = [each for each in self._urls if each != url]
        with AdminClient(url, token=self._token) as client, self._bar(url) as bar:

            def show(done_bytes: int, total_bytes: int) -> None:
                if self._is_stopped:
                    raise PublishError("interrupted")
                bar(done_bytes, total_bytes)

            if place < fan_out:
                self._send(client, update, spares, show)
            else:
                try:
                    if client.fetch(update, [chain[each] for each in parents], others, show):
                        return Published(url, self.source.origin.version)
                except FetchError as error:
                    _LOG.warning("%s; the rest is sent from here", error)
                    with self._sending:  # one after another: together they would take the link from each other
                        client.send(update, show)
            done = client.apply(update, replaces=origins[url], peers=others)
        return Published(url, done.version, done.rows, update.size_bytes)

    def _send(self, client: AdminClient, update: Update, spares: Iterator[str], show: Progress) -> None:
        """Send an update to the first of a chain; where that fails, what is missing to the next, from which the others
        have the rest."""
        try:
            client.send(update, show)
        except (TierstoreError, OSError):
            for spare in spares if not self._is_stopped else ():
                with contextlib.suppress(TierstoreError, OSError), AdminClient(spare, token=self._token) as other:
                    other.send(update, show)
                    break
            raise


def _tried(work: Callable[[str], Published], url: str) -> Published:
    """What is done with a server, or why not, and how long it took."""
    started = time.monotonic()
    try:
        done = work(url)
    except (TierstoreError, OSError) as error:
        done = Published(url, 0, error=str(error))
    return done._replace(seconds=time.monotonic() - started)


def publish(
    directory: str | os.PathLike[str], to: Sequence[str], *, since: int | None = None, token: str | None = None,
    bar: Bar = _no_bar, fan_out: int = 1, urgent: float | None = None, canary: Canary | None = None,
) -> list[Published]:  # fmt: skip
    """Bring servers to a store's last version; one that fails does not keep the others from it.

    The update lies in the system's temporary directory (TMPDIR) meanwhile.

    Args:
        to: URLs of the servers' admin ports, by which the servers also reach each other.
        since: the version that the servers have; default: what each says.
        bar: makes a progress bar, given its label.
        fan_out: how many servers the update is sent to from here, of those that have the same version; the others fetch
            it from those.
        urgent: share of the changed rows, above 0 and below 1, that servers show first, as they were before else
            (``urgent_rows``). They are sent twice: what follows is the same update as without. A server that has them
            still says the version before.
        canary: the server that shows the version first, at once whole. If it gets worse there, all others fail, too.

    Raises:
        StoreNotFoundError, DamagedError: the store. ValueError: a URL, ``fan_out`` or ``urgent``.
    """
    if fan_out < 1:
        raise ValueError(f"fan_out={fan_out}: one server at least is sent to")
    if urgent is not None and not 0 < urgent < 1:
        raise ValueError(f"urgent={urgent}: a share of the changed rows is above 0 and below 1, as 0.05")
    urls, done = list(dict.fromkeys(to)), list[Published]()
    canary = replace(canary, url=canary.url or urls[0]) if canary is not None and urls else None
    first = [] if canary is None else [canary.url]
    urls = [url for url in urls if url not in first]
    with _publishing(directory, [*first, *urls], bar, token) as publisher:
        if canary is not None:
            publisher.prepare([canary.url, *urls], since)
            done.append(_tried(lambda _: publisher.try_on(canary, since), canary.url))
            if done[0].error:
                left = f"left as it is, as the canary {canary.url} did not keep the version"
                return done + [Published(url, 0, error=left) for url in urls]
        return done + (publisher.publish(urls, since, fan_out, urgent) if urls else [])


def plan(
    directory: str | os.PathLike[str], to: Sequence[str], *, since: int | None = None, token: str | None = None,
    bar: Bar = _no_bar,
) -> list[str]:  # fmt: skip
    """What ``publish`` would send, in words; without servers, to one that has ``since``, or nothing. PublishError: a
    server cannot be asked, or has not ``since``. Others as ``publish``."""
    with _publishing(directory, to, bar, token) as publisher:
        lines = []
        for url in to:
            with AdminClient(url, token=token) as client:
                state = client.state()
            if publisher.source.origin.is_same(state.origin):
                lines.append(f"{url}: has version {publisher.source.origin.version} already")
                continue
            lines += [f"{url}:", *publisher.describe(publisher.begin(url, state, since))]
        return lines if to else publisher.describe(since or 0)


@contextlib.contextmanager
def _publishing(
    directory: str | os.PathLike[str], to: Sequence[str], bar: Bar, token: str | None
) -> Iterator[_Publisher]:
    """A publisher in a temporary directory."""
    for url in to:  # a wrong URL is reported before anything is done
        parse_url(url)
    with tempfile.TemporaryDirectory(prefix="tierstore-") as work:
        yield _Publisher(directory, to, Path(work), bar, token)
