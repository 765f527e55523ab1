"""Updates from peers: the bytes of one as they arrive there, and which one brings a replica to what its peers show.

Everything here waits for sockets, so a server runs it in a thread.
"""

import http.client
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from ..system.killpoints import reach
from .client import AdminClient, Kept, PublishError, ReplicaState
from .header import Origin
from .update_file import file_checksum

WINDOW_SECONDS: Final = 5.0
"""A peer that another one is so far ahead of is slow. It is also how long a peer may be silent."""
PATIENCE_SECONDS: Final = 60.0
"""Without a byte from any peer."""
_STATE_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.1
_READ_BYTES: Final = 256 << 10
_LOG: Final = logging.getLogger("tierstore.updates")
_ASKED_AT_ONCE: Final = 32
_Broken: Final = (PublishError, OSError, http.client.HTTPException, ValueError)


class Fetch:
    """The rest of an update, from the first of the peers that gives it, into a file that others may add to meanwhile.

    Args:
        path: the file, as far as it has come.
        append: writes bytes to it at an offset.
        stop: once it is set, ``run`` ends soon, with PublishError.
    """

    def __init__(
        self, path: Path, update_id: str, size_bytes: int, peers: Sequence[str], *, token: str | None,
        append: Callable[[bytes, int], None], stop: threading.Event,
    ) -> None:  # fmt: skip
        self._path = path
        self._id = update_id
        self._size_bytes = size_bytes
        self._peers = list(peers)
        self._token = token
        self._append = append
        self._stop = stop
        self._turn = -1

    def run(self) -> None:
        """Fetch it and compare it with its name. PublishError: no peer gave it whole. Others as of ``append``."""
        for _ in range(len(self._peers) + 1):
            self._fill()
            if file_checksum(self._path) == self._id:
                reach("fetch: checked")
                return
            self._require_wanted()
            os.truncate(self._path, 0)
            self._peers = self._peers[1:] + self._peers[:1]
            _LOG.warning("update %s was damaged on its way; next from %s", self._id, ", ".join(self._peers[:1]))
        raise PublishError(f"update {self._id} was damaged on its way from each of {len(self._peers)} peers")

    def _require_wanted(self) -> None:
        if self._stop.is_set():
            raise PublishError(f"update {self._id} is not wanted any more")

    def _fill(self) -> None:
        last, grew_at, why = -1, time.monotonic(), "none is named"
        turns = itertools.cycle(self._peers)
        peer = next(turns, "")
        while (have := self._path.stat().st_size) < self._size_bytes:
            self._require_wanted()
            if have > last:  # by a peer, or a publisher
                last, grew_at = have, time.monotonic()
            try:
                peer = self._read(peer, have) if peer else ""
            except TimeoutError:
                peer, why = self._faster(peer, have, 0) or peer, f"{peer} is silent"
            except _Broken as error:
                peer, why = next(turns), f"{peer}: {error}"
            is_vain = self._path.stat().st_size == have and self._stop.wait(_PAUSE_SECONDS)
            if is_vain or time.monotonic() - grew_at > PATIENCE_SECONDS:
                there = f"{have} of {self._size_bytes} bytes"
                raise PublishError(f"there is {there} of update {self._id}, and no peer gave more ({why})")

    def _read(self, peer: str, offset: int) -> str:
        """Append what a peer gives; which one to go on with."""
        with AdminClient(peer, token=self._token, attempts=1, timeout=WINDOW_SECONDS) as client:
            response = client.open(self._id, offset)
            checked_at, checked = time.monotonic(), offset
            while offset < self._size_bytes:
                data = response.read1(min(_READ_BYTES, self._size_bytes - offset))
                if not data or self._stop.is_set():
                    raise PublishError(f"it ended at byte {offset}")
                self._append(data, offset)
                offset += len(data)
                reach("fetch: part written")
                if time.monotonic() - checked_at >= WINDOW_SECONDS:
                    if faster := self._faster(peer, offset, offset - checked):
                        return faster
                    checked_at, checked = time.monotonic(), offset
        return peer

    def _faster(self, peer: str, have: int, by: int) -> str | None:
        """The first other one that has more, by over so many bytes. One is asked at a time while this one gives any."""
        others = [other for other in self._peers if other != peer]
        if by:
            self._turn += 1
            others = others[self._turn % (len(others) or 1) :][:1]
        states = _states(others, self._token)[0]
        return next((other for other, state in states.items() if state.received(self._id) > have + by), None)


def _states(peers: Sequence[str], token: str | None) -> tuple[dict[str, ReplicaState], str]:
    """Of those that answer, in order; and why another one does not."""

    def ask(peer: str) -> ReplicaState | str:
        try:
            with AdminClient(peer, token=token, attempts=1, timeout=_STATE_SECONDS) as client:
                return client.state()
        except _Broken as error:
            return f"{peer}: {error}"

    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        answers = list(zip(peers, pool.map(ask, peers), strict=True))
    found = {peer: each for peer, each in answers if isinstance(each, ReplicaState)}
    return found, next((each for _, each in answers if isinstance(each, str)), "")


class Missing(NamedTuple):
    """What brings a replica nearer to its peers' version."""

    target: Origin
    update: Kept | None
    """The first to apply; None if no peer keeps it."""
    peers: tuple[str, ...]
    """Those that keep it."""


def missing(
    own: Origin | None, peers: Sequence[str], declined: Collection[str], *, token: str | None
) -> Missing | None:
    """The update that a replica lacks on the way to the highest version that its peers show, other than canaries whose
    publisher still watches them; None if it lacks none, or is empty and they show several stores.

    Args:
        declined: identities of commits that it is not to have.

    Raises:
        PublishError: there are peers, and none answers.
    """
    states, why = _states(peers, token)
    if peers and not states:
        raise PublishError(f"no peer answers ({why})")
    states = {peer: state for peer, state in states.items() if state.trial is None}
    shown = [state.origin for state in states.values() if state.origin is not None]
    newer = [each for each in shown if own is None or (each.source == own.source and each.version > own.version)]
    target = max(newer, key=lambda each: each.version, default=None)
    if target is None or target.commit_id in declined or len({each.source for each in newer}) > 1:
        return None
    kept = [each for state in states.values() if target.is_same(state.origin) for each in state.kept]
    ways = [each for each in kept if each.commit_id not in declined]
    changes = [each for each in ways if own is not None and own.commit_id == each.since_commit_id != ""]
    wholes = [each for each in ways if not each.since and (own is None or each.version > own.version)]
    update = next(iter(changes or wholes), None)
    return Missing(target, update, tuple(peer for peer, state in states.items() if update in state.kept))
