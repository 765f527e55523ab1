"""Hessian-free optimization of dense weights, which uses negative curvature.

Martens, "Deep learning via Hessian-free optimization" (ICML 2010), solves a damped Gauss-Newton system by conjugate
gradients. He, Mudigere, Smelyanskiy and Takac, "Large scale distributed Hessian-free optimization for deep neural
network" (2016), solve with the possibly indefinite Hessian by Bi-CGSTAB, and follow negative curvature that they meet.

Shape legend: P, the elements of all dense parameters laid end to end.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..system.checks import require_choice, require_int
from . import curvature as solvers
from .curvature import Evaluation, Iterate, dense_of, flat, put, require_loss, slopes, split

_WARM: Final = 0.95  # share of the last solution that the next solve begins with, as Martens has it
_PROBE, _TINY = 0.01, 1e-8
"""Length of the random part of a solve's start, over the gradient's and at least: the gradient may have no part along
the directions that lead away from a saddle."""
_ROUNDING: Final = 1e-6  # share of the damping below which negative curvature counts as none
_MIN_DAMPING, _MAX_DAMPING = 1e-8, 1e8
_DECREASE, _HALVINGS, _DOUBLINGS = 1e-4, 16, 8
"""Of the line search: the share of the predicted decrease that it is content with (Armijo, 1966), and trials."""


class Direction(NamedTuple):
    """``step``, [P], its products with the gradient, at most 0, and with the Hessian times it; the part of it that
    solves the damped system; and whether the rest follows negative curvature."""

    step: Tensor
    slope: float
    bend: float
    solution: Tensor
    is_negative: bool


class HessianFree(torch.optim.Optimizer):
    """Newton's method on a damped quadratic model of the loss, solved by products of its curvature with vectors.

        optimizer = tierstore.optim.HessianFree(model.parameters())
        loss = optimizer.step(lambda: loss_of(model(batch)))  # calls no backward

    The closure must be deterministic: leave dropout out. A step evaluates it once with gradients, then without for each
    trial of the line search. Rows of tables keep their own optimizer: constants of curvature and line search, they are
    trained once, by the first evaluation's gradient, in a backward pass at the end of the step (after
    ``store.optimizer()``, in the ``step`` of that one). torch refuses to differentiate per-sample weights twice.
    ``grad`` becomes this process's gradient of the first evaluation.

    Args:
        params: one group, as ``model.parameters()``. Parameters without elements, which stand for rows, play no part;
            where all others are frozen, a step trains rows alone.
        lr: length of the line search's first trial.
        curvature: "hessian": Bi-CGSTAB, and negative curvature is followed. "gauss-newton": conjugate gradients; then
            closures return ``(loss, outputs)``: the loss is computed from the outputs, and convex in them.
        damping: of Levenberg and Marquardt, at first; a step with less than 1/4 of the predicted decrease multiplies
            it by 3/2, one with more than 3/4 by 2/3.
        products: of curvature with a vector in a step, at most; each takes about two evaluations with gradients.
        tolerance: a solve ends when its residual is below this share of the gradient.
        average: replaces tensors by their means over ranks, in place, to the same bits on all, as
            ``functools.partial(tierstore.dist.average, ranks=store.ranks)``; called for the gradient, each product and
            each trial. A rank's loss is its share of the mean: times its samples, times ranks, over all samples.
        seed: of the random part of a solve's start; the same on all ranks.

    ValueError: a wrong argument, or more than one group.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1.0, curvature: Literal["hessian", "gauss-newton"] = "hessian",
        damping: float = 1.0, products: int = 20, tolerance: float = 1e-3, seed: int = 0,
        average: Callable[[Sequence[Tensor]], object] | None = None,
    ) -> None:  # fmt: skip
        require_choice(curvature, ("hessian", "gauss-newton"), "curvature")
        require_int(products, "products", 2, 1 << 20)
        for name, value in (("lr", lr), ("damping", damping), ("tolerance", tolerance)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be finite and above 0")
        given = {"lr": lr, "curvature": curvature, "damping": damping, "products": products, "tolerance": tolerance}
        super().__init__(params, given)
        if len(self.param_groups) > 1:
            raise ValueError(f"HessianFree takes one group of parameters, not {len(self.param_groups)}")
        self._average, self._seed = average, seed

    def __getstate__(self) -> dict[str, Any]:  # of which torch's knows groups and state
        return {**super().__getstate__(), "_average": self._average, "_seed": self._seed}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, curvature: Callable[[], Any] | None = None) -> Any:
        """Take a step; where it fails, or loss or gradient are not finite, no parameter and no row has changed.

        Args:
            closure: gives the loss, float [], or ``(loss, outputs)``.
            curvature: the same of samples whose curvature is used, fewer as a rule; default: those of ``closure``.

        Returns the loss before the step, of all ranks, float []. TypeError: no closure, or no outputs where needed.
        TypeError, ValueError, RuntimeError: what a closure gives is no loss, or it called backward.
        """
        if closure is None:
            raise TypeError("HessianFree evaluates the loss several times: call its own step(closure)")
        group = self.param_groups[0]
        dense = dense_of(group["params"])
        self.zero_grad()
        with torch.enable_grad(), Evaluation(are_constant=False) as evaluation:
            evaluated = self._evaluated(closure, evaluation)
        gradient = flat(slopes(evaluated[0], dense) if dense else [torch.empty(0)])
        before = evaluated[0].detach().clone()
        self._mean(gradient, before)
        if not (before.isfinite() and gradient.isfinite().all()):
            return before
        if not dense:
            evaluated[0].backward()  # type: ignore[no-untyped-call]
            return before
        start = flat(dense)
        for each in dense:
            self.state[each].setdefault("direction", torch.zeros_like(each))
        first = self.state[dense[0]]  # which has the state of all together
        first.setdefault("damping", dense[0].new_tensor(group["damping"]))
        first.setdefault("step", torch.tensor(0))

        def rise(length: float) -> float:
            put(start + length * way.step, dense)
            value = _pair(closure())[0].clone()
            self._mean(value)
            return float(value) - float(before)

        with Evaluation(are_constant=True) as evaluation:
            with torch.enable_grad():
                of_curvature = evaluated if curvature is None else self._evaluated(curvature, evaluation)
            way = self._direction(of_curvature, gradient, dense)
            try:
                length, ratio = search(rise, way, group["lr"]) if way.step.isfinite().all() else (0.0, 0.0)
            finally:
                put(start, dense)
        evaluated[0].backward()  # type: ignore[no-untyped-call]  # trains rows, by the weights before
        found = (start + length * way.step, way.solution) if length else (start, torch.zeros_like(start))
        for each, weights, solution in zip(dense, *(split(part, dense) for part in found), strict=True):
            each.copy_(weights)
            self.state[each]["direction"].copy_(solution)
        first["damping"].mul_(2 / 3 if ratio > 0.75 else 1 if ratio > 0.25 else 1.5).clamp_(_MIN_DAMPING, _MAX_DAMPING)
        first["step"] += 1
        return before

    def _evaluated(self, closure: Callable[[], Any], evaluation: Evaluation) -> tuple[Tensor, Tensor | None]:
        """What a closure gives, with gradients. TypeError, ValueError: no such. RuntimeError: it called backward."""
        loss, outputs = _pair(closure())
        evaluation.require(is_over=all(each.grad is None for each in self.param_groups[0]["params"]))
        return require_loss(loss), outputs

    def _mean(self, *tensors: Tensor) -> object:
        return self._average and self._average(tensors)

    def _direction(self, evaluated: tuple[Tensor, Tensor | None], gradient: Tensor, dense: list[Tensor]) -> Direction:
        group, state, (loss, outputs) = self.param_groups[0], self.state[dense[0]], evaluated
        damping, start = float(state["damping"]), _WARM * flat(self.state[each]["direction"] for each in dense)
        if group["curvature"] == "hessian":
            solver, product = solvers.bicgstab, solvers.hessian_product(loss, dense)
            generator = torch.Generator().manual_seed(self._seed + int(state["step"]))
            noise = torch.randn(len(start), generator=generator, dtype=start.dtype).to(start.device)
            start += (_PROBE * gradient.norm() + _TINY) / noise.norm() * noise
        elif outputs is None:
            raise TypeError('the closure gave a loss alone: with curvature="gauss-newton" return (loss, outputs)')
        else:
            solver, product = solvers.conjugate_gradients, solvers.gauss_newton_product(loss, outputs, dense)

        def damped(vector_P: Tensor) -> Tensor:
            image = product(vector_P)
            self._mean(image)
            return image + damping * vector_P

        iterates = itertools.islice(solver(damped, -gradient, start), group["products"] - 1)  # the start takes one
        return choose(iterates, gradient, damping, group["tolerance"])


def _pair(found: Any) -> tuple[Any, Any]:
    return found if isinstance(found, tuple) and len(found) == 2 else (found, None)


def choose(iterates: Iterable[Iterate], gradient: Tensor, damping: float, tolerance: float) -> Direction:
    """Where to go: to the iterate that the damped model likes best, and along the most negative curvature met.

    ``iterates`` are of a matrix with ``damping`` on its diagonal and ``-gradient``, [P]. The solve ends where that
    matrix is not positive: its solution is no minimum beyond. The part along negative curvature descends, and has the
    curvature's size as its length (Royer, O'Neill and Wright, "A Newton-CG algorithm with complexity guarantees for
    smooth unconstrained optimization", 2020). It is not followed where the damping outweighs it and there is a
    solution: it is a batch's noise, more often than not.
    """
    solution = torch.zeros_like(gradient)
    residual, least, limit = -gradient, 0.0, tolerance * float(gradient.norm())
    negative, of_negative, lowest, is_negative = solution, solution, -_ROUNDING * damping, False
    for each in iterates:
        square, bend = float(each.direction @ each.direction), float(each.direction @ each.image)
        if square > 0 and bend / square - damping < lowest:
            lowest, is_negative = bend / square - damping, True
            scale = math.copysign(lowest / math.sqrt(square), -float(gradient @ each.direction))
            negative, of_negative = scale * each.direction, scale * (each.image - damping * each.direction)
        if not bend > 0:
            break
        value = float(each.solution @ (gradient - each.residual)) / 2
        if value < least:
            solution, residual, least = each.solution, each.residual, value
        if float(each.residual.norm()) <= limit:
            break
    if float(gradient @ solution) > 0:
        solution, residual = torch.zeros_like(gradient), -gradient
    if solution.any() and lowest > -damping:
        negative, of_negative, is_negative = torch.zeros_like(gradient), torch.zeros_like(gradient), False
    step = solution + negative
    bent = of_negative - gradient - residual - damping * solution
    if not step.any():
        step = -gradient
    return Direction(step, float(gradient @ step), float(bent @ step), solution, is_negative)


def search(rise: Callable[[float], float], way: Direction, first: float) -> tuple[float, float]:
    """The length at which the loss falls enough, 0 if at none: ``first``, halved until it does, or doubled along
    negative curvature, which does not say how far it reaches. And the ratio of actual to predicted decrease at
    ``first``. ``rise`` gives that of the loss at a length; what is not finite is too much."""
    ratio = 0.0
    for halving in range(_HALVINGS + 1):
        length = first / 2**halving
        value, predicted = rise(length), length * way.slope + length**2 / 2 * way.bend
        if not halving and predicted < 0:
            ratio = value / predicted
        if -math.inf < value < 0 and value <= _DECREASE * (length * way.slope + length**2 / 2 * min(way.bend, 0.0)):
            break
    else:
        return 0.0, ratio
    for _ in range(_DOUBLINGS if way.is_negative and not halving else 0):
        farther = rise(2 * length)
        if not -math.inf < farther < value:
            break
        length, value = 2 * length, farther
    return length, ratio
