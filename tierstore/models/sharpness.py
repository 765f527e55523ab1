"""How sharp the minimum is that training ended in, for any model and loss.

``losses`` gives the loss of the training data at the weights as they are, as parts to be summed: ``lambda:
(loss_of(model, batch) / len(batches) for batch in batches)``. A part is freed before the next is made; the model must
be deterministic. Weights change meanwhile, and have their values back at the end. ``parameters`` are dense ones, or all
of a model's: then its modules train no rows, which are constants.

Shape legend: P, the elements of all dense parameters laid end to end; D, dimensions of a subspace.
"""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..optim import curvature
from ..optim.curvature import Eigenvalues, Evaluation, dense_of, flat, put, require_loss, slopes
from ..system.checks import require_int

Losses = Callable[[], Iterable[Tensor]]
_MEMORY, _HALVINGS, _DECREASE = 10, 20, 1e-4


def box_sharpness(
    losses: Losses, parameters: Iterable[Tensor], *, epsilon: float = 1e-3, dims: int | None = None,
    iterations: int = 10, seed: int = 0,
) -> float:  # fmt: skip
    """The largest rise of the loss found in a small box around the weights, in percent of 1 + the loss (Keskar,
    Mudigere, Nocedal, Smelyanskiy and Tang, "On large-batch training for deep learning: generalization gap and sharp
    minima", ICLR 2017).

    The box has ``|y_i| <= epsilon * (|x_i| + 1)`` around weights x. In a subspace weights move by ``A y``, and x is
    their least-squares coordinates there.

    Args:
        epsilon: the paper has 1e-3 and 5e-4.
        dims: of a random subspace, whose axes are normal vectors scaled to length 1; the paper has 100. None: all P.
        iterations: of ``least_in_box``; the paper has 10.
        seed: of the subspace, and of the places where the search begins.

    Returns NaN where the loss is NaN somewhere in the box.
    """
    if not 0 < epsilon < math.inf or iterations < 1 or (dims is not None and dims < 1):
        raise ValueError(f"epsilon={epsilon}, dims={dims} and iterations={iterations} must be finite and above 0")
    with _kept(parameters) as (dense, weights_P):
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=weights_P.dtype).to(weights_P.device)

        axes_PD = None if dims is None else torch.nn.functional.normalize(drawn(len(weights_P), dims), dim=0)
        at = weights_P if axes_PD is None else torch.linalg.lstsq(axes_PD, weights_P[:, None]).solution[:, 0]
        bound = epsilon * (at.abs() + 1)

        def lowered(place: Tensor) -> tuple[float, Tensor]:
            put(weights_P + (place if axes_PD is None else axes_PD @ place), dense)
            value, gradient = 0.0, torch.zeros_like(weights_P)
            for loss in losses():
                value -= float(require_loss(loss).detach())
                gradient -= flat(slopes(loss, dense))
            values.append(value)
            return value, gradient if axes_PD is None else axes_PD.T @ gradient

        values: list[float] = []
        base = -lowered(torch.zeros_like(bound))[0]
        highest = -least_in_box(lowered, lambda: bound * drawn(len(bound)).clamp(-1, 1), bound, iterations)
        return math.nan if any(map(math.isnan, values)) else 100 * max(highest - base, 0.0) / (1 + base)


def hessian_eigenvalues(
    losses: Losses, parameters: Iterable[Tensor], *, iterations: int = 100, tolerance: float = 1e-5, seed: int = 0
) -> Eigenvalues:
    """The smallest and the largest eigenvalue of the loss's Hessian; other arguments as of ``extreme_eigenvalues``. An
    iteration takes some two evaluations with gradients, and P elements of memory."""
    require_int(iterations, "iterations", 1, 1 << 40)
    with _kept(parameters) as (dense, weights_P):

        def product(vector_P: Tensor) -> Tensor:
            total = torch.zeros_like(vector_P)
            for loss in losses():
                total += curvature.hessian_product(require_loss(loss), dense)(vector_P)
            return total

        start = torch.randn(len(weights_P), generator=torch.Generator().manual_seed(seed)).to(weights_P)
        return curvature.extreme_eigenvalues(product, start, iterations=iterations, tolerance=tolerance)


@contextlib.contextmanager
def _kept(parameters: Iterable[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The dense parameters, and their values, [P], which they have again at the end."""
    dense = dense_of(parameters)
    if not dense:
        raise ValueError("parameters has none that is trained and has elements; rows of tables are constants here")
    weights_P = flat(dense)
    try:
        with Evaluation(are_constant=True), torch.enable_grad():
            yield dense, weights_P
    finally:
        put(weights_P, dense)


def least_in_box(
    evaluate: Callable[[Tensor], tuple[float, Tensor]], draw: Callable[[], Tensor], bound: Tensor, iterations: int
) -> float:
    """The least value found in ``[-bound, bound]``, each [D], by L-BFGS (Nocedal, 1980) over the coordinates that are
    not held at a bound by the gradient (Bertsekas, "Projected Newton methods for optimization problems with simple
    constraints", 1982). It begins where ``draw`` says, and again at a local minimum. ``evaluate``: value and slope.

    Where the function bends down along the last step, as minus a loss around its minimum, the step is to the corner of
    the box that the gradient says is lowest.
    """
    place = draw()
    value, gradient = evaluate(place)
    least, pairs = value, deque[tuple[Tensor, Tensor]](maxlen=_MEMORY)
    for _ in range(iterations):
        is_held = ((place <= -bound) & (gradient > 0)) | ((place >= bound) & (gradient < 0))
        way = _newton_like(gradient.masked_fill(is_held, 0.0), pairs).masked_fill(is_held, 0.0)
        if not pairs or not float(way @ gradient) < 0:
            pairs.clear()
            way = torch.where(gradient > 0, -bound, bound) - place
        for halving in range(_HALVINGS if float(way @ gradient) < 0 else 0):
            there = torch.clamp(place + way / 2**halving, -bound, bound)
            found, its_gradient = evaluate(there)
            step, change = there - place, its_gradient - gradient
            if found < value and found <= value + _DECREASE * float(gradient @ step):
                pairs.append((step, change))
                if not float(step @ change) > 0:
                    pairs.clear()
                break
        else:
            pairs.clear()
            there = draw()
            found, its_gradient = evaluate(there)
        place, value, gradient, least = there, found, its_gradient, min(least, found)
    return least


def _newton_like(gradient: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """``-H gradient``, H the inverse Hessian of L-BFGS, by its two loops."""
    way, lengths = -gradient, []
    for step, change in reversed(pairs):
        lengths.append((step @ way) / (step @ change))
        way = way - lengths[-1] * change
    if pairs:
        step, change = pairs[-1]
        way = way * ((step @ change) / (change @ change))
    for (step, change), length in zip(pairs, reversed(lengths), strict=True):
        way = way + (length - (change @ way) / (step @ change)) * step
    return way
