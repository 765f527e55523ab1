"""Power is lost at any instant while a table with dynamic ids admits, evicts and commits: what opens is a version that
was promised, ids, scores, rows and optimizer state, and training goes on from there as it would have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.faults.powerloss import losses, materialise, pending, state
from tests.faults.recovery import crash_points, promised
from tests.faults.syscalls import Recorder
from tests.faults.training_run import other_boot
from tierstore.ids import LFU, LRU, DynamicIds, Eviction, Frequency

CONFIG = tierstore.TableConfig(
    name="item", num_embeddings=150, embedding_dim=40, optimizer=tierstore.optim.Adagrad(lr=0.5), ids=DynamicIds()
)
DDR = "456KiB"
POINTS = 20
STEPS = 24


@dataclass(frozen=True)
class Shown:
    """What a store shows. ``step``: batches that it was trained by."""

    step: int
    ids: tuple[int, ...]
    rows: bytes

    @classmethod
    def of(cls, store: tierstore.Store, step: int) -> "Shown":
        if "item" not in store:
            return cls(step, (), b"")
        table = store["item"]
        assert table.ids is not None
        table.ids.check_integrity()
        ids = np.sort([int(each) for part in table.written() for each in part]).astype(np.int64)
        parts: list[Any] = [table.read(torch.from_numpy(ids)), table.read_state(torch.from_numpy(ids))]
        scores = table.ids.scores_of(ids)
        return cls(step, tuple(ids.tolist()), b"".join([each.numpy().tobytes() for each in parts]) + scores.tobytes())


def train(store: tierstore.Store, step: int) -> None:
    generator = np.random.default_rng(step)
    ids = generator.zipf(1.3, 60) % 400 * 2**50 - 2**57
    out = tierstore.TieredEmbeddingBag(store["item"])(torch.from_numpy(ids), torch.arange(0, 60, 5))
    out.backward(torch.from_numpy(generator.normal(size=out.shape).astype(np.float32)))
    if step % 7 == 6:
        store["item"].evict(torch.from_numpy(ids[:10]))


@pytest.mark.parametrize(("eviction", "admission"), [(LRU(), None), (LFU(5), Frequency(2, 60))])
def test_power_is_lost(tmp_path: Path, eviction: Eviction, admission: Frequency | None) -> None:
    config = tierstore.TableConfig(**{**vars(CONFIG), "ids": DynamicIds(eviction=eviction, admission=admission)})
    home = tmp_path / "life"
    home.mkdir()
    every: list[Shown] = []
    with Recorder(home) as recorder, tierstore.open(home / "store", ddr=DDR, threads=1) as store:
        store.create_table(config)
        pending_commit, begun = None, None
        for step in range(STEPS):
            train(store, step)
            every.append(Shown.of(store, step + 1))
            if step % 3 == 2:
                if pending_commit is not None:
                    pending_commit.result()
                    recorder.mark("returned", begun)
                begun = every[-1]
                recorder.mark("begun", begun)
                pending_commit = store.commit_async(extra={"step": step + 1})
    assert recorder.problems == []
    generator = np.random.default_rng(0)
    empty: Any = Shown(0, (), b"")
    num_states = 0
    for time in generator.permutation(crash_points(recorder))[:POINTS].tolist():
        safe, unsafe = pending(recorder, time)
        versions: list[Any] = promised(recorder, time, empty)[0]
        for loss in losses(recorder, unsafe, generator, 2):
            place = tmp_path / f"state {num_states}"
            materialise(state(recorder, safe, loss, unsafe), place)
            with other_boot(1), tierstore.open(place / "store", ddr=DDR, threads=1) as store:
                step = store.extra.get("step", 0)
                known = next(each for each in versions if each.step == step)
                assert Shown.of(store, step) == known or not step
                store.create_table(config)
                for later in range(step, min(step + 4, STEPS)):
                    train(store, later)
                    assert Shown.of(store, later + 1) == every[later]
                store.commit()
                store.verify()
            num_states += 1
    assert num_states > POINTS
