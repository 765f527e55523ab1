"""A canary shows a version on trial: what is measured of it before and afterwards, and how much worse it may get."""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from ..system.checks import require_int

WINDOW_SECONDS: Final = 60  # for which a server keeps its latencies
MIN_REQUESTS: Final = 100  # fewer tell nothing of the 99th percentile, or of a share of one in a hundred


class Measures(NamedTuple):
    """How a server fares; None of what it cannot tell. Failed requests are errors, and those that were refused before
    a model was asked; latency is from arrival to answer, the wait for a batch included."""

    log_loss: float | None = None
    failed_share: float | None = None
    seconds_p99: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """For how long a version is watched, and how much worse than before the canary may fare.

    Attributes:
        seconds: for which it is watched, in [1, 3600]. What is compared is of the minute before, at most as many.
        loss: growth of the watched log loss that is allowed, relative.
        errors: growth of the share of requests that fail, absolute.
        p99: growth of the 99th percentile of latency, relative.
    """

    seconds: int = 60
    loss: float = 0.002
    errors: float = 0.01
    p99: float = 1.0

    def __post_init__(self) -> None:
        require_int(self.seconds, "canary seconds", 1, 3600)
        for name in ("loss", "errors", "p99"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"canary {name}={getattr(self, name)} must be a finite number of at least 0")

    def worse(self, before: Measures, after: Measures) -> str:
        """What got worse beyond its bound, in words; "" if nothing did."""
        bounds = (
            ("the log loss", f"--canary-loss {self.loss:g}", 1 + self.loss, 0.0),
            ("the share of failed requests", f"--canary-errors {self.errors:g}", 1.0, self.errors),
            ("the 99th percentile of latency, in seconds,", f"--canary-p99 {self.p99:g}", 1 + self.p99, 0.0),
        )
        found = []
        for (what, flag, factor, more), was, now in zip(bounds, before, after, strict=True):
            if was is not None and now is not None and not now <= (most := was * factor + more):  # NaN is not
                found.append(f"{what} is {now:.5g}, was {was:.5g}, and {flag} allows {most:.5g}")
        return "; ".join(found)


def absent(before: Measures, after: Measures) -> list[str]:
    """Measures that there were before, and are not there."""
    return [
        name for name, was, now in zip(Measures._fields, before, after, strict=True) if was is not None and now is None
    ]
