"""What the run under test does: a list of actions and the batches they train on, the same each time.

The state after so many actions is a function of their number alone, its *position*: a version goes by the position at
which it was committed, so a process that takes up a version knows what comes next. Going back to an earlier version is
an action like any other; after it the run has that version's rows and goes on behind the action.
"""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

import tierstore
from tierstore import optim

__all__ = ["FEATURES", "Action", "Batch", "configs", "make_batch", "make_plan", "stretch"]

FEATURES: Final = ("clicked", "viewed", "user", "session")
SAMPLES: Final = 24
_LONGEST_BAG: Final = 6
_SESSIONS: Final = 450
_STEPS_A_COMMIT: Final = (2, 4, 3)
_COMMITS_A_ROLLBACK: Final = 4


class Action(NamedTuple):
    """``number``: of a training step, its batch; of a rollback, the position that it goes back to."""

    kind: Literal["train", "commit", "rollback"]
    number: int = 0


class Batch(NamedTuple):
    """Jagged ids of ``FEATURES`` for ``SAMPLES`` samples, and a float32 target of each."""

    sparse: tierstore.KeyedJaggedTensor
    target: Tensor


def configs() -> list[tierstore.TableConfig]:
    """Three tables of different layouts and optimizers; two features share one of them, and one has dynamic ids, of
    which it has rows for a third."""
    return [
        tierstore.TableConfig(
            name="item",
            num_embeddings=900,
            embedding_dim=28,
            feature_names=("clicked", "viewed"),
            init=tierstore.init.Uniform(-1, 1, seed=3),
            optimizer=optim.Adagrad(lr=0.05),
        ),
        tierstore.TableConfig(
            name="user",
            num_embeddings=700,
            embedding_dim=16,
            init=tierstore.init.Uniform(-1, 1, seed=4),
            optimizer=optim.Adam(lr=0.02),
        ),
        tierstore.TableConfig(
            name="session",
            num_embeddings=_SESSIONS // 3,
            embedding_dim=12,
            init=tierstore.init.Uniform(-1, 1, seed=5),
            optimizer=optim.RowWiseAdagrad(lr=0.05),
            ids=tierstore.DynamicIds(admission=tierstore.ids.Frequency(2)),
        ),
    ]


def make_plan(num_commits: int) -> tuple[Action, ...]:
    """So many commits with a few steps before each, and after every fourth commit a step and a rollback: to the version
    before the last, and to the last one, in turn."""
    plan: list[Action] = []
    marks: list[int] = []
    batch = 0
    for commit in range(num_commits):
        steps = _STEPS_A_COMMIT[commit % len(_STEPS_A_COMMIT)]
        plan += [Action("train", number) for number in range(batch, batch + steps)]
        batch += steps
        plan.append(Action("commit"))
        marks.append(len(plan))
        turn, rest = divmod(commit + 1, _COMMITS_A_ROLLBACK)
        if not rest and commit + 1 < num_commits:
            plan += [Action("train", batch), Action("rollback", marks[-1 if turn % 2 == 0 else -2])]
            batch += 1
    return tuple(plan)


def stretch(plan: Sequence[Action], position: int) -> Sequence[Action]:
    """The actions from ``position`` on that need no rollback; a rollback is a stretch of its own."""
    for end in range(position, len(plan)):
        if plan[end].kind == "rollback":
            return plan[position : max(end, position + 1)]
    return plan[position:]


def make_batch(number: int) -> Batch:
    """Skewed ids, some bags empty."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, _LONGEST_BAG, (len(FEATURES) * SAMPLES,), generator=generator)
    rows = {name: config.num_embeddings for config in configs() for name in config.feature_names}
    rows["session"] = _SESSIONS
    ids = []
    for name, own in zip(FEATURES, lengths.view(len(FEATURES), SAMPLES), strict=True):
        ids.append((torch.rand(int(own.sum()), generator=generator) ** 2 * rows[name]).long())
    target = torch.rand(SAMPLES, generator=generator)
    return Batch(tierstore.KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths), target)
