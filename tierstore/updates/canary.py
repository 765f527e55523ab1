"""A canary: one server shows a version first, and if it fares worse than before, it goes back and no other gets it."""

import math
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..system.checks import require_int
from ..system.excerpt import excerpt
from .client import AdminClient, PublishError, parse_url

WINDOW_SECONDS: Final = 60
"""A server keeps its latencies for so long."""
MIN_REQUESTS: Final = 100
"""Fewer tell nothing of the 99th percentile, or of a share of one in a hundred."""
CANNOT_JUDGE: Final = (
    f"it has fewer than {MIN_REQUESTS} requests, and watches no loss. Publish again once it has more, or without "
    "--canary"
)


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
        """Of each measure that both have: what got worse beyond its bound; "" if it did not."""
        bounds = (
            ("the log loss", f"--canary-loss {self.loss:g}", 1 + self.loss, 0.0),
            ("the share of failed requests", f"--canary-errors {self.errors:g}", 1.0, self.errors),
            ("the 99th percentile of latency, in seconds,", f"--canary-p99 {self.p99:g}", 1 + self.p99, 0.0),
        )
        found = []
        for (what, flag, factor, more), was, now in zip(bounds, before, after, strict=True):
            if was is not None and now is not None:
                most = was * factor + more
                is_worse = not now <= most  # NaN is
                found.append(f"{what} is {now:.5g}, was {was:.5g}, and {flag} allows {most:.5g}" if is_worse else "")
        return found


def measure(client: AdminClient, version: int, seconds: int) -> Measures:
    """How a server fared in the last seconds, up to ``WINDOW_SECONDS``, and its watch's log loss of this version."""
    status = client.status(seconds)
    try:
        requests, watch, loss = status["requests"], status.get("watch") or {}, None
        if watch and watch["version"] == version and watch["rows"]:
            loss = math.inf if watch["log_loss"] is None else float(watch["log_loss"])
        recent = requests["recent"]
        if sum(requests["history"]["requests"]) < MIN_REQUESTS:
            return Measures(loss)
        failed = recent["failed_per_second"] / recent["requests_per_second"]
        return Measures(loss, failed, recent["seconds_p99"])
    except (KeyError, ValueError, TypeError) as error:
        raise PublishError(f"{client.url} does not tell how it fares: {excerpt(status)}") from error


def watch(client: AdminClient, version: int, before: Measures, canary: Canary) -> str:
    """What gets worse beyond its bound, in words, as soon as that is seen; "" if nothing does. PublishError: there was
    nothing to compare, and so the server is on trial still."""
    end, compared = time.monotonic() + canary.seconds, list[str]()
    while (left := end - time.monotonic()) > 0:
        part = min(left, WINDOW_SECONDS)
        time.sleep(part + 1)  # servers count whole seconds
        compared += canary.compare(before, measure(client, version, max(1, int(part))))
        if any(compared):
            return "; ".join(filter(None, compared))
    if not compared:
        raise PublishError(f"{client.url} shows version {version} and cannot be judged: {CANNOT_JUDGE}")
    return ""
