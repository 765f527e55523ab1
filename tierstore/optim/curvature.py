"""Curvature of a loss at weights: products with vectors by automatic differentiation, which form no matrix, solvers and
eigenvalues by such products alone, and Hessian-free optimization of dense weights by them.

A solver is a generator, which yields after each product; its caller bounds it, and ends it. Martens, "Deep learning via
Hessian-free optimization" (ICML 2010), solves a damped Gauss-Newton system by conjugate gradients. He, Mudigere,
Smelyanskiy and Takac, "Large scale distributed Hessian-free optimization for deep neural network" (2016), solve with
the possibly indefinite Hessian by Bi-CGSTAB, and follow negative curvature that they meet.

Shape legend: P, the elements of all parameters laid end to end.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..system.checks import require_choice, require_int

_WARM: Final = 0.95  # share of the last solution that the next solve begins with, as Martens has it
_PROBE, _TINY = 0.01, 1e-8
"""Length of the random part of a solve's start, over the gradient's and at least: the gradient may have no part along
the directions that lead away from a saddle."""
_ROUNDING: Final = 1e-6  # share of the damping below which negative curvature counts as none
_MIN_DAMPING, _MAX_DAMPING = 1e-8, 1e8
_DECREASE, _HALVINGS, _DOUBLINGS = 1e-4, 16, 8
"""Of the line search: the share of the predicted decrease that it is content with (Armijo, 1966), and trials."""

Product = Callable[[Tensor], Tensor]
"""A matrix as what it does to a vector, [P] to [P]."""


def dense_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those that are trained and have elements. One without stands for rows of tables. TypeError: not of tensors."""
    given = list(parameters)
    if isinstance(parameters, Tensor) or not all(isinstance(each, Tensor) for each in given):
        raise TypeError("parameters must be a list of tensors, as model.parameters()")
    return [each for each in given if each.requires_grad and each.numel()]


class Evaluation:
    """Of a loss, by a closure: within, lookups of this thread are for it. Rows that they look up are not trained before
    it is over; if they ``are_constant``, never: such lookups train, admit, count and write nothing."""

    def __init__(self, *, are_constant: bool, is_over: bool = False) -> None:
        self.are_constant, self.is_over = are_constant, is_over

    def __enter__(self) -> "Evaluation":
        self._before, OF_THREAD.evaluation = OF_THREAD.evaluation, self
        return self

    def __exit__(self, *_: object) -> None:
        OF_THREAD.evaluation, self.is_over = self._before, True

    def require(self, *, is_over: bool) -> None:
        """RuntimeError unless so: a closure called backward."""
        if not is_over:
            raise RuntimeError("the closure of HessianFree called backward, which the step does: return the loss alone")


class _OfThread(threading.local):
    evaluation = Evaluation(are_constant=False, is_over=True)


OF_THREAD: Final = _OfThread()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of all elements, [P]."""
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def split(vector_P: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Views in the parameters' shapes."""
    parts = torch.split(vector_P, [each.numel() for each in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


@torch.no_grad()
def put(vector_P: Tensor, parameters: Sequence[Tensor]) -> None:
    """Set the parameters' values, unseen by autograd: a graph made before holds once the old values are back."""
    for part, each in zip(split(vector_P, parameters), parameters, strict=True):
        each.data.copy_(part)


def require_loss(loss: object) -> Tensor:
    """float []; TypeError: it is none that gradients can be taken of."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise TypeError(
        f"a loss must be a tensor of one element that depends on what is trained, not {found}: take its mean() or "
        "sum(), and leave out item(), detach() and no_grad()"
    )


def slopes(loss: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = False) -> Sequence[Tensor]:
    """Gradients of a loss, whose graph stays. ValueError: one is sparse."""
    found = torch.autograd.grad(loss, parameters, retain_graph=True, create_graph=create_graph, materialize_grads=True)
    if sparse := [list(each.shape) for each in found if each.is_sparse]:
        raise ValueError(
            f"gradients of a parameter {sparse[0]} are sparse, and torch has no second ones: make its module with "
            "sparse=False, or convert it into a table"
        )
    return found


def hessian_product(loss: Tensor, parameters: Sequence[Tensor]) -> Product:
    """The Hessian of a loss, float [], by a second backward pass through the first (Pearlmutter, "Fast exact
    multiplication by the Hessian", 1994). The loss's graph stays."""
    gradients = slopes(loss, parameters, create_graph=True)
    return lambda vector_P: flat(_pulled_back(gradients, parameters, split(vector_P, parameters)))


def gauss_newton_product(loss: Tensor, outputs: Tensor, parameters: Sequence[Tensor]) -> Product:
    """The generalized Gauss-Newton matrix ``J' L J``: J the Jacobian of a model's outputs, L the Hessian by the outputs
    (Schraudolph, "Fast curvature matrix-vector products", 2002). ``J v`` is the derivative of ``J' u`` by u, so that
    backward passes suffice. ValueError: the loss, float [], does not depend on ``outputs``."""
    (slope,) = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    if slope is None:
        raise ValueError("outputs: the loss does not depend on them; return the tensor it was computed from")
    covector = torch.zeros_like(outputs, requires_grad=True)
    pulled = torch.autograd.grad(outputs, parameters, covector, create_graph=True, materialize_grads=True)

    def product(vector_P: Tensor) -> Tensor:
        pushed = _pulled_back(pulled, [covector], split(vector_P, parameters))
        return flat(_pulled_back([outputs], parameters, _pulled_back([slope], [outputs], pushed)))

    return product


def _pulled_back(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The sum of products of vectors with the outputs' Jacobians; constants, as slopes of what is linear, add 0."""
    pairs = [pair for pair in zip(outputs, vectors, strict=True) if pair[0].requires_grad]
    if not pairs:
        return [torch.zeros_like(each) for each in inputs]
    of, by = zip(*pairs, strict=True)
    return torch.autograd.grad(of, inputs, by, retain_graph=True, materialize_grads=True)


class Iterate(NamedTuple):
    """Of ``A x = b`` after a move: x; ``b - A x``; the move's direction, and A times it. Where the product of these two
    is not above 0, the move meant nothing to conjugate gradients; where one is NaN, the caller is to end."""

    solution: Tensor
    residual: Tensor
    direction: Tensor
    image: Tensor


def conjugate_gradients(product: Product, right: Tensor, start: Tensor) -> Iterator[Iterate]:
    """Of a positive definite matrix (Hestenes and Stiefel, 1952)."""
    solution, residual = start, right - product(start)
    direction, square = residual, residual @ residual
    while square != 0:
        image = product(direction)
        length = square / (direction @ image)
        solution, residual = solution + length * direction, residual - length * image
        yield Iterate(solution, residual, direction, image)
        square, before = residual @ residual, square
        direction = residual + square / before * direction


def bicgstab(product: Product, right: Tensor, start: Tensor) -> Iterator[Iterate]:
    """Stabilised bi-conjugate gradients, of indefinite matrices too (van der Vorst, "Bi-CGSTAB: a fast and smoothly
    converging variant of Bi-CG", 1992). An iteration is two moves: in its direction, and along the residual left."""
    solution, residual = start, right - product(start)
    shadow = direction = residual
    overlap = shadow @ residual
    while overlap != 0:
        image = product(direction)
        length = overlap / (shadow @ image)
        solution, left = solution + length * direction, residual - length * image
        yield Iterate(solution, left, direction, image)
        of_left = product(left)
        smoothing = (of_left @ left) / (of_left @ of_left)
        solution, residual = solution + smoothing * left, left - smoothing * of_left
        yield Iterate(solution, residual, left, of_left)
        overlap, before = shadow @ residual, overlap
        direction = residual + overlap / before * length / smoothing * (direction - smoothing * image)


class Eigenvalues(NamedTuple):
    """The ends of a spectrum."""

    smallest: float
    largest: float


def extreme_eigenvalues(product: Product, start: Tensor, *, iterations: int, tolerance: float) -> Eigenvalues:
    """Of a symmetric matrix, by Lanczos' iteration with full orthogonalization (Golub and Van Loan, "Matrix
    Computations", 10.3), whose vectors take P for each iteration. It begins with ``start``, a random [P], and ends when
    the residuals of both are within ``tolerance`` of the larger one's size. NaN where a product is not finite."""
    most = min(iterations, len(start))
    vectors_KP = start.new_empty(most + 1, len(start))
    vectors_KP[0] = start / start.norm()
    tridiagonal = torch.zeros(most + 1, most + 1, dtype=torch.float64)
    ends = torch.zeros(2)
    for step in range(most):
        image, known = product(vectors_KP[step]), vectors_KP[: step + 1]
        tridiagonal[step, step] = float(image @ vectors_KP[step])
        if not image.isfinite().all():
            return Eigenvalues(math.nan, math.nan)
        for _ in range(2):  # once leaves rounding errors that make copies of an eigenvalue
            image = image - known.T @ (known @ image)
        norm = float(image.norm())
        values, parts = torch.linalg.eigh(tridiagonal[: step + 1, : step + 1])
        ends = values[[0, -1]]
        if norm * float(parts[-1, [0, -1]].abs().max()) <= tolerance * float(ends.abs().max()):
            break
        tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = norm
        vectors_KP[step + 1] = image / norm
    return Eigenvalues(*ends.tolist())


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
            solver, product = bicgstab, hessian_product(loss, dense)
            generator = torch.Generator().manual_seed(self._seed + int(state["step"]))
            noise = torch.randn(len(start), generator=generator, dtype=start.dtype).to(start.device)
            start += (_PROBE * gradient.norm() + _TINY) / noise.norm() * noise
        elif outputs is None:
            raise TypeError('the closure gave a loss alone: with curvature="gauss-newton" return (loss, outputs)')
        else:
            solver, product = conjugate_gradients, gauss_newton_product(loss, outputs, dense)

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
