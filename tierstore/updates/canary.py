"""A canary: one server shows a version first, and if it fares worse than before, it goes back and no other gets it."""

import math
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..system.checks import excerpt, require_int
from .client import AdminClient, PublishError, parse_url

WINDOW_SECONDS: Final = 60
"""A server keeps its latencies for so long."""
MIN_REQUESTS: Final = 100
"""Fewer tell nothing of the 99th percentile, or of a share of one in a hundred."""
WAY_OUT: Final = f"Publish again once it has {MIN_REQUESTS} requests or its watched loss, or without --canary"


class Measures(NamedTuple):
    """How a server fares; None of what it cannot tell."""

    log_loss: float | None = None
    failed_share: float | None = None
    seconds_p99: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """Which server is the canary, for how long it is watched, and how much worse than before it may fare.

    Attributes:
        url: of its admin port; "" for the first server.
        seconds: for which it is watched, in [1, 3600]. What is compared is of the minute before, at most as many.
        loss: growth of the watched log loss that is allowed, relative.
        errors: growth of the share of requests that fail, absolute.
        p99: growth of the 99th percentile of latency, relative.
    """

    url: str = ""
    seconds: int = 60
    loss: float = 0.002
    errors: float = 0.01
    p99: float = 1.0

    def __post_init__(self) -> None:
        parse_url(self.url or "http://first")
        require_int(self.seconds, "canary seconds", 1, 3600)
        for name in ("loss", "errors", "p99"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"canary {name}={getattr(self, name)} must be a finite number of at least 0")

    def compare(self, before: Measures, after: Measures) -> list[str]:
        """Of each measure that there was before: what got worse beyond its bound, or is absent; "" if it did not."""
        bounds = (
            ("the log loss", f"--canary-loss {self.loss:g}", 1 + self.loss, 0.0),
            ("the share of failed requests", f"--canary-errors {self.errors:g}", 1.0, self.errors),
            ("the 99th percentile of latency, in seconds,", f"--canary-p99 {self.p99:g}", 1 + self.p99, 0.0),
        )
        found = []
        for (what, flag, factor, more), was, now in zip(bounds, before, after, strict=True):
            if was is not None:
                most, shown = was * factor + more, "absent" if now is None else f"{now:.5g}"
                bad = f"{what} is {shown}, was {was:.5g}, and {flag} allows {most:.5g}"
                found.append("" if now is not None and now <= most else bad)  # NaN is not
        return found


def measure(client: AdminClient, version: int, seconds: int, commit_id: str = "") -> Measures:
    """How a server fared in the last seconds, up to ``WINDOW_SECONDS``, and its watch's log loss of this version."""
    status = client.status(seconds)
    try:
        requests, watch, loss = status["requests"], status.get("watch") or {}, None
        is_it = commit_id in ("", watch.get("commit_id", commit_id))
        if watch and watch["version"] == version and is_it and watch["rows"]:
            loss = math.inf if watch["log_loss"] is None else float(watch["log_loss"])
        recent = requests["recent"]
        if sum(requests["history"]["requests"]) < MIN_REQUESTS:
            return Measures(loss)
        failed = recent["failed_per_second"] / recent["requests_per_second"]
        return Measures(loss, failed, recent["seconds_p99"])
    except (KeyError, ValueError, TypeError) as error:
        raise PublishError(f"{client.url} does not tell how it fares: {excerpt(status)}") from error


def watch(client: AdminClient, version: int, before: Measures, canary: Canary, commit_id: str = "") -> str:
    """What gets worse beyond its bound, in words, as soon as that is seen; "" if nothing does. PublishError: a measure
    that there was before was not there in all that time, and so the server is on trial still."""
    end, lacking = time.monotonic() + canary.seconds, before
    while (left := end - time.monotonic()) > 0:
        part = min(left, WINDOW_SECONDS)
        time.sleep(part + 1)  # servers count whole seconds
        after = measure(client, version, max(1, int(part)), commit_id)
        there = Measures(*(None if now is None else was for was, now in zip(before, after, strict=True)))
        if worse := "; ".join(filter(None, canary.compare(there, after))):
            return worse
        lacking = Measures(*(was if now is None else None for was, now in zip(lacking, after, strict=True)))
    if absent := "; ".join(canary.compare(lacking, Measures())):
        raise PublishError(f"{client.url} shows version {version} and cannot be judged: {absent}. {WAY_OUT}")
    return ""
