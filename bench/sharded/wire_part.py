"""Part "wire": the loss that fewer bits on the wire cost, on Criteo's own samples."""

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

import tierstore
from tierstore.dist.owners import Wire
from tierstore.train.readers import FeatureHasher, open_reader

from ..common import Goal, Run, Table
from ..data import ROOT, require_criteo
from ..parts import Part, Told
from .ranks import run_ranks
from .systems import Ours, Setup, train_step

__all__ = ["PART"]

RANKS: Final = 2
_DENSE_LR: Final = 0.05
TEST_ALONE: Final = ("int8 in the test alone", "fp32")
NOISE: Final = ("fp32", "fp32, other layers begin one bit off")
PRECISIONS: Final = (("fp32", "fp32"), NOISE, ("bf16", "bf16"), ("fp16", "fp16"), ("int8", "fp32"), ("int8", "int8"))
"""Of rows, of gradients."""
_GOAL: Final = 1e-5

Batch = tuple[tierstore.KeyedJaggedTensor, Tensor, Tensor]
"""Ids, dense features, labels."""


def _batches(rows: list[int], size: int, first: int, last: int) -> Iterator[Batch]:
    names = [f"f{number}" for number in range(len(rows))]
    for batch in open_reader(require_criteo()).batches(
        FeatureHasher(rows), batch_size=size, start_row=first, stop_row=last
    ):
        jagged = tierstore.KeyedJaggedTensor(names, batch.sparse.values(), offsets=batch.sparse.offsets())
        yield jagged, batch.dense, batch.labels


def _move_by_a_bit(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "embeddings." not in name:
                each.copy_(torch.nextafter(each, torch.full_like(each, torch.inf)))


def _in_rank(config: dict[str, Any]) -> list[float]:
    """Log loss on the test rows of this rank after training, by precision."""
    rank, size = dist.get_rank(), config["wire_batch"]
    rows = tomllib.loads((ROOT / "examples/criteo.toml").read_text())["embedding"]["num_embeddings"]
    end = config["wire_rows"] + config["wire_test_rows"]
    batches, tests = (
        list(itertools.islice(_batches(rows, size, first, last), rank, (last - first) // size // RANKS * RANKS, RANKS))
        for first, last in itertools.pairwise((0, config["wire_rows"], end))
    )
    mlps = config["bottom_mlp"], config["top_mlp"]
    found = []
    for forward, backward in PRECISIONS:
        precision: dict[str, Any] = {"forward_precision": forward, "backward_precision": backward.partition(",")[0]}
        setup = Setup(
            rows, config["dims"][0], "row_wise", mlps=mlps, lr=config["wire_lr"],
            initial_accumulator=config["wire_initial_accumulator"], **precision,
        )  # fmt: skip
        system = Ours(setup)
        if (forward, backward) == NOISE:
            _move_by_a_bit(system.model)
        step = train_step(system, _DENSE_LR)
        for jagged, dense, labels in batches:
            step(jagged, dense, labels)
        found.append(_test_loss(system, tests))
        if len(found) == 1:  # of float32
            system.store.owners.wire = Wire("int8")
            found.append(_test_loss(system, tests))
        system.close()
    return found


def _test_loss(system: Ours, tests: Sequence[Batch]) -> float:
    with torch.no_grad():
        losses = [
            torch.nn.functional.binary_cross_entropy_with_logits(system.model(dense, jagged), labels)
            for jagged, dense, labels in tests
        ]
    return float(torch.stack(losses).double().mean())


def _measure(request: Run, _figures: dict[str, Any]) -> dict[str, Any]:
    of_ranks = run_ranks(_in_rank, RANKS, request.config)
    losses = [sum(each) / RANKS for each in zip(*of_ranks, strict=True)]
    points = [
        {"forward": forward, "backward": backward, "test_loss": loss}
        for (forward, backward), loss in zip([PRECISIONS[0], TEST_ALONE, *PRECISIONS[1:]], losses, strict=True)
    ]
    return {"points": points, **{name: request.config[name] for name in ("wire_rows", "wire_test_rows", "wire_batch")}}


def _tell(figures: dict[str, Any]) -> Told:
    points = figures["points"]
    exact = points[0]["test_loss"]
    rows = [
        [each["forward"], each["backward"], f"{each['test_loss']:.6f}", f"{each['test_loss'] / exact - 1:+.1e}"]
        for each in points
    ]
    table = Table(
        title="log loss on Criteo's test rows, by what crosses between 2 ranks",
        columns=["rows", "gradients", "log loss", "over fp32"],
        rows=rows,
    )
    trained = [each for each in points if "int8" in (each["forward"], each["backward"])]
    goals = [
        Goal(
            name=f"int8 on the wire: log loss off that of float32, relative, {what}",
            value=max(abs(each["test_loss"] / exact - 1) for each in those),
            at_most=_GOAL,
        )
        for what, those in (("same weights", points[1:2]), ("trained with it", trained))
    ]
    note = (
        f"Wire: DLRM of examples/criteo.toml with row-wise Adagrad, one pass over {figures['wire_rows']:,} rows, "
        f"{figures['wire_batch']} a rank and step, tested on the next {figures['wire_test_rows']:,}. Training makes "
        "any difference larger, as that of one bit in the first weights of the other layers shows."
    )
    return Told(tables=[table], goals=goals, notes=[note])


PART: Final = Part(_measure, _tell)
