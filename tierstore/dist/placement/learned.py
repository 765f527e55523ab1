"""What linear costs miss, learned from the steps that they were fitted to.

Kernel ridge regression of the logarithm of measured over linear seconds (C. Saunders et al., Ridge Regression Learning
Algorithm in Dual Variables, ICML 1998), as a function of a group's amounts of work. Far from all measured steps the
correction fades, and the linear costs remain. docs/performance.md has its error beside that of neural networks.
"""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from ...kernels.arrays import Float64s

_WIDTH: Final = 0.5
"""Of the kernel: it is exp(-0.5) for points one standard deviation apart in each feature."""
_RIDGE: Final = 0.3
_DIGITS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A factor of a group's linear seconds.

    Attributes:
        means, scales: of each feature. points: features of the measured steps, less means, over scales. weights: of
            each point.
    """

    means: tuple[float, ...]
    scales: tuple[float, ...]
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        widths = {len(self.means), len(self.scales), *map(len, self.points)}
        if len(widths) > 1 or len(self.points) != len(self.weights) or min(self.scales, default=0.0) <= 0:
            raise ValueError("means, scales, points and weights are not of one correction")

    @classmethod
    def fitted(cls, features: Float64s, logs: Float64s) -> Self:
        """Of steps with features float64 [steps, features], and ``logs`` of measured over linear seconds [steps]."""
        means, scales = features.mean(0), features.std(0) + 1e-6
        points = ((features - means) / scales).round(_DIGITS)
        weights = np.linalg.solve(_kernel(points, points) + _RIDGE * np.eye(len(points)), logs)
        return cls(
            means=tuple(means.tolist()), scales=tuple(scales.tolist()), points=tuple(map(tuple, points.tolist())),
            weights=tuple(weights.round(_DIGITS).tolist()),
        )  # fmt: skip

    def factors(self, features: Float64s) -> Float64s:
        """float64 [n], of features [n, features]."""
        own = (features - np.array(self.means)) / np.array(self.scales)
        found: Float64s = np.exp(_kernel(own, np.array(self.points)) @ np.array(self.weights))
        return found


def _kernel(first: Float64s, second: Float64s) -> Float64s:
    """float64 [n, m] in (0, 1], how near points of one array are to those of another."""
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1) - 2 * first @ second.T
    found: Float64s = np.exp(-_WIDTH * squares / first.shape[1])
    return found
