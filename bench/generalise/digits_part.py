"""Part "digits": loss against iterations at two batch sizes, by a small network on scikit-learn's digits.

He, Mudigere, Smelyanskiy and Takac (2016) show it for handwritten digits at batches of 512 and 5,120. Each of the 1,797
digits here stands nine times, moved by up to one pixel, so that a batch of 5,120 is a part of them.
"""

import functools
import itertools
import math
import time
from collections.abc import Iterator
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from tierstore.models import box_sharpness, loss_along_line
from tierstore.optim import HessianFree

from ..common import Part, Report, Run, Table

__all__ = ["PART"]

_SIDE: Final = 8
_HELD_OUT: Final = 360
_CURVATURE: Final = 4
"""A step's curvature is that of one in so many of the batch's samples."""
_MARKS: Final = 20
_SHARES: Final = (0.1, 0.25, 0.5, 1.0)
_LINE: Final = (-0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
_NAMES: Final = {
    "sgd": "SGD, momentum 0.9",
    "adam": "Adam",
    "hessian": "Hessian-free, Bi-CGSTAB",
    "gauss-newton": "Hessian-free, Gauss-Newton",
}
_OTHERS: Final = {"error": ".2%", "sharpness": ".3g", "seconds": ".1f"}


class Digits(NamedTuple):
    """Images, float32 [n, 64], 0 to 1, and which digit each is, int64 [n]."""

    images: Tensor
    digits: Tensor


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """To train on, each moved nine ways; and held out, as they are."""
    found = load_digits()
    images = torch.from_numpy(found.images).float() / 16
    labels = torch.from_numpy(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    padded = pad(images[_HELD_OUT:], (1, 1, 1, 1))
    moves = [padded[:, y : y + _SIDE, x : x + _SIDE] for y, x in itertools.product(range(3), repeat=2)]
    own = Digits(torch.cat(moves).flatten(1), labels[_HELD_OUT:].repeat(len(moves)))
    return own, Digits(images[:_HELD_OUT].flatten(1), labels[:_HELD_OUT])


def _optimizer(kind: str, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate)
    return HessianFree(model.parameters(), curvature=kind, damping=rate)  # type: ignore[arg-type]


def _batches(count: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Rows of each step, an order of all after another."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.split(torch.randperm(count, generator=generator), batch)[: count // batch]


class Trained(NamedTuple):
    """Losses over all training digits, before each twentieth of the steps and after the last; what came of it."""

    losses: list[float]
    seconds: float
    error: float
    """Share of the held-out digits that are taken for another."""
    sharpness: float
    weights: list[Tensor]


class _Net:
    """64, 64, 32 and 10 neurons, and their loss over training digits."""

    def __init__(self, seed: int) -> None:
        self.own, self.held_out = digits()
        torch.manual_seed(seed)
        sizes = itertools.pairwise([_SIDE**2, 64, 32, 10])
        layers = [layer for pair in sizes for layer in (nn.Linear(*pair), nn.Tanh())]
        self.model = nn.Sequential(*layers[:-1])

    def loss_of(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        outputs = self.model(self.own.images[rows])
        return cross_entropy(outputs, self.own.digits[rows]), outputs

    def whole(self) -> Iterator[Tensor]:
        yield self.loss_of(slice(None))[0]

    def step(self, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        if isinstance(optimizer, HessianFree):
            part = rows[: math.ceil(len(rows) / _CURVATURE)]
            optimizer.step(lambda: self.loss_of(rows), lambda: self.loss_of(part))
        else:
            optimizer.zero_grad()
            self.loss_of(rows)[0].backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def train(kind: str, rate: float, batch: int, steps: int, seed: int) -> Trained:
    torch.set_num_threads(1)
    net, losses, seconds = _Net(seed), list[float](), 0.0
    optimizer, weights = _optimizer(kind, net.model, rate), list(net.model.parameters())
    for step, rows in zip(range(steps + 1), _batches(len(net.own.images), batch, seed), strict=False):
        if step % max(steps // _MARKS, 1) == 0 or step == steps:
            with torch.no_grad():
                losses += [float(each) for each in net.whole()]
        if step < steps:
            start = time.perf_counter()
            net.step(optimizer, rows)
            seconds += time.perf_counter() - start
    with torch.no_grad():
        error = float((net.model(net.held_out.images).argmax(1) != net.held_out.digits).float().mean())
    sharpness = box_sharpness(net.whole, weights)
    return Trained(losses, seconds, error, sharpness, [each.detach().clone() for each in weights])


def _measure(request: Run, _: dict[str, Any]) -> dict[str, Any]:
    config, found = request.config, dict[str, dict[str, Any]]()
    steps, seeds, batches = config["digits_steps"], config["digits_seeds"], config["digits_batches"]
    for kind, rates in config["digits_rates"].items():
        ends, found[kind] = list[list[Tensor]](), {}
        for batch in batches:
            tried = {rate: [train(kind, rate, batch, steps, seed) for seed in seeds] for rate in rates}
            rate, best = min(tried.items(), key=lambda each: fmean(run.losses[-1] for run in each[1]))
            ends.append(best[0].weights)
            found[kind][str(batch)] = {"rate": rate, "runs": [run._replace(weights=[]) for run in best]}
            print(kind, batch, rate, best[0].losses[-1], flush=True)
        net = _Net(seeds[0])
        found[kind]["line"] = loss_along_line(net.whole, net.model.parameters(), ends[0], ends[-1], _LINE)
    return {"optimizers": found, "steps": steps, "batches": batches}


def _tell(figures: dict[str, Any]) -> Report:
    found, steps, rows, lines = figures["optimizers"], figures["steps"], list[list[str]](), list[list[str]]()
    for kind, shown in _NAMES.items():
        for batch in figures["batches"]:
            own = found[kind][str(batch)]
            runs, last = own["runs"], len(own["runs"][0]["losses"]) - 1
            losses = [f"{fmean(run['losses'][round(last * share)] for run in runs):.4f}" for share in _SHARES]
            others = [f"{fmean(run[name] for run in runs):{form}}" for name, form in _OTHERS.items()]
            rows.append([shown, f"{batch:,}", f"{own['rate']:g}", *losses, *others])
        lines.append([shown, *(f"{loss:.4f}" for loss in found[kind]["line"])])
    columns = ["optimizer", "batch", "rate", *(f"loss, step {round(steps * share)}" for share in _SHARES)]
    columns += ["held-out errors", "sharpness 1e-3, %", "seconds"]
    title = f"Digits: loss of all training digits over {steps} steps, at the best of four rates; means over seeds"
    title_of_lines = "Loss on the line from the end point of the smaller batch, at 0, to that of the larger, at 1"
    along = Table(title_of_lines, ["optimizer", *(f"{place:g}" for place in _LINE)], lines)
    note = (
        "Digits: scikit-learn's 1,797, of which 1,437 train, each moved nine ways by up to a pixel, and 360 are held "
        "out. Rates of Hessian-free steps are their first damping; a quarter of a batch gives their curvature."
    )
    return Report([Table(title, columns, rows), along], notes=[note])


PART: Final = Part(_measure, _tell)
