"""The training run that is killed: what it has done is a function of its position, the number of steps so far.

A version goes by the position at which it was committed, so a process that takes one up knows what comes next.
"""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

import tierstore
from tierstore import optim
from tierstore.exchange.rows import read_rows
from tierstore.io import row_file, superblock
from tierstore.io.files import ROW_FILE_NAME
from tierstore.store.manifest import MANIFEST_NAME
from tierstore.system import killpoints

STEPS_A_COMMIT: Final = 3
FEATURES: Final = ("clicked", "viewed", "user", "session")
_SAMPLES: Final = 24
_LONGEST_BAG: Final = 6
_SESSIONS: Final = 450
_RATE_DECAY: Final = 0.995
Report = Callable[..., None]
"""``report(label, **values)`` is one write, so that a kill loses it whole or not at all."""
State = dict[str, Any]
"""Every bit that a version holds, by a name in words."""
_KINDS: Final[list[tuple[str, int, int, tierstore.optim.Optimizer, dict[str, Any]]]] = [
    ("item", 900, 28, optim.Adagrad(lr=0.05), {"feature_names": ("clicked", "viewed")}),
    ("user", 700, 16, optim.Adam(lr=0.02), {}),
    (
        "session", _SESSIONS // 3, 12, optim.RowWiseAdagrad(lr=0.05),
        {"ids": tierstore.DynamicIds(admission=tierstore.ids.Frequency(2))},
    ),
]  # fmt: skip
CONFIGS: Final = [
    tierstore.TableConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, optimizer=rule,
        init=tierstore.init.Uniform(-1, 1, seed=3 + place), **more,
    )
    for place, (name, rows, dim, rule, more) in enumerate(_KINDS)
]  # fmt: skip
"""Three layouts and optimizers; two features share a table, and one has dynamic ids, with rows for a third."""


def quiet(_label: str, **_values: Any) -> None:
    """A report that nobody hears."""


def _batch(number: int) -> tuple[tierstore.KeyedJaggedTensor, Tensor]:
    """Skewed ids of ``FEATURES``, some bags empty, and a float32 target of each sample."""
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, _LONGEST_BAG, (len(FEATURES) * _SAMPLES,), generator=generator)
    rows = {name: config.num_embeddings for config in CONFIGS for name in config.feature_names}
    rows["session"] = _SESSIONS
    ids = []
    for name, own in zip(FEATURES, lengths.view(len(FEATURES), _SAMPLES), strict=True):
        ids.append((torch.rand(int(own.sum()), generator=generator) ** 2 * rows[name]).long())
    target = torch.rand(_SAMPLES, generator=generator)
    return tierstore.KeyedJaggedTensor(FEATURES, torch.cat(ids), lengths=lengths), target


class _Dense:
    """Weights, and the state of the random numbers: all of it is committed alongside the rows."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self._layer = torch.nn.Linear(sum(each.embedding_dim * len(each.feature_names) for each in CONFIGS), 1)
        self._optimizer = torch.optim.SGD(self._layer.parameters(), lr=0.01)

    def step(self, pooled: Tensor, target: Tensor) -> None:
        """The gradient goes on to where ``pooled``, float32 [samples, columns], came from."""
        noisy = pooled + 0.1 * torch.rand(pooled.shape)
        loss = (self._layer(noisy).squeeze(1) - target).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        found = {name: tensor.clone() for name, tensor in self._layer.state_dict().items()}
        return found | {"random": torch.get_rng_state()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._layer.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "random"})
        torch.set_rng_state(tensors["random"])


def train(
    directory: Path, commits: int, report: Report = quiet, *, depth: int = 2,
    look: Callable[[int, tierstore.Store], None] | None = None, **settings: Any,
) -> None:  # fmt: skip
    """Go on from the store's version until there were so many commits; no bit depends on how it is opened. Reports
    "opened", and of commits "begin" and "durable" or "failed"; ``look`` is given each position while nothing else goes
    on."""
    with tierstore.open(directory, threads=1, **settings) as store:
        for config in CONFIGS:
            store.create_table(config)
        collection, dense = tierstore.TieredEmbeddingBagCollection(store), _Dense()
        if store.version:
            dense.load(store.tensors())
        first = int(store.extra.get("position", 0))
        if look is not None:
            look(first, store)
        report("opened", position=first)
        steps = range(first, commits * STEPS_A_COMMIT)
        ahead = tierstore.prefetch(map(_batch, steps), collection, depth=depth, features=lambda batch: batch[0])
        with contextlib.closing(ahead):
            for position, (ids, target) in enumerate(ahead, first + 1):
                dense.step(collection(ids).values(), target)
                for table in store.tables.values():
                    table.learning_rate *= _RATE_DECAY
                if position % STEPS_A_COMMIT == 0:
                    report("begin", position=position)
                    pending = store.commit_async(extra={"position": position}, tensors=dense.tensors())
                    pending.add_done_callback(lambda done, position=position: _tell(report, done, position))  # type: ignore[misc]
                    if look is not None:
                        pending.result()
                        look(position, store)


def _tell(report: Report, done: Any, position: int) -> None:
    error = done.exception()
    if error is None:
        report("durable", position=position, version=done.result())
    else:
        report("failed", words=f"the commit at {position}: {error!r}")


def live(
    directory: Path, commits: int, report: Report, *, boot: int, kill_at: tuple[str, int], growth_bytes: int,
    **settings: Any,
) -> None:  # fmt: skip
    """``train`` in a process of its own, which ends at the ``kill_at[1]``-th time the point ``kill_at[0]`` is
    reached. ``growth_bytes``: written between two anchors in the background."""
    reached: Counter[str] = Counter()

    def hook(name: str) -> None:
        reached[name] += 1
        if (name, reached[name]) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    killpoints.hook = hook
    watch_names(hook)
    row_file.GROWTH_BYTES = growth_bytes  # type: ignore[misc]
    with other_boot(boot):
        train(directory, commits, report, **settings)


def expected_states(directory: Path, commits: int) -> dict[int, State]:
    """By position, what each version holds in a run that nobody kills: all rows in memory, each commit waited for. At
    0, what there is before the first."""
    states: dict[int, State] = {}

    def look(position: int, store: tierstore.Store) -> None:
        states[position] = state_of(store)

    train(directory, commits, look=look, ddr="8MiB", keep=2, depth=0)
    return states


def state_of(store: tierstore.Store) -> State:
    """Of dynamic ids: those that have rows, in order, each with its score."""
    found: State = {}
    for name, table in store.tables.items():
        if table.ids is None:
            columns: list[Any] = list(read_rows(table, 0, table.config.num_embeddings))
        else:
            ids = table.ids.listed()
            given, scores = torch.from_numpy(ids), table.ids.scores_of(ids).astype(np.uint32)
            columns = [ids[:, None], scores[:, None], table.read(given).numpy(), table.read_state(given).numpy()]
        found[f"rows of {name}"] = np.hstack([each.view(np.uint8) for each in columns])
        found[f"step and rate of {name}"] = (table.state.step, table.state.learning_rate)
    tensors = {name: each.contiguous().reshape(-1).view(torch.uint8) for name, each in store.tensors().items()}
    return found | {f"tensor {name}": each.numpy().copy() for name, each in tensors.items()}


def different(expected: State, found: State, *, may_lack: bool) -> list[str]:
    """Names of what differs. ``may_lack``: the tables may not have been created yet."""
    names = expected.keys() | found.keys()
    wrong = [name for name in names if not np.array_equal(expected.get(name, ()), found.get(name, ()))]
    return sorted(name for name in wrong if name in found or " of " not in name or not may_lack)


@contextlib.contextmanager
def other_boot(number: int) -> Iterator[None]:
    """As if the machine had started again so many times."""
    real = superblock.boot_id
    superblock.boot_id = lambda: b"start" + number.to_bytes(11, "little")
    try:
        yield
    finally:
        superblock.boot_id = real


def watch_names(hook: Callable[[str], None]) -> None:
    points = {
        MANIFEST_NAME: ("manifest: written beside", "manifest: replaced"),
        ROW_FILE_NAME: ("rows file: made under another name", "rows file: in place"),
    }

    def watched(call: Callable[..., None]) -> Callable[..., None]:
        def named(source: Any, target: Any) -> None:
            before, after = points.get(Path(target).name, (None, None))
            if before:
                hook(before)
            call(source, target)
            if after:
                hook(after)

        return named

    for name in ("link", "rename", "replace"):
        setattr(os, name, watched(getattr(os, name)))
